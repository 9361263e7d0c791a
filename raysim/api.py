"""Python interface of raysim: runs, sweeps, reports and data sets. The command calls the same functions.

run = raysim.run("configs/quickstart.yaml", rounds=5, methods=["fedprox", {"fedvg": {"granularity": "block"}}])
run.accuracy, run.history, run.arrays("fedvg.norms"), run.model()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raysim.base.errors import ConfigError, DataError, Fault, UserCodeError
from raysim.base.progress import Listener
from raysim.base.texts import round_name
from raysim.base.user_places import accepts, place_in, place_of, words_of
from raysim.config import path_to_write
from raysim.data.arrow import write_set
from raysim.data.reader_api import array_contents
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.readers.table_files import frame_contents
from raysim.data.sources import set_path
from raysim.folders.storage import local_copy
from raysim.launch import ConfigSource, finished_run, finished_sweep, refuse_others, settings_of
from raysim.running.results import Run, Runs

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from raysim.data.arrow import SetInfo
    from raysim.engine.round_metrics import RoundRecord
    from raysim.reporting.report import Report

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
    """Run a federation and return its run directory as an object. An unfinished run of the same name resumes; a
    finished run is returned if the configuration is the same.

    Args:
      config: a YAML file, or settings as nested dictionaries.
      overrides: settings by dotted keys, {"partition.alpha": 0.1}, as on the command line. They override `config`; each
        setting replaces the whole value of its key.
      on_round: a function that is called after every round with the record of the round. If the function returns
        "stop", the run ends as completed; if the function raises, the run ends unfinished.
      scale: apply the settings in `scale` of the file, as --scaled does; `overrides` and `settings` override these
        settings.
      quiet: print no lines about progress.
      settings: settings as keywords, with two underscores for a dot: `partition__alpha=0.1`. A dictionary is merged
        into its group, as in `local={"lr": 0.1}`. `methods` takes names, {name: options},
        `raysim.methods.fedprox(mu=0.1)`, functions of your own that return a Method, also as {function: options}, and
        values of type `raysim.Method`.
    Raises:
      ConfigError: the configuration has faults; the error lists all of them. RaysimError: the run failed; the error
        says why.
      KeyboardInterrupt: Ctrl-C or SIGTERM ended the run after a checkpoint; the same call resumes the run.
    """
    from raysim.cli.terminal import Progress

    refuse_others("on_round", on_round, Callable | None)
    if on_round is not None and not accepts(on_round, 1):
        text = f"is called with the record of a round alone; see {place_of(on_round)}"
        raise ConfigError([Fault("on_round", text)], "the call")
    progress = Progress()
    listener, on_start, show = progress.line.listener(), progress.start, progress.round
    if quiet:
        listener, on_start, show = Listener(), lambda *_: None, lambda record: None
    raw, source = settings_of(config, overrides, settings, scale=scale)
    with _signals_as_keyboard_interrupt(), progress.line:
        return finished_run(raw, source, listener, on_start=on_start, on_round=_checked(on_round, show)).reload()


def tune(
    config: ConfigSource = None,
    overrides: Mapping[str, object] | None = None,
    /,
    *,
    callbacks: Sequence[object] = (),
    scale: bool = False,
    quiet: bool = False,
    **settings: object,
) -> Runs:
    """Run a sweep on Ray Tune and return its runs in the order of the trials; finished trials are not run again.

    Args:
      callbacks: objects of type `ray.tune.Callback`, in addition to the callbacks named in `tune.callbacks`.
      config, overrides, scale, settings: as for `run`, with a group `tune`:
        `raysim.tune({"tune": {"param_space": {"local.lr": {"grid_search": [0.1, 0.01]}}}}, name="lr")`.
    Raises:
      ConfigError: the configuration of a trial has faults. KeyboardInterrupt: a signal ended the sweep; the same call
        resumes the sweep.
    """
    from raysim.cli.terminal import LiveLine

    refuse_others("callbacks", callbacks, Sequence)
    line = LiveLine()
    listener = Listener() if quiet else line.listener()
    raw, source = settings_of(config, overrides, settings, scale=scale)
    with _signals_as_keyboard_interrupt(), line:
        sweep, _ = finished_sweep(raw, source, listener, callbacks=callbacks)
    return Runs(map(Run, (sweep.folder / trial.name for trial in sweep.trials)), sweep.folder)


def report(
    runs: Run | Runs | str | Path | Iterable[Run | Runs | str | Path],
    *,
    out: str | Path | None = None,
    **settings: object,
) -> Report:
    """Write tables, tests and figures of finished runs to a folder, and return the report.

    Args:
      runs: runs and sweeps, or folders of runs, or URIs of such folders.
      out: folder for the report; by default the subfolder `report` of a single folder, or `report` beside the first of
        several folders.
      settings: settings of the group `report`, such as `against="fedvg"`, `metric="accuracy"`, `columns=["alpha"]` ...
    Raises:
      ConfigError, DataError: a setting names something that no run has, or there is no finished run.
    """
    from raysim.reporting.report import Report, default_folder

    if isinstance(runs, Run | str | Path):
        runs = [runs]
    refuse_others("runs", runs, Iterable)
    common = [runs.folder] if isinstance(runs, Runs) and runs.folder is not None else []
    runs = list(runs)
    for number, each in enumerate(runs):
        refuse_others(f"runs[{number}]", each, Run | Runs | str | Path)
    refuse_others("out", out, str | Path | None)
    folders = [folder for each in runs for folder in _folders_of(each)]
    if not folders:
        raise DataError("no runs to report", mend="give runs or folders of runs")
    return Report.write(folders, Path(out) if out is not None else default_folder(common or folders), settings)


def _folders_of(runs: Run | Runs | str | Path) -> list[Path]:
    """Return the run folders of a run, of several runs, or of a folder or URI."""
    if isinstance(runs, Run):
        return [runs.folder]
    return [run.folder for run in runs] if isinstance(runs, Runs) else [local_copy(runs)]


def arrays(
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    name: str,
    classes: Sequence[str] | None = None,
    domains: np.ndarray | None = None,
    splits: np.ndarray | None = None,
    task: str | None = None,
    vocabulary: int | None = None,
    root: str | Path = "data",
) -> SetInfo:
    """Write arrays as a prepared set, for runs with `data={"name": name}`. A repeated call with the same arrays changes
    nothing.

    Args:
      inputs: (n, height, width) or (n, height, width, channels) uint8: images; (n, ...) floats, such as rows of a table;
        (n, length) other integers: tokens.
      targets: (n,) integers from 0 to classes - 1; (n, labels) of 0 and 1, several labels per row; (n,) or (n, numbers)
        floats to predict; (n, length) tokens, each the token that follows the input token at the same position.
      classes: names of the outputs (classes, labels, numbers or tokens); None: their indices.
      domains: (n,) integers, or None.
      splits: (n,) 0 train, 1 validation, 2 test, or None.
      task: name of a task, or `module:function` for a task of your own; None: decided by type and shape of the targets.
      vocabulary: number of different tokens; None: the number of tokens that occur.
      root: folder of prepared sets, `data.root`.
    Raises:
      DataError: types or shapes that are not listed above, targets outside the classes, or numbers that are not finite.
    """
    refuse_others("name", name, str)
    refuse_others("root", root, str | Path)
    contents = array_contents(inputs, targets, name, classes, domains, splits, task, vocabulary)
    path = set_path(path_to_write(root), name)
    return write_set(path, name, contents.classes, contents.batches, "arrays", **contents.about)


def table(
    frame: pd.DataFrame,
    *,
    name: str,
    target: str | Sequence[str],
    domains: str | None = None,
    task: Literal["classes", "labels", "regression"] | None = None,
    drop: Sequence[str] = (),
    missing: Literal["drop", "mean", "median", "word"] | None = None,
    missing_target: Literal["drop"] | None = None,
    dates: Literal["ymd", "dmy", "mdy"] | None = None,
    codes: bool = False,
    root: str | Path = "data",
) -> SetInfo:
    """Write a pandas DataFrame as a prepared set, as `raysim prepare table` does with a CSV file. The result's
    `reading` describes how each column was read.

    Args:
      target: the column to predict, or several columns of labels or numbers.
      domains: the column with the domain of each row.
      drop: columns that are not read.
      task: the task, required if the target does not decide it, for example with many different whole numbers.
      missing: "drop" leaves out rows with a missing value; "mean" and "median" fill columns of numbers with the mean or
        median, and columns of words with the most frequent word; "word" fills numbers with the median and words with
        the word "missing"; None: a missing value is an error.
      missing_target: "drop" leaves out rows without a target or a domain.
      dates: the order of year, month and day in columns of words that hold dates; dates become days since 1970-01-01.
      codes: True: a column of words becomes one column of numbers; False: one column per word.
      root: folder of prepared sets, `data.root`.
    Raises:
      DataError: in the same cases as with `raysim prepare table`.
    """
    refuse_others("name", name, str)
    refuse_others("root", root, str | Path)
    targets = [target] if isinstance(target, str) else list(target)
    options = ReaderOptions(
        domains=domains, task=task, drop=drop, missing=missing, missing_target=missing_target, dates=dates, codes=codes
    )
    contents = frame_contents(frame, targets, options)
    path = set_path(path_to_write(root), name)
    return write_set(path, name, contents.classes, contents.batches, "a pandas DataFrame", **contents.about)


def _checked(on_round: OnRound | None, show: Callable[[RoundRecord], None]) -> Callable[[RoundRecord], object]:
    """Return a callback for every round: calls `show`, then `on_round`, and checks the result of `on_round`."""

    def after(record: RoundRecord) -> object:
        show(record)
        try:
            answer = on_round(record) if on_round is not None else None
        except SystemExit as error:  # would otherwise be treated as a stop by a signal
            raise UserCodeError(
                words_of(error), place_in(error), "let on_round return 'stop' to end the run"
            ) from error
        if answer is not None and not (isinstance(answer, str) and answer == "stop"):
            what = f"on_round returned {answer!r}"
            raise UserCodeError(what, round_name(record.round_index), "return 'stop' to end the run here, or nothing")
        return answer

    return after


@contextmanager
def _signals_as_keyboard_interrupt() -> Iterator[None]:
    """Turn Interrupted, raised after the checkpoint, into the KeyboardInterrupt that Python users expect."""
    from raysim.engine.simulation import Interrupted

    try:
        yield
    except Interrupted as ended:
        raise KeyboardInterrupt(str(ended)) from ended
