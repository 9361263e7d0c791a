"""`raysim run`: from a checked plan to a finished run directory.

`execute` does everything in order: the run directory, the checkpoint to resume from, a server with its trainers, the
rounds, the summary. If Ray loses the server, its node or the cluster, `execute` repeats this from the last checkpoint,
up to `resources.restarts` times.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from safetensors.torch import save

from raysim.base.direction import DIRECTIONS, OF_RAYSIM
from raysim.base.errors import ClusterLost, RaysimError, RunExists, explained
from raysim.base.progress import Tell, silent
from raysim.base.settings import Settings, as_written, flatten
from raysim.base.texts import round_name
from raysim.base.uri import masked
from raysim.config import Config, methods_label
from raysim.data.arrow import SetInfo
from raysim.data.division import partition_table, table_file
from raysim.data.manifest import Manifest
from raysim.engine.checkpoint import Checkpoint, CheckpointStore
from raysim.engine.messages import unpack
from raysim.engine.round_metrics import RoundRecord
from raysim.engine.simulation import Interrupted, ServerHandle, Stopped, restore, simulate
from raysim.folders.files import write_file
from raysim.folders.records import damaged_records
from raysim.folders.run_folder import RunFolder
from raysim.folders.storage import StoredRun, held, open_run_folder
from raysim.models.modules import trained_tensors
from raysim.plan.build import Plan
from raysim.plan.start import started_server
from raysim.running.loggers import Loggers
from raysim.running.record import Recorder, headlines, reason_to_stop
from raysim.running.resume import OTHER, next_step


def execute(
    plan: Plan,
    *,
    on_start: Callable[[Path, int, int], None] = lambda *_: None,
    on_round: Callable[[RoundRecord], object] = lambda _: None,
    on_step: Tell = silent,
    on_note: Tell = silent,
    on_summary: Callable[[Path, Settings], None] = lambda *_: None,
    wait_s: float = 0.0,
) -> Settings:
    """Run a plan to its end and return the summary. A finished run is not repeated: the stored summary is returned.

    Args:
      on_start: on_start(run directory, first round, number of rounds).
      on_round: on_round(record) is called after each round. If on_round returns "stop", the run ends as completed; if
        on_round raises Stopped, the run ends unfinished, without a failure.
      on_step: on_step(text) is called when a step before or after the rounds begins that may take seconds.
      on_note: on_note(text) gets remarks about the run, such as repeated attempts, and notes of methods and loggers.
      on_summary: on_summary(run directory, summary) is called before the pictures are drawn.
      wait_s: seconds to wait for another process that uses the run directory.
    Raises:
      RaysimError: the run failed for a reason that the user can mend; the run directory holds FAILED with the message.
      ClusterLost: the cluster was lost again after `resources.restarts` resumed attempts.
      Interrupted: a signal ended the run, after a checkpoint if there was a round since the last one.
    """
    folder, stored = open_run_folder(plan.config, on_note)
    attempt = partial(_attempt, plan, folder, stored, on_start, on_round, on_step, on_note, on_summary)
    restarts = plan.config.resources.restarts
    with _file_errors_named(folder), folder.locked(wait_s):
        for number in range(restarts):
            try:
                return attempt(number)
            except ClusterLost as error:
                saved = CheckpointStore(folder.checkpoints).next_round
                place = f"the checkpoint of {round_name(saved - 1)}" if saved else "the beginning"
                on_note(f"{error.what}; attempt {number + 2} of {restarts + 1}, from {place}")
        return attempt(restarts)


def _attempt(
    plan: Plan,
    folder: RunFolder,
    stored: StoredRun | None,
    on_start: Callable[[Path, int, int], None],
    on_round: Callable[[RoundRecord], object],
    on_step: Tell,
    on_note: Tell,
    on_summary: Callable[[Path, Settings], None],
    number: int,
) -> Settings:
    """Run from the last checkpoint, or from the beginning, to the end.

    Args:
      number: number of earlier attempts of this process; above 0, the attempt waits up to `resources.wait_s` for the
        cluster.
    """
    config, push = plan.config, stored.push if stored else lambda: None
    folder.remove_leftovers()
    if stored:
        stored.pull()
    store = CheckpointStore(folder.checkpoints)
    where = stored.uri if stored else str(folder.path)
    step = next_step(plan, folder, where)
    if step == "show":
        return _shown(folder, on_start, on_summary)
    if step == "begin":
        write_partition(folder, plan.manifest, plan.info)
        write_file(folder.weights, plan.weights_sha256.encode())
    checkpoint = None if step == "begin" else _checkpoint(plan, folder, store, where, on_note)
    folder.write_config(config.model_dump(mode="json"))  # after the partition: config.yaml makes the folder a run
    folder.clear("STOPPED", "FAILED")
    wanted = config.resources
    marked = _failure_marked(folder, "" if config.name else folder.name, goes_on=number < wanted.restarts)
    server_of = started_server(plan, folder, on_step, on_note, wanted.wait_s if number else 0.0)
    with held(stored), marked, server_of as server:
        if checkpoint is not None:
            restore(server, checkpoint, store)
        first_round = checkpoint.next_round if checkpoint else 0
        loggers = Loggers(config.loggers, folder, on_note)
        recorder = _recorder(plan, folder, first_round, loggers)
        with closing(recorder), closing(loggers):
            loggers.start(config.model_dump(mode="json"))
            push()  # records of rounds after the checkpoint were dropped
            on_start(folder.path, first_round, plan.num_rounds)
            reason = simulate(
                server,
                first_round=first_round,
                num_rounds=plan.num_rounds,
                recorder=recorder,
                store=store,
                checkpoint_every_s=config.checkpoint.every_s,
                on_round=_after_round(plan, on_round, on_note),
                reason_to_stop=lambda: reason_to_stop(config.stop, recorder.rows, config.evaluation.every),
                on_saved=push,
            )
            summary = _finished(plan, folder, server, recorder, reason)
            on_summary(folder.path, summary)
            on_step("drawing pictures")
            recorder.draw(plan.manifest.class_counts, plan.manifest.validation_counts)
            loggers.end(summary)
        folder.mark("COMPLETED", reason)
        return summary


def _recorder(plan: Plan, folder: RunFolder, first_round: int, loggers: Loggers) -> Recorder:
    return Recorder(
        folder,
        first_round=first_round,
        blocks=plan.layout.blocks,
        classes=plan.info.groups,
        main=plan.task.main,
        evaluate_every=plan.config.evaluation.every,
        on_row=loggers.round,
    )


def _shown(
    folder: RunFolder, on_start: Callable[[Path, int, int], None], on_summary: Callable[[Path, Settings], None]
) -> Settings:
    """Return the stored summary of a finished run."""
    with explained("summary.json is damaged", folder.path, "delete the folder and repeat the run", ValueError):
        summary = folder.read_json(folder.summary)
    on_start(folder.path, summary["rounds"], summary["rounds"])
    on_summary(folder.path, summary)
    return summary


def _finished(plan: Plan, folder: RunFolder, server: ServerHandle, recorder: Recorder, reason: str) -> Settings:
    """Write the final model and the summary; return the summary."""
    # LIVAR scores a merged model, of a higher rank than the adapters; the file has the adapters that are broadcast.
    snapshot, seed = server.snapshot(), plan.config.seed
    state, counters = unpack(snapshot.state), snapshot.counters
    write_file(folder.model, save(trained_tensors(plan.spec, plan.layout, seed=seed, state=state, counters=counters)))
    facts = {
        "methods": as_written(plan.config.methods),
        "rounds": len(recorder.rows),
        "stopped_by": reason,
        "num_clients": plan.config.num_clients,
        "num_classes": len(plan.info.classes),
        "input_shape": list(plan.info.shape),
        "input_type": plan.info.input_type,
        "vocabulary": plan.info.vocabulary,
        "main_metric": plan.task.main,
        "params_sha256": server.params_sha256(),
        "partition_sha256": plan.manifest.checksum,
    }
    facts["headlines"] = headlines(recorder.rows)
    if plan.target_scale is not None:
        facts["target_scale"] = plan.target_scale
    names = [plan.task.main, plan.task.of_part, *(name.rpartition(":")[2] for name in plan.config.evaluation.metrics)]
    if declared := {name: DIRECTIONS[name] for name in names if name in DIRECTIONS and name not in OF_RAYSIM}:
        facts["directions"] = declared
    return recorder.summary(facts, hyperparameters(plan.config))


def _checkpoint(plan: Plan, folder: RunFolder, store: CheckpointStore, where: str, on_note: Tell) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None. A finished run that is extended loses its status and results.

    Raises:
      RaysimError: records of rounds before the checkpoint were changed.
      RunExists: the run is finished and has no checkpoint.
    """
    checkpoint, is_finished = store.latest(on_note), folder.status.name == "completed"
    if checkpoint is None and is_finished:
        what = f"run {folder.name!r} is finished and has no checkpoints, so no round can be added"
        raise RunExists(what, where, OTHER)
    if checkpoint is None and folder.progress_rows():
        every = f"a checkpoint is written every {plan.config.checkpoint.every_s:g} s"
        on_note(f"run {folder.name!r} has no checkpoint yet ({every}): the run starts again")
    if checkpoint and (damage := damaged_records(folder, checkpoint.next_round, checkpoint.records)):
        remedy = "restore the file, or delete the folder and repeat the run"
        raise RaysimError(f"run {folder.name!r} cannot be resumed: {damage}", where, remedy)
    if is_finished:
        # First, so that a kill after this line does not leave a finished run with a new configuration.
        folder.clear("COMPLETED")
        for result in (folder.summary, folder.model):  # results of the shorter run
            result.unlink(missing_ok=True)
    return checkpoint


def _after_round(
    plan: Plan, on_round: Callable[[RoundRecord], object], on_note: Tell
) -> Callable[[RoundRecord], object]:
    """Return the callback of each round: reports notes, then calls `on_round`.

    The callback raises RaysimError if `on_round` returns "stop" and a method would run a phase after the last round.
    """
    phase = next((method.name for method in plan.methods if method.is_phase), "")

    def after(record: RoundRecord) -> object:
        for note in record.notes:
            on_note(note)
        answer = on_round(record)
        if answer == "stop" and phase and record.round_index + 1 < plan.num_rounds:
            what = f"on_round returned 'stop', but {phase} works after the last round"
            raise RaysimError(what, round_name(record.round_index), f"let the run finish, or drop {phase}")
        return answer

    return after


@contextmanager
def _file_errors_named(folder: RunFolder) -> Iterator[None]:
    """Turn operating-system errors on the run's files into errors with a remedy."""
    try:
        yield
    except OSError as error:
        if not str(error.filename).startswith(str(folder.path)):
            raise
        what = f"a file of the run cannot be read or written ({error})"
        raise RaysimError(what, str(folder.path), "correct the file, or delete the folder") from error


@contextmanager
def _failure_marked(folder: RunFolder, name: str, *, goes_on: bool) -> Iterator[None]:
    """Mark the run directory FAILED after an error in the block; a signal becomes Interrupted.

    Args:
      name: see `Interrupted`.
      goes_on: whether the run is repeated after ClusterLost, which is then not marked as a failure.
    """
    try:
        yield
    except Interrupted as error:
        error.name = name
        raise
    except Stopped:
        folder.seal_records()
        raise
    except (KeyboardInterrupt, SystemExit) as error:  # before the first round
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        raise Interrupted(number, None, name) from error
    except BaseException as error:
        with suppress(OSError):  # the disk may be full, which the first error reports
            if not (goes_on and isinstance(error, ClusterLost)):
                folder.mark("FAILED", masked(f"{error}\n\n{traceback.format_exc()}"))
        raise


def write_partition(folder: RunFolder, manifest: Manifest, info: SetInfo) -> None:
    """Write partition.json, partition.csv with a row for each client and one for the validation set, and examples.csv.

    Long tables are written as Parquet files instead of CSV, see `table_file`.
    """
    write_file(folder.partition, manifest.to_json().encode())
    clients = partition_table(manifest.class_counts, info.groups, manifest.validation_counts)
    for path, table in ((folder.partition_table, clients), (folder.examples, manifest.division.table)):
        suffix, content = table_file(table)
        write_file(path.with_suffix(suffix), content)


def hyperparameters(config: Config) -> Settings:
    """Return the settings that runs are compared by, with dotted keys, for TensorBoard's hyper-parameter view."""
    groups = {"seed", "rounds", "cohort", "time", "data", "partition", "model", "local", "labels"}
    flat = {"methods": methods_label(config.methods)} | flatten(config.model_dump(mode="json", include=groups))
    return {key: value for key, value in flat.items() if isinstance(value, str | int | float) and key != "data.root"}
