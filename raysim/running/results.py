"""Results in Python: run directories as objects, tables as pandas DataFrames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from raysim.base.direction import Direction, direction_of, main_of
from raysim.base.errors import DataError, explained
from raysim.base.settings import differing, flatten
from raysim.config import Config, nearest
from raysim.data.arrow import SetInfo
from raysim.folders.run_folder import RunFolder, Status
from raysim.folders.storage import local_copy

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from raysim.models import ModelSpec


class Run:
    """A run directory, finished or not. Files are read on first access; `reload` reads them again.

    Attributes:
      folder: the run directory.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files = RunFolder(self.folder)
        if not self._files.is_run:
            raise DataError("no run directory", str(self.folder), "give a folder that `raysim run` wrote")

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        return f"Run({str(self.folder)!r}, {self.status.name}{accuracy})"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def sweep(self) -> str:
        """Name of the run's sweep; empty for a run outside of a sweep."""
        return next((folder.name for folder in list(self.folder.parents)[:2] if (folder / "sweep.yaml").is_file()), "")

    @property
    def status(self) -> Status:
        """Status of the run: completed, stopped, failed or unfinished, with a message."""
        return self._files.status

    @cached_property
    def config(self) -> dict[str, object]:
        """Complete configuration; empty for a trial that failed early."""
        if not self._files.config.is_file():
            return {}
        with _sound(self._files.config):
            return self._files.read_config()

    @cached_property
    def summary(self) -> dict[str, object]:
        """summary.json; empty before the run is completed."""
        if not self._files.summary.is_file():
            return {}
        with _sound(self._files.summary):
            return self._files.read_json(self._files.summary)

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of the last evaluation, between 0 and 1; None without an evaluation."""
        return next(reversed(self._scores("server/accuracy")), None)

    @property
    def best_accuracy(self) -> float | None:
        """Best test accuracy of all evaluations, selected on the test set; None without an evaluation."""
        return max(self._scores("server/accuracy"), default=None)

    @property
    def main_metric(self) -> str:
        """Name of the task's main metric, such as accuracy."""
        return main_of(self.history.columns)

    @property
    def score(self) -> float | None:
        """Main metric on the test set at the last evaluation; None without an evaluation."""
        return next(reversed(self._scores(f"server/{self.main_metric}")), None)

    @cached_property
    def history(self) -> pd.DataFrame:
        """progress.csv: one row per round, one column per metric; NaN in rounds without an evaluation."""
        import pandas as pd

        with _sound(self._files.progress):
            rows = pd.DataFrame(self._files.progress_rows()).replace("", np.nan)
            return rows.astype(float).astype({"round": int}).set_index("round") if len(rows) else rows

    @cached_property
    def clients(self) -> pd.DataFrame:
        """clients.parquet: one row per round and client."""
        import pandas as pd

        with _sound(self._files.clients):
            table = self._files.client_rows()
            return pd.DataFrame() if table is None else table.to_pandas()

    def arrays(self, name: str) -> dict[int, pd.DataFrame | np.ndarray]:
        """Return the arrays that methods logged under a name: round -> values.

        Arrays with two axes are DataFrames: a row for each client of the cohort, indexed by id, and columns with the
        method's names (FedVG's norms: one column per tensor). Other arrays are NumPy arrays.

        Raises:
          KeyError: no array of this name was logged; the error lists the names that were logged.
          DataError: a file is damaged.
        """
        rounds: dict[int, pd.DataFrame | np.ndarray] = {}
        names: dict[str, None] = {}
        for index, arrays in self._files.logged_arrays():
            names |= dict.fromkeys(key for key in arrays if ":" not in key)
            if name in arrays:
                rounds[index] = _labelled(name, arrays)
        if not rounds:
            logged = f"there is {', '.join(names)}" if names else "no method logged arrays"
            raise KeyError(f"no array {name!r} in {self.folder}: {logged}")
        return rounds

    def model(self, client: int | None = None) -> nn.Module:
        """Return the network with the final global parameters, in eval mode, for inputs normalised as in the run.

        A regression predicts in the units of the targets: a forward hook reverses `data.scale_targets`.

        Args:
          client: id of a client; the network then has the personal model or the personal layers of the client after the
            client's last round.
        Raises:
          DataError: the run is not completed, a file of the run is damaged, or the client keeps no weights.
        """
        from safetensors.torch import load_file

        from raysim.models import build_model
        from raysim.plan.build import model_spec
        from raysim.training.tasks import unscaled

        if not self._files.model.is_file():
            raise DataError("no model.safetensors", str(self.folder), "finish the run: the same command resumes")
        with _sound(self._files.config):
            config = Config.model_validate(self._files.read_config())
        with _sound(self._files.summary):
            facts = self._files.read_json(self._files.summary)
            shape, outputs = tuple(facts["input_shape"]), tuple(map(str, range(facts["num_classes"])))
            kind, vocabulary = facts["input_type"], facts["vocabulary"]
            spec = model_spec(config, SetInfo("", outputs, shape, 0, "", input_type=kind, vocabulary=vocabulary))
        module = build_model(spec, seed=config.seed)
        self._files.check_unchanged(self._files.model)
        with _sound(self._files.model):
            module.load_state_dict(load_file(self._files.model))
        if client is not None:
            module.load_state_dict(self._own_weights(client, config, spec), strict=False)
        if scale := facts.get("target_scale"):
            module.register_forward_hook(lambda _module, _inputs, outputs: unscaled(outputs, *scale))
        return module.eval()

    def reload(self) -> Run:
        """Return the run with all files read at once, before a later process overwrites them."""
        run = Run(self.folder)
        _ = run.config, run.summary, run.history, run.clients
        return run

    def _own_weights(self, client: int, config: Config, spec: ModelSpec) -> dict[str, Tensor]:
        """Return name -> tensor of a client's own model or personal layers, from the newest checkpoint."""
        import torch

        from raysim.engine.checkpoint import CheckpointStore
        from raysim.engine.client_results import ENGINE
        from raysim.plan.build import layout_for
        from raysim.plan.find import build_methods

        store = CheckpointStore(self._files.checkpoints)
        checkpoint = store.latest()
        path = checkpoint.memories.get(client) if checkpoint else None
        memory = store.read_memory(path) if path else {}
        layout = layout_for(config.model, spec, build_methods(config.methods)[0])
        weights = {name: torch.from_numpy(value) for name, value in memory.get(ENGINE, {}).items()}
        for kept in memory.values():
            if "own_model" in kept:
                weights = layout.views(torch.from_numpy(kept["own_model"]))
        if not weights:
            mend = "choose a client that was drawn, in a run with own models (ditto) or personal layers"
            raise DataError(f"client {client} keeps no weights", str(self.folder), mend)
        return weights

    def _scores(self, metric: str) -> list[float]:
        """Return the values of a column of progress.csv, in the order of rounds."""
        return self.history[metric].dropna().tolist() if metric in self.history else []

    @property
    def _numbers(self) -> dict[str, float]:
        """Return the run's numbers: numbers of the summary, and the last value of each column of progress.csv.

        Non-finite last values, of a run that diverged, are left out: an earlier finite value would be of another round.
        """
        rows = self._files.progress_rows()
        last = {name: float(text) for row in rows for name, text in row.items() if text}
        numbers = {name: float(value) for name, value in self.summary.items() if isinstance(value, int | float)}
        return {name: value for name, value in (numbers | last).items() if math.isfinite(value)}


class Runs(Sequence[Run]):
    """Several runs, returned by `raysim.tune` and `raysim.load`."""

    def __init__(self, runs: Iterable[Run], folder: Path | None = None):
        self._runs, self.folder = tuple(runs), folder

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self._runs[index], self.folder) if isinstance(index, slice) else self._runs[index]

    def __repr__(self) -> str:
        names = ", ".join(run.name for run in self._runs[:5])
        return f"Runs of {len(self)}: {names}{' ...' if len(self) > 5 else ''}"

    def frame(self) -> pd.DataFrame:
        """Return a table with a row per run, indexed by name: sweep, varying settings or labels, accuracies, status."""
        import pandas as pd

        labels = [_labels(run) for run in self]
        varying = differing(labels)
        rows = [
            ({"sweep": run.sweep} if any(each.sweep for each in self) else {})
            | {name: row.get(name) for name in varying}
            | {"accuracy": run.accuracy, "best_accuracy": run.best_accuracy, "status": run.status.name}
            for run, row in zip(self, labels, strict=True)
        ]
        return pd.DataFrame(rows, index=pd.Index([run.name for run in self], name="run"))

    def best(self, metric: str = "server/accuracy", mode: Direction | None = None) -> Run:
        """Return the completed run with the best last value of a metric.

        Args:
          metric: a column of progress.csv, or a number of summary.json.
          mode: which values are better, "max" or "min"; None: as the metric declares, such as "min" for losses.
        Raises:
          DataError: no completed run recorded the metric.
        """

        numbers = {run: run._numbers for run in self if run.status.name == "completed"}
        values = {run: each[metric] for run, each in numbers.items() if metric in each}
        if not values:
            metrics = {name for each in numbers.values() for name in each}
            mend = nearest(metric, list(metrics)) if metrics else "finish a run"
            raise DataError(f"no completed run has {metric!r}", str(self.folder or ""), mend)
        best = max if direction_of(metric, mode) == "max" else min
        return best(values, key=values.__getitem__)


def load(folder: str | Path) -> Run | Runs:
    """Load a run directory as a `Run`, or a folder of runs, for example of a sweep, as `Runs`.

    Args:
      folder: a folder, or a URI such as s3://bucket/runs/a; for a URI, a local copy is read.
    Raises:
      DataError: no such folder, or no run in it; the URI cannot be read.
    """
    path = local_copy(folder)
    if RunFolder(path).is_run:
        return Run(path)
    if not path.is_dir():
        raise DataError("no such folder", str(path), "give a run directory, or a folder of runs")
    runs = [Run(files.path) for files in RunFolder.below(path)]
    if not runs:
        raise DataError("no run directory", str(folder), "give a folder below which `raysim run` wrote runs")
    return Runs(runs, path)


@contextmanager
def _sound(file: Path) -> Iterator[None]:
    """Turn errors of reading a file of a run into DataError: the file is damaged."""
    mend = "delete the folder and repeat the run"
    with explained(f"{file.name} is damaged", file.parent, mend, Exception):  # parsers of four formats raise any class
        yield


def _labelled(name: str, arrays: Mapping[str, np.ndarray]) -> pd.DataFrame | np.ndarray:
    import pandas as pd

    values, columns, clients = arrays[name], arrays.get(f"{name}:columns"), arrays.get(f"{name}:clients")
    return pd.DataFrame(values, index=clients, columns=columns) if values.ndim == 2 else values


def _labels(run: Run) -> dict[str, object]:
    """Return the labels of a trial of a sweep; without labels, the settings by dotted keys."""
    labels = run.config.get("labels")
    if isinstance(labels, dict) and labels:
        return labels
    return flatten({key: value for key, value in run.config.items() if key not in ("name", "storage", "resources")})
