"""`raysim run`: from a checked plan to a finished run directory.

`execute` is the whole of it, from top to bottom: the run directory, the checkpoint to go on from, a server with its
trainers, the rounds, the summary.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import yaml
from safetensors.torch import save
from torch import Tensor

from raysim.config import Config, methods_label
from raysim.core.errors import ConfigError, Fault, RaysimError, RunExists, RunFinished, explained
from raysim.core.rounds import round_name
from raysim.core.settings import Settings
from raysim.core.uri import masked
from raysim.data.arrow import SetInfo
from raysim.data.describe import partition_table
from raysim.data.manifest import Manifest
from raysim.engine.checkpoint import Checkpoint, CheckpointStore
from raysim.engine.metrics import RoundRecord
from raysim.engine.simulation import Interrupted, ServerHandle, Stopped, restore, simulate
from raysim.engine.transport import unpack
from raysim.folders.files import write_file
from raysim.folders.records import damaged_records
from raysim.folders.run_folder import RunFolder, changes
from raysim.folders.storage import held, open_run_folder
from raysim.models.trained import trained_tensors
from raysim.plan.build import Plan
from raysim.plan.start import started_server
from raysim.running.loggers import Loggers, ended
from raysim.running.record import Recorder
from raysim.running.stop import reason_to_stop
from raysim.terminal import err


def execute(
    plan: Plan,
    *,
    on_start: Callable[[Path, int, int], None] = lambda *_: None,
    on_round: Callable[[RoundRecord], object] = lambda _: None,
    on_step: Callable[[str], None] = lambda _: None,
    wait_s: float = 0.0,
) -> Settings:
    """Run a plan to its end and return the summary. Of a run that is finished already, it is the one that is there.

    Args:
      on_start: on_start(run directory, first round, number of rounds).
      on_round: on_round(record) after each round; "stop" ends the run, completed; Stopped, raised there, ends it unfinished but
        not failed.
      on_step: on_step(what begins now, in words): parts of the work before and after the rounds that may take seconds.
      wait_s: seconds to wait for another process that is still in the run directory.
    Raises:
      RaysimError: what the user can mend; the run directory then holds FAILED with the message.
      Interrupted: a signal ended the run, after a checkpoint if there was a round since the last one.
    """
    config, num_rounds = plan.config, plan.num_rounds
    folder, stored = open_run_folder(config, _say)
    push = stored.push if stored else lambda: None
    with _file_errors_named(folder), folder.locked(wait_s):
        folder.remove_leftovers()
        if stored:
            stored.pull()
        store = CheckpointStore(folder.checkpoints, config.checkpoint.keep_last)
        try:
            checkpoint = open_run(plan, folder, store, stored.uri if stored else "")
        except RunFinished:
            with explained("summary.json is damaged", folder.path, "delete this folder to run it anew", ValueError):
                summary = folder.read_json(folder.summary)
            on_start(folder.path, summary["rounds"], summary["rounds"])
            return summary
        first_round = checkpoint.next_round if checkpoint else 0
        folder.clear("STOPPED", "FAILED")
        name = "" if config.name else folder.name
        with held(stored), _failure_marked(folder, name), started_server(plan, folder, on_step) as server:
            if checkpoint is not None:
                restore(server, checkpoint, store)
            recorder = Recorder(
                folder,
                first_round=first_round,
                num_rounds=num_rounds,
                hyperparameters=hyperparameters(config),
                blocks=plan.layout.blocks,
                classes=plan.info.classes,
                on_step=on_step,
            )
            loggers = Loggers(config.loggers, folder, _say)

            def saved(next_round: int) -> None:
                loggers.rounds(recorder.rows, next_round)
                push()

            with closing(recorder), ended(loggers):
                recorder.partition(plan.manifest.class_counts, plan.manifest.validation_counts)
                loggers.start(config.model_dump(mode="json"))
                loggers.rounds(recorder.rows, first_round)
                push()  # records of rounds after the checkpoint are gone
                on_start(folder.path, first_round, num_rounds)
                rounds_run, reason = simulate(
                    server,
                    first_round=first_round,
                    num_rounds=num_rounds,
                    recorder=recorder,
                    store=store,
                    checkpoint_every_s=config.checkpoint.every_s,
                    on_round=_refusing_early_end(plan, on_round),
                    reason_to_stop=lambda: reason_to_stop(config.stop, recorder.rows, config.evaluation.every),
                    on_saved=saved,
                )
                recorder.num_rounds = rounds_run
                write_file(folder.model, save(final_model(plan, server)))
                facts = {
                    "methods": config.methods,
                    "rounds": rounds_run,
                    "stopped_by": reason,
                    "num_clients": config.num_clients,
                    "num_classes": len(plan.info.classes),
                    "image_shape": list(plan.info.shape),
                    "params_sha256": server.params_sha256(),
                    "partition_sha256": plan.manifest.checksum,
                }
                summary = recorder.summary(facts)
                loggers.end(summary)
            folder.mark("COMPLETED", reason)
            return summary


def _say(line: str) -> None:
    err.print(line, markup=False)


def open_run(plan: Plan, folder: RunFolder, store: CheckpointStore, uri: str = "") -> Checkpoint | None:
    """The checkpoint to go on from if the folder holds such a run; else its configuration is written there.

    A run goes on that is unfinished, or that wants more rounds than it has: more `rounds`, or another `stop`.

    Args:
      uri: where the run lies, if that is not the folder.
    Raises:
      RunFinished: just this run is finished. RunExists: another finished run, one with fewer rounds to go on to, or an
      unfinished one with resume=never or a damaged configuration. ConfigError: a run
      with another configuration or other data, or more rounds where the length of the run decides its earlier rounds.
    """
    config, name, where = plan.config, folder.name, uri or str(folder.path)
    other = "choose another name, or delete that folder"
    if (folder.path / "sweep.yaml").exists():
        raise RunExists(f"{name!r} is a sweep, not a run", where, "choose another name")
    is_finished, weights = folder.status.name == "completed", plan.weights_sha256
    now = config.model_dump(mode="json")
    if not folder.config.exists():
        if is_finished:
            raise RunExists(f"run {name!r} is finished", where, other)
        write_partition(folder, plan.manifest, plan.info)
        write_file(folder.weights, weights.encode())
        folder.write_config(now)
        return None
    if config.resume == "never" and not is_finished:
        raise RunExists(f"run {name!r} exists, unfinished, and resume is never", where, f"set resume=auto, {other}")
    try:
        before = folder.read_config()
        partition, rounds_before = folder.read_json(folder.partition), int(before["rounds"])
        is_same_partition = partition["checksum"] == plan.manifest.checksum
    except (OSError, TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        if is_finished:
            raise RunExists(f"run {name!r} is finished", where, other) from error
        text = f"run {name!r} cannot be resumed: its config.yaml or partition.json is damaged ({error})"
        raise RunExists(text, where, other) from error
    is_longer = config.rounds > rounds_before
    rows, has_other_stop = folder.progress_rows(), now["stop"] != before.get("stop")
    goes_on = len(rows) < rounds_before and not reason_to_stop(config.stop, rows, config.evaluation.every)
    kind = "finished run" if is_finished else "unfinished run"
    faults = [
        Fault(key, f"is {new!r}, but the {kind} in {where} has {old!r}; set it back, or choose another name")
        for key, old, new in changes(before, now)
        if key != "rounds" or not is_longer
    ]
    is_wanted = config.resume == "auto" and (is_longer or (has_other_stop and goes_on))
    is_same = not faults and not has_other_stop and config.resume == "auto"
    if is_finished and not is_wanted and not is_same and {fault.key for fault in faults} <= {"rounds"}:
        raise RunExists(f"run {name!r} is finished", where, f"raise rounds to go on with it, {other}")
    if is_longer and (cause := plan.depends_on_length):
        text = f"the {kind} in {where} has {rounds_before} rounds, and {cause} depends on that; choose another name"
        faults.append(Fault("rounds", text))
    if not faults and not is_same_partition:
        faults.append(_other_partition(plan, partition, f"the {kind} in {where}"))
    if not faults and folder.weights.is_file() and folder.weights.read_bytes() != weights.encode():
        text = f"the weights in {config.model.pretrained or 'no file'} changed since the {kind} in {where} began"
        faults.append(
            Fault("model.pretrained", f"{text}, or {folder.weights.name} there is damaged; choose another name")
        )
    if faults:
        raise ConfigError(faults, f"resuming {name!r}")
    if is_finished and not is_wanted:
        raise RunFinished(f"run {name!r} is finished", where)
    checkpoint = store.latest(_say)
    if checkpoint is None and rows:
        _say(
            f"run {name!r} has no checkpoint yet (one is written every {config.checkpoint.every_s:g} s): it begins again"
        )
    if checkpoint and (damage := damaged_records(folder, checkpoint.next_round, checkpoint.records)):
        remedy = "put the file back, or delete this folder to run it anew"
        raise RaysimError(f"run {name!r} cannot be resumed: {damage}", where, remedy)
    if is_longer or has_other_stop:
        folder.write_config(now)
    if is_finished:
        folder.clear("COMPLETED")
        for result in (folder.summary, folder.model):  # of the shorter run
            result.unlink(missing_ok=True)
    return checkpoint


def _other_partition(plan: Plan, before: Settings, run: str) -> Fault:
    """For a run whose partition is another one than the plan's. before: its partition.json; run: what to call it."""
    key, what = "data", "the set"
    if plan.config.partition.scheme == "file":
        key, what = "partition.file", "the partition in it"
    text = f"{what} changed since {run} began"
    if plan.manifest.test_sizes is not None and "test_sizes" not in before:  # older versions left it out
        text = f"{run} does not say whose its test rows are; an older version began it"
    return Fault(key, f"{text}; choose another name")


def _refusing_early_end(plan: Plan, on_round: Callable[[RoundRecord], object]) -> Callable[[RoundRecord], object]:
    """`on_round`, whose "stop" is an error where a method works after the last round and would be left out."""
    phase = next((method.name for method in plan.methods if method.is_phase), "")

    def watched(record: RoundRecord) -> object:
        for note in record.notes:
            err.print(note, markup=False)
        answer = on_round(record)
        if answer == "stop" and phase and record.round_index + 1 < plan.num_rounds:
            what = f"on_round returned 'stop', but {phase} works after the last round"
            raise RaysimError(what, round_name(record.round_index), f"let the run go through, or leave {phase} out")
        return answer

    return watched


@contextmanager
def _file_errors_named(folder: RunFolder) -> Iterator[None]:
    """What the system says of a file of the run becomes an error that says what to do."""
    try:
        yield
    except OSError as error:
        if not str(error.filename).startswith(str(folder.path)):
            raise
        what, remedy = f"a file of the run cannot be read or written ({error})", "put it right, or delete this folder"
        raise RaysimError(what, str(folder.path), remedy) from error


@contextmanager
def _failure_marked(folder: RunFolder, name: str) -> Iterator[None]:
    """FAILED with the message for what is a failure; a signal becomes Interrupted. name: see there."""
    try:
        yield
    except Interrupted as error:
        error.name = name
        raise
    except Stopped:
        raise
    except (KeyboardInterrupt, SystemExit) as error:  # before the first round
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        raise Interrupted(number, None, name) from error
    except BaseException as error:
        with suppress(OSError):  # of a full disk; the first error says so
            folder.mark("FAILED", masked(f"{error}\n\n{traceback.format_exc()}"))
        raise


def write_partition(folder: RunFolder, manifest: Manifest, info: SetInfo) -> None:
    """Write partition.json, partition.csv with a row for each client and one for the validation set, and examples.csv."""
    table = partition_table(manifest.class_counts, info.classes, manifest.validation_counts)
    write_file(folder.partition, manifest.to_json().encode())
    write_file(folder.partition_table, table.encode())
    write_file(folder.examples, manifest.division.table(manifest.num_examples).encode())


def final_model(plan: Plan, server: ServerHandle) -> dict[str, Tensor]:
    """The state dict of the module as the next round would find it; see `trained_tensors`.

    LIVAR's merged model, of a higher rank than its adapters, is scored but not in here: these are the adapters sent.
    """
    snapshot = server.snapshot()
    state, seed = unpack(snapshot.state), plan.config.seed
    return trained_tensors(plan.spec, plan.layout, seed=seed, state=state, counters=snapshot.counters)


def hyperparameters(config: Config) -> dict[str, str | int | float]:
    """The settings that comparisons are made by, flat, for TensorBoard's hyper-parameter view."""
    flat: dict[str, str | int | float] = {"seed": config.seed, "rounds": config.rounds, "cohort": config.cohort_size}
    flat["methods"] = methods_label(config.methods)
    for item in config.methods:
        if isinstance(item, dict):
            ((name, options),) = item.items()
            plain = {
                key: value if isinstance(value, str | int | float) else str(value)
                for key, value in (options or {}).items()
            }
            flat |= {f"{name}.{key}": value for key, value in plain.items()}
    for group in ("data", "partition", "model", "local"):
        values = getattr(config, group).model_dump(mode="json")
        values.pop("root", None)  # a place, no setting
        flat |= {f"{group}.{key}": value for key, value in values.items() if isinstance(value, str | int | float)}
    return flat | {f"labels.{key}": value for key, value in config.labels.items()}
