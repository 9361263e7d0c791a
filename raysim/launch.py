"""Functions from settings to a finished run or sweep, shared by `import raysim` and the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from raysim.base.commands import command
from raysim.base.errors import ConfigError, Fault, refuse
from raysim.base.progress import Listener
from raysim.base.settings import Raw, Settings
from raysim.base.user_code import note_of_values, with_function_names
from raysim.config import Config, read_config
from raysim.config.effects import value_at
from raysim.config.overlays import layered
from raysim.config.sweep import axes_as_written
from raysim.plan.names import parsed_run

if TYPE_CHECKING:
    from raysim.engine.round_metrics import RoundRecord
    from raysim.plan.build import Plan
    from raysim.running.results import Run
    from raysim.tuning.outcome import Outcome
    from raysim.tuning.plan import Sweep

#: A YAML file, settings as nested dictionaries, or nothing: the defaults.
ConfigSource = str | Path | Mapping[str, object] | None


def settings_of(
    config: ConfigSource,
    overrides: Mapping[str, object] | None,
    settings: Mapping[str, object],
    *,
    scale: bool = False,
    where: str = "the call",
) -> tuple[Settings, str]:
    """Return (raw configuration, source for messages), the arguments of `check` and `plan_sweep`.

    Args:
      where: origin of the overrides, for messages.
    """
    refuse_others("config", config, str | Path | Mapping | None)
    refuse_others("overrides", overrides, Mapping | None)
    if isinstance(config, str | Path):
        raw, source = read_config(Path(config)), str(config)
    else:
        raw, source = with_function_names({} if config is None else config), "the call"
    values = with_function_names({} if overrides is None else overrides)
    for key, value in with_function_names(settings).items():
        values |= _by_dotted_keys(raw, key.replace("__", "."), value)
    return layered(raw, values, source, is_scaled=scale, where=where), source


def _by_dotted_keys(raw: Raw, key: str, value: object) -> Settings:
    """Return a setting of the call by dotted keys; a dictionary for a group is merged key by key."""
    group = value_at(raw, key)
    field = Config.model_fields.get(key)
    is_group = isinstance(group, Mapping) or (group is None and field is not None and field.default_factory is not None)
    if isinstance(value, dict) and is_group:
        if any("." in str(name) for name in value):  # names that are dotted keys, such as axes of a sweep
            return {key: {**(group if isinstance(group, Mapping) else {}), **value}}
        return {f"{key}.{name}": each for name, each in value.items()}
    return {key: value}


def finished_run(
    raw: Settings,
    source: str,
    listener: Listener,
    *,
    on_start: Callable[[Path, int, int], None] = lambda *_: None,
    on_round: Callable[[RoundRecord], object] = lambda _: None,
    on_summary: Callable[[Path, Settings], None] = lambda *_: None,
) -> Run:
    """Check a configuration, run to the end, and return the run. Raises the errors of `checked_run` and `execute`.

    Args:
      on_summary: on_summary(run directory, summary) is called before the pictures are drawn.
    """
    folders: list[Path] = []

    def start(folder: Path, first_round: int, num_rounds: int) -> None:
        folders.append(folder)
        on_start(folder, first_round, num_rounds)

    plan = checked_run(raw, source, listener)
    from raysim.running.results import Run
    from raysim.running.runner import execute

    execute(
        plan, on_start=start, on_round=on_round, on_step=listener.step, on_note=listener.note, on_summary=on_summary
    )
    return Run(folders[-1])


def checked_run(raw: Settings, source: str, listener: Listener, *, reads_weights: bool = True) -> Plan:
    """Return the checked plan of a run.

    Args:
      reads_weights: see `check`.
    Raises:
      ConfigError: the configuration is a sweep. Also the errors of `check`.
    """
    if axes_as_written(raw):
        verb = command("raysim", "tune", source)
        text = (
            f"makes the configuration a sweep: run `{verb}`, or set tune=null for one run of the keys outside the group"
        )
        raise ConfigError([Fault("tune", text)], source)
    config, faults = parsed_run(raw)
    if config is None:  # before PyTorch is imported to check the rest
        raise ConfigError(faults, source)
    refuse(_of_other_verbs(config), source)
    listener.step(f"checking {source}")
    if note := note_of_values(raw):
        listener.say(f"note: {note}")
    from raysim.plan.check import check  # loads PyTorch
    from raysim.plan.splitting import rows_line

    plan = check(raw, source, reads_weights=reads_weights)
    listener.say(rows_line(plan.config, plan.manifest))
    return plan


def _of_other_verbs(config: Config) -> list[Fault]:
    """Return faults of settings for other verbs, and of metrics and figures that the run will not have."""
    from raysim.tuning.ranking import report_faults

    return report_faults(config.report, [config]) + [
        Fault(name, f"has no effect in a run, only with `{command('raysim', name)}`; remove the group")
        for name, group in {"tune": config.tune, "calibrate": config.calibrate}.items()
        if group != type(group)()
    ]


def finished_sweep(
    raw: Raw, source: str, listener: Listener, *, callbacks: Sequence[object] = ()
) -> tuple[Sweep, dict[str, Outcome]]:
    """Plan a sweep, run unfinished trials, and write the results. Raises the errors of `plan_sweep` and `run_sweep`."""
    planned = checked_sweep(raw, source, listener)
    from raysim.tuning.driver import run_sweep  # loads Ray
    from raysim.tuning.outcome import write_results

    sweep, outcomes = run_sweep(planned, listener, callbacks)
    listener.step("writing the results")
    write_results(sweep, outcomes)
    return sweep, outcomes


def checked_sweep(raw: Raw, source: str, listener: Listener, *, reads_weights: bool = True) -> Sweep:
    """Return the checked plan of a sweep. reads_weights: see `check`. Raises the errors of `plan_sweep`."""
    listener.step(f"checking the trials of {source}")
    if note := note_of_values(raw):
        listener.say(f"note: {note}")
    from raysim.tuning.plan import plan_sweep  # loads PyTorch

    return plan_sweep(raw, source, reads_weights=reads_weights)


def refuse_others(name: str, value: object, kind: Any) -> None:
    """Raise ConfigError unless an argument is of a type. kind: a class, or a union of classes."""
    if not isinstance(value, kind):
        expected = " or ".join(each.__name__ for each in get_args(kind) or [kind]).replace("NoneType", "None")
        raise ConfigError([Fault(name, f"must be of type {expected}, got {type(value).__name__}")], "the call")
