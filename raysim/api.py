"""What `import raysim` offers: runs, sweeps and reports from Python. The command is a thin layer over the same functions.

run = raysim.run("configs/quickstart.yaml", rounds=5, methods=["fedprox", {"fedvg": {"granularity": "block"}}])
run.accuracy, run.history, run.arrays("fedvg.norms"), run.model()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raysim.config import read_config
from raysim.core.errors import ConfigError, DataError, Fault
from raysim.core.settings import Settings
from raysim.own_code import named
from raysim.results import Run, Runs
from raysim.sweep import scaled

if TYPE_CHECKING:
    import numpy as np

    from raysim.data.arrow import SetInfo
    from raysim.engine.metrics import RoundRecord
    from raysim.reporting.results import Report

#: A YAML file, settings as nested dictionaries, or nothing: the defaults.
ConfigSource = str | Path | Mapping[str, object] | None

#: Called after every round with its record; "stop" ends the run after this round, completed.
OnRound = Callable[["RoundRecord"], "Literal['stop'] | None"]


def run(
    config: ConfigSource = None,
    overrides: Mapping[str, object] | None = None,
    /,
    *,
    on_round: OnRound | None = None,
    scale: bool = False,
    quiet: bool = False,
    **settings: object,
) -> Run:
    """Run a federation and return its run directory as an object. An unfinished run of that name goes on.

    Args:
      config: a YAML file, or settings as nested dictionaries.
      overrides: settings by dotted keys, {"partition.alpha": 0.1}; they go before `config`.
      on_round: called after every round; what it raises ends the run, unfinished; "stop" ends it, completed.
      scale: lay the file's `scale` settings over it, as --scaled does.
      quiet: no lines about progress.
      settings: as overrides, with two underscores for a dot: `partition__alpha=0.1`. A dictionary is laid over its group,
        `local={"lr": 0.1}`. `methods` takes names, {name: options}, `raysim.methods.fedprox(mu=0.1)`, and functions of
        your own that return a Method.
    Raises:
      ConfigError: every fault of the configuration. RaysimError: what ended the run, in words.
      KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint was written, and the same call goes on.
    """
    from raysim.check import check
    from raysim.engine.simulation import Interrupted
    from raysim.runner import execute
    from raysim.terminal import Progress

    raw, source = settings_of(config, overrides, settings, scale=scale)
    progress = Progress(is_quiet=quiet)
    plan = check(raw, source)

    def after(record: RoundRecord) -> Literal["stop"] | None:
        progress.round(record)
        return on_round(record) if on_round is not None else None

    try:
        execute(plan, on_start=progress.start, on_round=after)
    except Interrupted as ended:
        where = "" if ended.next_round is None else f" after round {ended.next_round}; the same call goes on from there"
        raise KeyboardInterrupt(f"the run ended{where}") from ended
    assert progress.folder is not None
    return Run(progress.folder).reload()


def tune(
    config: ConfigSource = None,
    overrides: Mapping[str, object] | None = None,
    /,
    *,
    scale: bool = False,
    quiet: bool = False,
    **settings: object,
) -> Runs:
    """Run a sweep on Ray Tune and return its runs in the order of the trials; what is finished is not run again.

    Args:
      config, overrides, scale, settings: as for `run`, with a group `tune`:
        `raysim.tune({"tune": {"param_space": {"local.lr": {"grid_search": [0.1, 0.01]}}}}, name="lr")`.
    Raises:
      ConfigError: as for `run`, of any trial. KeyboardInterrupt: a signal ended the sweep; the same call goes on.
    """
    from raysim.terminal import say
    from raysim.tuning.driver import SweepEnded, run_sweep
    from raysim.tuning.outcome import write_results
    from raysim.tuning.plan import plan_sweep
    from raysim.tuning.resources import draws

    raw, source = settings_of(config, overrides, settings)
    sweep = plan_sweep(raw, source, draws, is_scaled=scale)
    try:
        outcomes = run_sweep(sweep, (lambda line: None) if quiet else say)
    except SweepEnded as ended:
        raise KeyboardInterrupt("the sweep ended; the same call runs what is not finished") from ended
    write_results(sweep, outcomes)
    return Runs((Run(sweep.folder / trial.name) for trial in sweep.trials), sweep.folder)


def report(
    runs: Run | Runs | str | Path | Iterable[Run | str | Path],
    *,
    out: str | Path | None = None,
    **settings: object,
) -> Report:
    """Tables, tests and figures of finished runs, written to a folder and returned.

    Args:
      runs: runs, or folders of runs.
      out: folder for the report; by default `report` beside the runs.
      settings: of the group `report`: `against="fedvg"`, `metric="accuracy"`, `columns=["alpha"]` ...
    Raises:
      ConfigError, DataError: a setting that names what is not there; no finished run.
    """
    from raysim.reporting.results import Report

    if isinstance(runs, Run | str | Path):
        runs = [runs]
    folders = [each.folder if isinstance(each, Run) else Path(each) for each in runs]
    if not folders:
        raise DataError("no runs to report", mend="give runs or folders of runs")
    common = runs.folder if isinstance(runs, Runs) and runs.folder is not None else folders[0]
    return Report.write(folders, Path(out) if out is not None else common / "report", settings)


def arrays(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    name: str,
    classes: Sequence[str] | None = None,
    domains: np.ndarray | None = None,
    root: str | Path = "data",
) -> SetInfo:
    """Write arrays as a prepared set; `data={"name": name}` trains on it. The same arrays again change nothing.

    Args:
      images: (n, height, width) or (n, height, width, channels) uint8.
      labels: (n,) integers, 0 to classes - 1.
      classes: names of the classes; their numbers if not given.
      domains: (n,) integers, or None.
      root: folder of prepared sets, `data.root`.
    Raises:
      DataError: other types or shapes, labels outside the classes.
    """
    import numpy as np

    from raysim.config import home_folder
    from raysim.data.arrow import write_set
    from raysim.data.own_reader import array_contents
    from raysim.data.sources import set_path

    contents = array_contents(np.asarray(images), np.asarray(labels), name, classes, domains)
    path = set_path(home_folder() / root, name)
    return write_set(path, name, contents.classes, contents.batches, "arrays", domains=contents.domains)


def settings_of(
    config: ConfigSource, overrides: Mapping[str, object] | None, settings: Mapping[str, object], *, scale: bool = False
) -> tuple[Settings, str]:
    """(the raw configuration, what to call its source in messages)."""
    if isinstance(config, str | Path):
        raw, source = read_config(Path(config)), str(config)
    else:
        raw, source = _copied(config or {}), "the call"
    given = {**(overrides or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    if scale:
        own_name = {"name": given["name"]} if "name" in given else {}
        raw = scaled({**raw, "scale": {**raw.get("scale", {}), **own_name}}, source)
    for key, value in given.items():
        _lay(raw, key, value)
    return named(raw), source


def _copied(group: Mapping[str, Any]) -> Settings:
    """Dictionaries anew, all else as it is: functions and arrays are not to be copied."""
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in group.items()}


def _lay(raw: Settings, key: str, value: object) -> None:
    """Set a dotted key; a dictionary is laid over the group that is there."""
    *parents, last = key.split(".")
    group = raw
    for parent in parents:
        group = group.setdefault(parent, {})
        if not isinstance(group, dict):
            raise ConfigError([Fault(key, f"{parent} is no group of keys")], "the call")
    before = group.get(last)
    if isinstance(value, Mapping):
        group[last] = {**(before if isinstance(before, dict) else {}), **_copied(value)}
    else:
        group[last] = value
