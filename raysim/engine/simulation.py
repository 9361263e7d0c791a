"""The loop over rounds: run, record, checkpoint, until the last round or a signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from raysim.base.errors import ClusterLost
from raysim.base.texts import round_name
from raysim.engine.checkpoint import Checkpoint, CheckpointStore
from raysim.engine.round_metrics import RoundRecord

if TYPE_CHECKING:
    from raysim.engine.ray.server import RayServer
    from raysim.engine.server import Server

ServerHandle: TypeAlias = "Server | RayServer"


class RecordKeeper(Protocol):
    """Receiver of a round's results; `flush` makes them durable and returns their checksums for the checkpoint."""

    def write(self, record: RoundRecord) -> None: ...
    def flush(self) -> Mapping[str, str]: ...


#: Seconds that a round may take after a signal. Batch systems kill a process after 30.
GRACE_S = 20.0


#: Reason to stop of a run that `on_round` ended.
ENDED_BY_CALL = "on_round returned stop"


class Interrupted(Exception):
    """A signal ended a run or a sweep.

    next_round: the round at which the run resumes; None for a sweep, and before the first checkpoint. name: generated
    name of a run whose configuration has no name; needed to resume the run.
    """

    def __init__(self, signal_number: int, next_round: int | None, name: str = ""):
        super().__init__(signal_number, next_round, name)
        self.signal_number, self.next_round, self.name = signal_number, next_round, name

    def __str__(self) -> str:
        command = f"the same command with name={self.name}" if self.name else "the same command"
        if self.next_round is None:
            return f"stopped by a signal; {command} resumes the unfinished run or sweep"
        return f"stopped by a signal after a checkpoint; {command} resumes at {round_name(self.next_round)}"


class Stopped(Exception):
    """Raised by `on_round` to end a run unfinished, without a failure."""


def restore(server: ServerHandle, checkpoint: Checkpoint, store: CheckpointStore) -> None:
    """Restore a checkpoint in a new server."""
    server.restore(checkpoint.snapshot)
    for client, path in checkpoint.memories.items():
        server.restore_memory(client, store.read_memory(path))


def simulate(
    server: ServerHandle,
    *,
    first_round: int,
    num_rounds: int,
    recorder: RecordKeeper,
    store: CheckpointStore,
    checkpoint_every_s: float,
    on_round: Callable[[RoundRecord], object],
    reason_to_stop: Callable[[], str] = lambda: "",
    on_saved: Callable[[], None] = lambda: None,
) -> str:
    """Run the rounds first_round .. num_rounds - 1, or fewer.

    A checkpoint is written after a round if
      - `checkpoint_every_s` seconds have passed since the last checkpoint,
      - the round is the last: no round is left, `reason_to_stop` returns a reason, or `on_round` returns "stop", or
      - SIGTERM, SIGINT or SIGHUP was received. The run then ends after the current round, if the round ends within
        GRACE_S seconds.

    Args:
      on_round: on_round(record) is called after a round is recorded and its checkpoint, if any, is written; an error in
        `on_round` ends the run.
      on_saved: on_saved() is called after each checkpoint.
    Returns:
      The reason to stop; empty if there was none and the last round was run.
    Raises:
      Interrupted: a signal was received.
    """
    saved_at, next_saved = time.monotonic(), first_round

    def save(next_round: int) -> None:
        nonlocal saved_at, next_saved
        records = recorder.flush()
        memories = ((client, server.client_memory(client)) for client in server.changed_clients())
        store.save(next_round, server.snapshot(), memories, records)
        next_saved = next_round
        on_saved()
        saved_at = time.monotonic()

    if first_round and (reason := reason_to_stop()):  # the process was killed between its last checkpoint and its end
        return reason
    with collected_signals(grace_s=GRACE_S) as received, _ended_in_between(received, lambda: next_saved):
        for round_index in range(first_round, num_rounds):
            record = server.run_round(round_index)
            recorder.write(record)
            next_round = round_index + 1
            reason = reason_to_stop()
            is_last = next_round == num_rounds or bool(reason)
            if is_last or received or time.monotonic() - saved_at >= checkpoint_every_s:
                save(next_round)
            if on_round(record) == "stop" and not is_last:
                reason, is_last = ENDED_BY_CALL, True
            if (is_last or received) and next_saved != next_round:  # on_round returned "stop", or a signal just came
                save(next_round)
            if is_last:
                return reason
            if received:
                raise Interrupted(received[0], next_round)
    return ""


@contextmanager
def _ended_in_between(received: list[int], next_saved: Callable[[], int]) -> Iterator[None]:
    """Raise Interrupted for a second signal or a timeout inside a round; the message names the round to resume from.

    A signal to the whole group of processes also ends the server: after a signal, ClusterLost becomes Interrupted too.
    """
    try:
        yield
    except ClusterLost as error:
        if not received:
            raise
        raise Interrupted(received[0], next_saved() or None) from error
    except KeyboardInterrupt as error:
        # The user's code may raise KeyboardInterrupt without a signal.
        raise Interrupted(received[0] if received else signal.SIGINT, next_saved() or None) from error


@contextmanager
def collected_signals(on_first: Callable[[], None] = lambda: None, *, grace_s: float = 0.0) -> Iterator[list[int]]:
    """Collect SIGTERM, SIGINT and SIGHUP; a second signal raises KeyboardInterrupt at once.

    Ignored signals stay ignored, such as SIGHUP under nohup.

    Args:
      on_first: called in the handler of the first signal.
      grace_s: seconds after the first signal after which KeyboardInterrupt is raised without a second signal; 0: never.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def catch(number: int) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, handle)

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        if grace_s:  # only after a signal, since the user's code may use the process's timer before
            catch(signal.SIGALRM)
            signal.setitimer(signal.ITIMER_REAL, grace_s)
        on_first()

    try:
        for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            catch(asked)
    except ValueError:  # outside the main thread, the caller handles signals
        yield received
        return
    try:
        yield received
    finally:
        if grace_s and received:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
