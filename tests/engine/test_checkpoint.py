"""Checkpoints and resuming: to the same bits, and only with the same configuration and data."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from raysim.base.errors import ClientError, ConfigError, RaysimError, RunExists
from raysim.cli.main import app
from raysim.engine.checkpoint import CheckpointStore
from raysim.engine.simulation import restore
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.support.federations import plan_of, raw_config, run, server_on
from tests.support.output import in_order
from tests.support.runs import a_plan, quietly, rows_of, stopped_after, timeless

PROJECT = Path(__file__).parent.parent.parent


def write_config(path, root, tmp_path, backend, **groups):
    raw = raw_config(
        root,
        ["scaffold", "fedavgm", "fedvg"],
        name="killed",
        storage=str(tmp_path / "runs"),
        rounds=12,
        checkpoint={"every_s": 0},
        resources={"backend": backend},
        **groups,
    )
    if backend == "ray":
        raw["resources"] |= {"trainers": 2}
    path.write_text(yaml.safe_dump(raw))
    return raw


def start(path, *overrides):
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "raysim", "run", str(path), *overrides],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def listening(process):
    """(address, port) pairs at which a process and its children take connections."""
    found = []
    for member in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += member.net_connections("tcp")
    return places_of(found)


def others_listening(process):
    """The same of all other processes, such as the Ray of another test."""
    own = {process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))}
    return places_of(connection for connection in psutil.net_connections("tcp") if connection.pid not in own)


def places_of(connections):
    there = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
    return {(address.ip.removeprefix("::ffff:"), address.port) for address in there}


def answers(address, port):
    """Whether a connection is taken."""
    try:
        with socket.create_connection((address, port), timeout=2):
            return True
    except OSError:
        return False


def outward_addresses():
    """The addresses under which other machines know this one, and one of the loopback that nobody should listen at."""
    known = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    outward = [each.address for each in known if each.family == socket.AF_INET and not each.address.startswith("127.")]
    return [*outward, "127.0.0.2"]  # who listens at 0.0.0.0 is reached there, too, on a machine without a network


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "number"),
    [("ray", signal.SIGKILL), pytest.param("serial", signal.SIGTERM, marks=pytest.mark.essential)],
)
def test_killed_driver_resumes_to_the_same_bits(backend, number, root, tmp_path):
    raw = write_config(tmp_path / "run.yaml", root, tmp_path, backend)
    folder = tmp_path / "runs" / "killed"
    process = start(tmp_path / "run.yaml")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(folder.glob("checkpoints/round-00000[3-9]")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    # Nobody reaches a local Ray from other machines: tried at every port.
    places = listening(process)
    assert {address for address, _ in places} <= {"127.0.0.1", "::1"}
    assert any(answers("127.0.0.1", port) for _, port in places) == (backend == "ray")
    elsewhere = {port for address, port in others_listening(process) if address not in ("127.0.0.1", "::1")}
    ports = {port for _, port in places} - elsewhere
    assert len(ports) >= len(places) // 2
    assert not [(address, port) for address in outward_addresses() for port in ports if answers(address, port)]
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM), output
    assert not (folder / "COMPLETED").exists()

    if backend == "ray":
        again = start(tmp_path / "run.yaml")
        output, status = again.communicate(timeout=180)[0], again.returncode
    else:  # in this process, which has PyTorch already
        result = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml")])
        output, status = result.output, result.exit_code
    assert status == 0, output
    if backend == "ray":  # no silence: starting, building, drawing and ending each have their line
        parts = ("checking", "starting Ray on this machine", "looking for the shards", "starting 2 trainers")
        in_order(output, *parts, "resuming at round", "drawing pictures", "run directory:", "ending Ray")
    assert "resuming at round" in output
    expected = quietly(check({**raw, "name": "whole", "resources": {"backend": "serial"}}, "a test"))
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("params_sha256", "accuracy", "best_accuracy", "best_round", "mean_last_10pct_accuracy"):
        assert summary[key] == expected[key], key
    assert timeless(rows_of(folder)) == timeless(rows_of(folder.parent / "whole"))
    tables = [
        pq.read_table(f / "clients.parquet").to_pandas().drop(columns="seconds")
        for f in (folder, folder.parent / "whole")
    ]
    assert tables[0].equals(tables[1])
    board = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in board.Scalars("server/accuracy")] == list(range(12))


def test_a_restored_server_goes_on_as_the_one_before(root, tmp_path):
    """State of methods, client memories, and the counters of BatchNorm, which move no number of their own."""
    plan = plan_of(root, ["scaffold", "fedavgm"], model={"norm": "batch"})
    first, store = run(plan, root, rounds=2), CheckpointStore(tmp_path)
    store.save(2, first.snapshot(), [(client, first.client_memory(client)) for client in first.changed_clients()])
    second = server_on(plan, root)
    checkpoint = store.latest()
    restore(second, checkpoint, store)
    for server in (first, second):
        server.run_round(2)
    assert second.params_sha256() == first.params_sha256()
    assert second.counters == first.counters
    assert all(count > 0 for count in second.counters.values())


def test_resume_refuses_another_configuration(root, tmp_path):
    plan = a_plan(
        root,
        tmp_path,
        [{"tests.support.toys:raises": {"client": 4, "round_index": 1}}],
        cohort={"size": 12},
        checkpoint={"every_s": 0},
    )
    with pytest.raises(ClientError):
        quietly(plan)
    changed = a_plan(root, tmp_path, [], cohort={"size": 12}, local={"lr": 0.2})
    with pytest.raises(ConfigError) as caught:
        quietly(changed)
    assert {fault.key for fault in caught.value.faults} == {"methods", "local.lr"}


def test_resume_refuses_other_data_a_running_run_and_a_damaged_configuration(root, tmp_path):
    raises = [{"tests.support.toys:raises": {"client": 4, "round_index": 1}}]
    plan = a_plan(root, tmp_path, raises, cohort={"size": 12}, checkpoint={"every_s": 0})
    with pytest.raises(ClientError):
        quietly(plan)
    folder = tmp_path / "a"
    with FileLock(folder / ".lock"), pytest.raises(RunExists, match="is running"):
        quietly(plan)
    manifest = replace(plan.manifest, clients=plan.manifest.clients[::-1])
    with pytest.raises(ConfigError, match="the set changed"):
        quietly(replace(plan, manifest=manifest))
    (folder / "config.yaml").write_text("")
    with pytest.raises(RunExists, match="damaged"):
        quietly(plan)


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize("which", ["round-*/server.safetensors", "memory/*.safetensors"])
def test_a_run_with_a_damaged_checkpoint_ends_in_the_same_bits(which, root, tmp_path):
    plan, notes = a_plan(root, tmp_path, ["scaffold"], rounds=4, checkpoint={"every_s": 0}), []
    stopped_after(2, plan)
    newest = sorted((tmp_path / "a" / "checkpoints").glob(which), key=lambda path: path.as_posix()[-18:])[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert (
        execute(plan, on_note=notes.append)["params_sha256"]
        == quietly(plan_of(root, ["scaffold"], rounds=4, name="b", storage=str(tmp_path)))["params_sha256"]
    )
    assert "is damaged" in "".join(notes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [("row", r"progress\.csv lacks round 2 in"), ("part", r"clients\.parquet lacks round"), ("empty", "is damaged")],
)
def test_records_that_were_lost_are_named_and_not_passed_over(damage, words, root, tmp_path):
    plan = a_plan(root, tmp_path, rounds=4, checkpoint={"every_s": 0})
    stopped_after(2, plan)
    progress, (part, *_) = tmp_path / "a" / "progress.csv", sorted((tmp_path / "a" / "clients.parquet").iterdir())
    if damage == "row":
        lines = progress.read_text().splitlines(keepends=True)
        progress.write_text("".join(lines[:2] + lines[3:]))
    elif damage == "part":
        part.unlink()
    else:
        part.write_bytes(b"")
    with pytest.raises(RaysimError, match=words):
        quietly(plan)


def _change_a_digit(path):
    """Of the last number above 0 that the second line of a table has."""
    head, line, rest = path.read_text().split("\n", 2)
    cell = max(index for index, digit in enumerate(line) if digit in "123456789")
    path.write_text("\n".join([head, f"{line[:cell]}{int(line[cell]) % 9 + 1}{line[cell + 1 :]}", rest]))


def _rewrite(path):
    """One number of a table of clients, in a file that is whole."""
    table = pq.read_table(path)
    place = table.schema.get_field_index("weight")
    weights = table.column("weight").to_numpy() + 0.5
    pq.write_table(table.set_column(place, "weight", [weights]), path)


CHANGES = {
    "progress.csv": ("progress.csv", _change_a_digit),
    "clients.parquet": ("clients.parquet/rounds-000001-000001.parquet", _rewrite),
    "arrays": ("arrays/round_00001.npz", lambda path: np.savez_compressed(path, **{"fedvg.norms": np.ones((2, 2))})),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
def test_changed_records_are_refused(kind, root, tmp_path):
    plan = a_plan(root, tmp_path, ["fedvg"], rounds=4, checkpoint={"every_s": 0})
    stopped_after(2, plan)
    file, change = CHANGES[kind]
    change(tmp_path / "a" / file)
    words = (
        rf"^run 'a' cannot be resumed: {kind} changed since the checkpoint after round 3 in [^\n]*\. Restore the file"
    )
    with pytest.raises(RaysimError, match=words):
        quietly(plan)


@pytest.mark.essential
@pytest.mark.slow
def test_what_a_killed_process_left_after_its_checkpoint_changes_nothing(root, tmp_path):
    plan = a_plan(root, tmp_path, ["fedvg"], rounds=4, checkpoint={"every_s": 0})
    stopped_after(1, plan)
    folder = tmp_path / "a"
    with open(folder / "progress.csv", "a") as file:  # two rows that no checkpoint knows, the second one torn
        line = (folder / "progress.csv").read_text().splitlines()[-1]
        file.write(f"2{line[1:]}\n3{line[1 : len(line) - 4]}")
    (folder / "arrays" / "round_00002.npz").write_bytes(b"PK")
    whole = quietly(plan_of(root, ["fedvg"], rounds=4, name="b", storage=str(tmp_path)))
    assert quietly(plan)["params_sha256"] == whole["params_sha256"]
    assert timeless(rows_of(folder)) == timeless(rows_of(tmp_path / "b"))
