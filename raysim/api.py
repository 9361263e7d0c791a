"""What `import raysim` offers: runs, sweeps and reports from Python. The command is a thin layer over the same functions.

run = raysim.run("configs/quickstart.yaml", rounds=5, methods=["fedprox", {"fedvg": {"granularity": "block"}}])
run.accuracy, run.history, run.arrays("fedvg.norms"), run.model()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from raysim.base.commands import command
from raysim.base.errors import ConfigError, DataError, Fault, OwnCodeError, refuse
from raysim.base.own import place_in, place_of, words_of
from raysim.base.own_code import named, note_of_values
from raysim.base.settings import Raw, Settings
from raysim.base.texts import round_name
from raysim.config import Config, parse_config, path_to_write, read_config
from raysim.config.counting import value_at
from raysim.config.layers import Tell, layered, silent
from raysim.config.sweep import axes_as_written
from raysim.data.arrow import write_set
from raysim.data.reader_api import array_contents
from raysim.data.sources import set_path
from raysim.folders.storage import local_copy
from raysim.running.results import Run, Runs

if TYPE_CHECKING:
    import numpy as np

    from raysim.data.arrow import SetInfo
    from raysim.engine.round_metrics import RoundRecord
    from raysim.plan.build import Plan
    from raysim.reporting.report import Report
    from raysim.terminal import LiveLine, Progress
    from raysim.tuning.outcome import Outcome
    from raysim.tuning.plan import Sweep

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
    """Run a federation and return its run directory as an object. An unfinished run of that name goes on; a finished one is
    returned, if its configuration is this one.

    Args:
      config: a YAML file, or settings as nested dictionaries.
      overrides: settings by dotted keys, {"partition.alpha": 0.1}, as on the command line: they override `config`, and each
        sets its value whole.
      on_round: called after every round; what it raises ends the run, unfinished; "stop" ends it, completed.
      scale: lay the file's `scale` settings over it, as --scaled does; what is given here overrides them.
      quiet: no lines about progress.
      settings: the same with two underscores for a dot: `partition__alpha=0.1`. A dictionary is laid over its group,
        `local={"lr": 0.1}`. `methods` takes names, {name: options}, `raysim.methods.fedprox(mu=0.1)`, functions of your
        own that return a Method, also as {function: options}, and values of type `raysim.Method`.
    Raises:
      ConfigError: every fault of the configuration. RaysimError: what ended the run, in words.
      KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint was written, and the same call goes on.
    """
    from raysim.terminal import Progress

    _refuse_others("on_round", on_round, Callable | None)
    if on_round is not None:
        _refuse_other_arguments("on_round", on_round, "the record of a round")
    raw, source = settings_of(config, overrides, settings, scale=scale, tell=_teller(quiet))
    with _signals_as_keyboard_interrupt():
        return finished_run(raw, source, Progress(is_quiet=quiet), on_round).reload()


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
    """Run a sweep on Ray Tune and return its runs in the order of the trials; what is finished is not run again.

    Args:
      callbacks: of type `ray.tune.Callback`, beside those that `tune.callbacks` names.
      config, overrides, scale, settings: as for `run`, with a group `tune`:
        `raysim.tune({"tune": {"param_space": {"local.lr": {"grid_search": [0.1, 0.01]}}}}, name="lr")`.
    Raises:
      ConfigError: as for `run`, of any trial. KeyboardInterrupt: a signal ended the sweep; the same call goes on.
    """
    from raysim.terminal import LiveLine

    _refuse_others("callbacks", callbacks, Sequence)
    tell = _teller(quiet)
    raw, source = settings_of(config, overrides, settings, scale=scale, tell=tell)
    with _signals_as_keyboard_interrupt():
        sweep, _ = finished_sweep(raw, source, tell, LiveLine(is_quiet=quiet), callbacks=callbacks)
    return Runs(map(Run, (sweep.folder / trial.name for trial in sweep.trials)), sweep.folder)


def report(
    runs: Run | Runs | str | Path | Iterable[Run | Runs | str | Path],
    *,
    out: str | Path | None = None,
    **settings: object,
) -> Report:
    """Tables, tests and figures of finished runs, written to a folder and returned.

    Args:
      runs: runs and sweeps, or folders of runs, or URIs of such.
      out: folder for the report; by default `report` in the one folder given, or beside the first of several.
      settings: of the group `report`: `against="fedvg"`, `metric="accuracy"`, `columns=["alpha"]` ...
    Raises:
      ConfigError, DataError: a setting that names what is not there; no finished run.
    """
    from raysim.reporting.report import Report, default_folder

    if isinstance(runs, Run | str | Path):
        runs = [runs]
    _refuse_others("runs", runs, Iterable)
    common = [runs.folder] if isinstance(runs, Runs) and runs.folder is not None else []
    runs = list(runs)
    for number, each in enumerate(runs):
        _refuse_others(f"runs[{number}]", each, Run | Runs | str | Path)
    _refuse_others("out", out, str | Path | None)
    folders = [folder for each in runs for folder in _folders_of(each)]
    if not folders:
        raise DataError("no runs to report", mend="give runs or folders of runs")
    return Report.write(folders, Path(out) if out is not None else default_folder(common or folders), settings)


def _folders_of(runs: Run | Runs | str | Path) -> list[Path]:
    """The folders of one thing to report."""
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
    """Write arrays as a prepared set; `data={"name": name}` trains on it. The same arrays again change nothing.

    Args:
      inputs: (n, height, width) or (n, height, width, channels) uint8: images; (n, ...) floats, such as rows of a table;
        (n, length) other integers: tokens.
      targets: (n,) integers, 0 to classes - 1; (n, labels) 0 or 1, several labels a row; (n,) or (n, numbers) floats to be
        predicted; (n, length) tokens, each the one after that of the input.
      classes: names of the outputs: classes, labels, numbers or tokens; their numbers if not given.
      domains: (n,) integers, or None; splits: (n,) 0 train, 1 validation, 2 test, or None.
      task: None: as the targets' type and shape say; `module:function` for one of your own.
      vocabulary: how many tokens there are; None: as many as occur.
      root: folder of prepared sets, `data.root`.
    Raises:
      DataError: other types or shapes, targets outside the classes, numbers that are not finite.
    """
    _refuse_others("name", name, str)
    _refuse_others("root", root, str | Path)
    contents = array_contents(inputs, targets, name, classes, domains, splits, task, vocabulary)
    path = set_path(path_to_write(root), name)
    return write_set(path, name, contents.classes, contents.batches, "arrays", **contents.about)


def _refuse_others(name: str, value: object, kind: Any) -> None:
    """ConfigError for an argument of another kind: a class, or a union of some."""
    if not isinstance(value, kind):
        expected = " or ".join(each.__name__ for each in get_args(kind) or [kind]).replace("NoneType", "None")
        raise ConfigError([Fault(name, f"must be of type {expected}, got {type(value).__name__}")], "the call")


def _refuse_other_arguments(name: str, function: Callable[..., object], given: str) -> None:
    """ConfigError for a function that cannot be called with one argument. given: what that is, in words."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-ins nobody knows what they take
        return
    try:
        signature.bind(None)
    except TypeError as error:
        text = f"is called with {given} alone, but takes {signature}: {error}; see {place_of(function)}"
        raise ConfigError([Fault(name, text)], "the call") from error


# --- what the command does, too ---------------------------------------------------------------------------------------


def settings_of(
    config: ConfigSource,
    overrides: Mapping[str, object] | None,
    settings: Mapping[str, object],
    *,
    scale: bool = False,
    where: str = "the call",
    tell: Tell = silent,
) -> tuple[Settings, str]:
    """(the raw configuration, what to call its source in messages): what `check` and `plan_sweep` take.

    Args:
      where: what the overrides come from, for messages.
      tell: hears what labels of axes, and `scale`, lose to the settings of the call.
    """
    _refuse_others("config", config, str | Path | Mapping | None)
    _refuse_others("overrides", overrides, Mapping | None)
    if isinstance(config, str | Path):
        raw, source = read_config(Path(config)), str(config)
    else:
        raw, source = named({} if config is None else config), "the call"
    values = named({} if overrides is None else overrides)
    for key, value in named(settings).items():
        values |= _by_dotted_keys(raw, key.replace("__", "."), value)
    return layered(raw, values, source, is_scaled=scale, where=where, tell=tell), source


def _by_dotted_keys(raw: Raw, key: str, value: object) -> Settings:
    """A setting of the call; a dictionary for a group is laid over it key by key."""
    group = value_at(raw, key)
    field = Config.model_fields.get(key)
    is_group = isinstance(group, Mapping) or (group is None and field is not None and field.default_factory is not None)
    if isinstance(value, dict) and is_group:
        if any("." in str(name) for name in value):  # names of the user's own, as those of axes
            return {key: {**(group if isinstance(group, Mapping) else {}), **value}}
        return {f"{key}.{name}": each for name, each in value.items()}
    return {key: value}


def _teller(quiet: bool) -> Tell:
    from raysim.terminal import say

    return silent if quiet else say


def finished_run(raw: Settings, source: str, progress: Progress, on_round: OnRound | None = None) -> Run:
    """Check a configuration, run it to its end, and return the run. Raises as `checked_run`; RaysimError: as `execute`."""

    def after(record: RoundRecord) -> Literal["stop"] | None:
        progress.round(record)
        try:
            answer = on_round(record) if on_round is not None else None
        except SystemExit as error:  # else it would be taken for the end that a signal asks for
            raise OwnCodeError(words_of(error), place_in(error), "let on_round return 'stop' to end the run") from error
        if answer is not None and not (isinstance(answer, str) and answer == "stop"):
            what = f"on_round returned {answer!r}"
            raise OwnCodeError(what, round_name(record.round_index), "return 'stop' to end the run here, or nothing")
        return answer

    with progress.line as line:
        plan = checked_run(raw, source, line)
        from raysim.running.runner import execute

        execute(plan, on_start=progress.start, on_round=after, on_step=line.step)
    assert progress.folder is not None
    return Run(progress.folder)


def checked_run(raw: Settings, source: str, line: LiveLine) -> Plan:
    """The plan of a run, checked. Raises ConfigError: it is a sweep; and as `check`."""
    if axes_as_written(raw):
        verb = command("raysim", "tune", source)
        text = f"makes this a sweep, which `{verb}` runs; tune=null leaves one run, of the keys outside this group"
        raise ConfigError([Fault("tune", text)], source)
    refuse(_of_other_verbs(raw), source)
    line.step(f"checking {source}")
    if note := note_of_values(raw):
        line.say(f"note: {note}")
    from raysim.plan.check import check  # loads PyTorch
    from raysim.plan.splitting import rows_line

    plan = check(raw, source)
    line.say(rows_line(plan.config, plan.manifest))
    return plan


def _of_other_verbs(raw: Settings) -> list[Fault]:
    """Groups that are another verb's, where they set something, and metrics that a report will not find."""
    from raysim.tuning.metrics import report_faults

    config, _ = parse_config(raw)
    faults = [] if config is None else report_faults(config.report, [config])
    groups = {} if config is None else {"tune": config.tune, "calibrate": config.calibrate}
    return faults + [
        Fault(name, f"has no effect in a run, only with `{command('raysim', name)}`; drop it")
        for name, group in groups.items()
        if group != type(group)()
    ]


def finished_sweep(
    raw: Raw, source: str, say: Callable[[str], None], line: LiveLine, *, callbacks: Sequence[object] = ()
) -> tuple[Sweep, dict[str, Outcome]]:
    """Plan a sweep, run what is not finished of it, and write its results. Raises as `plan_sweep` and `run_sweep`."""
    with line:
        planned = checked_sweep(raw, source, line)
        from raysim.tuning.driver import run_sweep  # loads Ray
        from raysim.tuning.outcome import write_results

        sweep, outcomes = run_sweep(planned, say, callbacks, line)
        line.step("writing the results")
        write_results(sweep, outcomes)
        return sweep, outcomes


def checked_sweep(raw: Raw, source: str, line: LiveLine) -> Sweep:
    """The plan of a sweep, checked. Raises as `plan_sweep`."""
    line.step(f"checking the trials of {source}")
    if note := note_of_values(raw):
        line.say(f"note: {note}")
    from raysim.tuning.plan import plan_sweep  # loads PyTorch

    return plan_sweep(raw, source)


@contextmanager
def _signals_as_keyboard_interrupt() -> Iterator[None]:
    """Ctrl-C in a script or a notebook ends as Python users know it, after the checkpoint."""
    from raysim.engine.simulation import Interrupted

    try:
        yield
    except Interrupted as ended:
        raise KeyboardInterrupt(str(ended)) from ended
