"""How signals end the loop over rounds."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from raysim.engine import simulation
from raysim.engine.simulation import Interrupted, collected_signals
from raysim.running.runner import execute
from tests.support.federations import plan_of
from tests.support.runs import a_plan


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_round_that_outlasts_a_signal_is_left(number, root, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "GRACE_S", 0.2)
    plan = a_plan(root, tmp_path, rounds=5, checkpoint={"every_s": 0})
    before = signal.signal(number, signal.SIG_DFL)  # not as `nohup` leaves SIGHUP: ignored

    def on_round(record):
        if record.round_index == 1:
            signal.raise_signal(number)
            time.sleep(30)

    began = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        execute(plan, on_round=on_round)
    assert time.monotonic() - began < 25
    assert (caught.value.signal_number, caught.value.next_round) == (number, 2)
    assert not (tmp_path / "a" / "FAILED").exists()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with collected_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == []
            signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_without_a_name_says_the_name_to_go_on_with(root, tmp_path):
    plan = plan_of(root, storage=str(tmp_path), rounds=5)
    with pytest.raises(Interrupted) as caught:
        execute(plan, on_round=lambda _: signal.raise_signal(signal.SIGTERM))
    (folder,) = tmp_path.iterdir()
    assert f"the same command with name={folder.name} resumes at round 2" in str(caught.value)
    (folder / ".progress.csv.99999.part").touch()
    (folder / "checkpoints" / ".round-000002.99999.part").mkdir()
    assert execute(plan_of(root, name=folder.name, storage=str(tmp_path), rounds=5))["rounds"] == 5
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(("every_s", "saved"), [(0.0, [1, 2, 3]), (1e9, [3])])
def test_records_are_durable_before_the_checkpoint_that_counts_on_them(every_s, saved):
    done = []

    def flush():
        done.append("records")
        return {"rows": str(len(done))}

    record = SimpleNamespace(write=lambda r: None, flush=flush)
    server = SimpleNamespace(
        run_round=lambda index: index,
        changed_clients=lambda: [4],
        client_memory=lambda client: {"of": client},
        snapshot=lambda: "snapshot",
    )

    def save(next_round, snapshot, memories, records):
        assert (snapshot, list(memories)) == ("snapshot", [(4, {"of": 4})])
        assert records == {"rows": str(len(done))}  # what was just written, and no other
        done.append(next_round)

    ended = simulation.simulate(
        server,
        first_round=0,
        num_rounds=3,
        recorder=record,
        store=SimpleNamespace(save=save),
        checkpoint_every_s=every_s,
        on_round=lambda _: None,
    )
    assert ended == ""
    assert done == [step for number in saved for step in ("records", number)]


def simulated(done, every_s, on_round):
    """Five rounds of a server without a model; `done` gets the round from which each checkpoint goes on."""
    server = SimpleNamespace(
        run_round=lambda index: index, changed_clients=lambda: [], client_memory=lambda client: None, snapshot=dict
    )
    return simulation.simulate(
        server,
        first_round=0,
        num_rounds=5,
        recorder=SimpleNamespace(write=lambda record: None, flush=dict),
        store=SimpleNamespace(save=lambda next_round, *others: done.append(next_round)),
        checkpoint_every_s=every_s,
        on_round=on_round,
    )


@pytest.mark.parametrize(("every_s", "saved"), [(0.0, [1, 2]), (1e9, [2])])
def test_a_run_that_a_signal_or_a_callback_ends_has_one_checkpoint_of_its_last_round(every_s, saved):
    done = []
    with pytest.raises(Interrupted) as caught:
        simulated(done, every_s, lambda index: signal.raise_signal(signal.SIGTERM) if index == 1 else None)
    assert (caught.value.signal_number, caught.value.next_round) == (signal.SIGTERM, 2)
    assert done == saved
    done.clear()
    assert simulated(done, every_s, lambda index: "stop" if index == 1 else None) == "on_round returned stop"
    assert done == saved


@pytest.mark.parametrize(
    ("received", "saved", "expected"),
    [([signal.SIGTERM], 3, (signal.SIGTERM, 3)), ([], 3, (signal.SIGINT, 3)), ([signal.SIGHUP], 0, (signal.SIGHUP, None))],
)  # fmt: skip
def test_what_ends_a_round_half_way_says_where_the_run_goes_on(received, saved, expected):
    with pytest.raises(Interrupted) as caught, simulation._ended_in_between(received, lambda: saved):
        raise KeyboardInterrupt
    assert (caught.value.signal_number, caught.value.next_round) == expected


def test_the_timer_of_the_program_that_calls_a_run_is_left_alone(root, tmp_path):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        execute(a_plan(root, tmp_path, rounds=1), on_round=lambda _: signal.raise_signal(signal.SIGALRM))
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung == [1]


def test_a_round_that_a_signal_interrupts_ends_before_a_batch_system_kills_it():
    assert simulation.GRACE_S < 30
