"""Runs whose storage is a URI: the same bits from any machine, always resumable there, faults as sentences."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import raysim
from raysim.base.errors import ConfigError, RaysimError
from raysim.cli.main import main
from raysim.config import folder_of
from raysim.engine.simulation import Stopped
from raysim.folders import filesystems, storage
from raysim.folders.filesystems import RemoteFolder, reached_folder
from raysim.folders.run_folder import RunFolder
from raysim.folders.storage import HOLDER, StoredRun, local_copy
from raysim.running.runner import execute
from tests.support.federations import plan_of
from tests.support.s3 import KEYS, s3_server

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch):
    """Most of the time of so small a run."""
    monkeypatch.setattr("raysim.running.record.Recorder.draw", lambda *values: None)


@pytest.fixture
def on_s3(endpoint, monkeypatch, tmp_path):
    """s3://bucket/..., a folder of this test's own, with the server's address and keys in the environment."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "RAYSIM_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    filesystems._limited.cache_clear()
    return f"s3://bucket/{tmp_path.name}/runs"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(name): from now on this process has the local folders of that machine."""

    def become(name):
        monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / name))

    become("first")
    return become


def a_plan(root, place, **groups):
    groups = {"checkpoint": {"every_s": 0}, "model": {"name": "mlp"}, "local": {"epochs": 0.2}, "rounds": 4, **groups}
    return plan_of(root, ["scaffold", "fedavgm"], name="a", storage=place, **groups)


def stop_after(round_index):
    def on_round(record):
        if record.round_index == round_index:
            raise Stopped

    return on_round


def digest_at(place):
    return json.loads((local_copy(f"{place}/a") / "summary.json").read_text())["params_sha256"]


@pytest.fixture(scope="module")
def expected(root, tmp_path_factory):
    """The digest of the run that nothing interrupted, in a plain folder."""
    return execute(a_plan(root, str(tmp_path_factory.mktemp("plain"))))["params_sha256"]


# --- the same bits, from anywhere -------------------------------------------------------------------------------------


def test_missing_bucket_is_named(root, on_s3):
    with pytest.raises(ConfigError, match="no bucket 'nosuch'"):
        execute(a_plan(root, "s3://nosuch/runs"))


@pytest.mark.slow
def test_run_killed_on_one_machine_goes_on_on_another(root, tmp_path, on_s3, expected):
    raw = a_plan(root, on_s3).config.model_dump(mode="json", exclude_unset=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**raw, "rounds": 4}))
    command = [sys.executable, "-m", "raysim", "run", str(tmp_path / "run.yaml")]

    def start(name):
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "RAYSIM_CACHE": str(tmp_path / name)}
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    process, deadline = start("one"), time.monotonic() + 120
    remote = reached_folder(f"{on_s3}/a")
    while "checkpoints/round-000001/checkpoint.json" not in remote.files():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert "COMPLETED" not in remote.files()
    process = start("two")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "resuming at round" in output
    assert f"stored at:     {on_s3}/a" in output
    assert digest_at(on_s3) == expected
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEYS["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path


class Killed(BaseException):
    """What ends a process between two of its operations on the storage."""


@pytest.mark.slow
def test_what_lies_there_can_be_gone_on_from_whenever_the_process_dies(root, tmp_path, machine, monkeypatch, expected):
    place, operations = f"file://{tmp_path}/there", {"left": 10**9, "done": 0}

    def counted(method):
        def act(*values, **named):
            if operations["left"] <= 0:
                raise Killed
            operations["left"] -= 1
            operations["done"] += 1
            return method(*values, **named)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(filesystems, "PARALLEL", 1)
        for name in ("_replace", "delete"):
            patch.setattr(RemoteFolder, name, counted(getattr(RemoteFolder, name)))
        execute(a_plan(root, f"{place}/whole"))
        assert operations["done"] > 60
        for index, count in enumerate(sorted(random.Random(1).sample(range(operations["done"]), 4))):
            machine(f"dies-{index}")
            operations["left"] = count
            with pytest.raises(Killed):
                execute(a_plan(root, f"{place}/{index}"))
            operations["left"] = 10**9
            machine(f"goes-on-{index}")
            summary = execute(a_plan(root, f"{place}/{index}"))
            assert summary["params_sha256"] == expected
            clients = RunFolder(local_copy(f"{place}/{index}/a")).client_rows()
            assert sorted(clients.column("round").to_pylist()) == sorted(list(range(4)) * 7)


@pytest.mark.slow
def test_newest_state_counts_wherever_it_was_made(root, tmp_path, machine, expected):
    place, begun = f"file://{tmp_path}/there", []
    with pytest.raises(Stopped):
        execute(a_plan(root, place), on_round=stop_after(0))
    machine("second")
    with pytest.raises(Stopped):
        execute(a_plan(root, place), on_round=stop_after(2), on_start=lambda *values: begun.append(values[1]))
    machine("first")
    execute(a_plan(root, place), on_start=lambda *values: begun.append(values[1]))
    assert begun == [1, 3]
    assert digest_at(place) == expected
    machine("second")
    assert execute(a_plan(root, place))["params_sha256"] == expected
    longer = execute(a_plan(root, place, rounds=5))  # more rounds, where the run has never been to its end
    assert longer["rounds"] == 5
    assert json.loads((tmp_path / "there" / "a" / "summary.json").read_text()) == longer


def test_emptied_local_folder_does_not_empty_the_storage(root, tmp_path, machine, expected):
    place = f"file://{tmp_path}/there"
    execute(a_plan(root, place))
    there = sorted(path.name for path in (tmp_path / "there" / "a").iterdir())
    (local,) = [path.parent for path in (tmp_path / "first").rglob(HOLDER)]  # where the run worked
    for path in local.iterdir():  # rm -rf FOLDER/*, which leaves what begins with a dot
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert execute(a_plan(root, place))["params_sha256"] == expected
    assert sorted(path.name for path in (tmp_path / "there" / "a").iterdir()) == there
    assert RunFolder(local).status.name == "completed"


def test_run_deleted_there_begins_anew_and_the_local_one_is_put_aside(root, tmp_path, machine):
    notes, place, begun = [], f"file://{tmp_path}/there", []
    with pytest.raises(Stopped):
        execute(a_plan(root, place), on_round=stop_after(1))
    remote = reached_folder(place)
    remote.delete(remote.files())
    plan = a_plan(root, place, rounds=1, seed=9)
    execute(plan, on_start=lambda *values: begun.append(values[1]), on_note=notes.append)
    assert begun == [0]
    (aside,) = folder_of(place, "runs").glob("a.aside-*")
    assert any(str(aside) in note for note in notes)
    assert list(aside.glob("checkpoints/round-*"))


def test_process_whose_run_was_taken_over_ends_and_leaves_it_alone(root, tmp_path, machine, expected):
    place = f"file://{tmp_path}/there"

    def take_over(record):
        if record.round_index == 1:
            machine("second")
            execute(a_plan(root, place))
            machine("first")

    with pytest.raises(RaysimError, match=rf"run 'a' was resumed by {socket.gethostname()} \(process \d+\) at"):
        execute(a_plan(root, place), on_round=take_over)
    assert RunFolder(local_copy(f"{place}/a")).status.name == "completed"
    assert digest_at(place) == expected


def test_storage_that_fails_in_mid_run_ends_it_and_loses_nothing(root, tmp_path, machine, monkeypatch, expected):
    notes, place, begun = [], f"file://{tmp_path}/there", []
    local = folder_of(place, "runs") / "a"

    def fail(record):
        if record.round_index == 1:
            monkeypatch.setattr(storage, "WAITS_S", (0.01, 0.01))
            patch.setattr(RemoteFolder, "send", lambda *values: (_ for _ in ()).throw(OSError("no route to host")))

    with (
        monkeypatch.context() as patch,
        pytest.raises(RaysimError, match=r"failed 3 times \(no route to host\)") as caught,
    ):
        execute(a_plan(root, place), on_round=fail, on_note=notes.append)
    assert f"in run {local}. The local folder is complete" in str(caught.value)
    assert sum("trying again in 0.01 s" in note for note in notes) == 2
    assert RunFolder(local).status.name == "failed"
    execute(a_plan(root, place), on_start=lambda *values: begun.append(values[1]))
    assert begun == [3]
    assert digest_at(place) == expected


# --- what travels -----------------------------------------------------------------------------------------------------


def test_only_changes_travel_and_in_an_order_that_keeps_a_checkpoint_whole(tmp_path, monkeypatch):
    folder, sent = RunFolder.make(tmp_path / "here", "a"), []
    remote = reached_folder(f"file://{tmp_path}/there/a")
    monkeypatch.setattr(filesystems, "PARALLEL", 1)
    replace, delete = RemoteFolder._replace, RemoteFolder.delete
    monkeypatch.setattr(RemoteFolder, "_replace", lambda *values: (sent.append(values[1]), replace(*values)))
    monkeypatch.setattr(
        RemoteFolder, "delete", lambda *values: (sent.extend(f"-{n}" for n in values[1]), delete(*values))
    )

    def write(*names):
        for name in names:
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / name).write_text(f"{name} {time.time_ns()}")

    def pushed():
        sent.clear()
        run.push()
        return list(sent)

    run = StoredRun(remote, folder, lambda line: None)
    run.pull()
    write("checkpoints/round-000001/checkpoint.json", "checkpoints/round-000001/server.json", "progress.csv", ".lock")
    write("checkpoints/memory/client-1.json", "FAILED", "checkpoints/.round-000002.7.part/server.json")
    run.claim()
    assert sent == [
        HOLDER,
        "progress.csv",
        "checkpoints/memory/client-1.json",
        "checkpoints/round-000001/server.json",
        "checkpoints/round-000001/checkpoint.json",
        "FAILED",
    ]
    assert pushed() == []
    write("progress.csv")
    assert pushed() == ["progress.csv"]
    write("checkpoints/round-000002/checkpoint.json", "COMPLETED")
    for name in (
        "FAILED",
        "progress.csv",
        "checkpoints/round-000001/checkpoint.json",
        "checkpoints/memory/client-1.json",
    ):
        (folder.path / name).unlink()
    assert pushed() == [
        "-FAILED",
        "-progress.csv",
        "checkpoints/round-000002/checkpoint.json",
        "COMPLETED",
        "-checkpoints/memory/client-1.json",
        "-checkpoints/round-000001/checkpoint.json",
    ]


def test_unnamed_runs_of_two_machines_get_two_folders(root, tmp_path, machine, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *values: "run-now")
    for name in ("first", "second"):
        machine(name)
        execute(plan_of(root, name=None, storage=f"file://{tmp_path}/there", rounds=1))
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["run-now", "run-now-1"]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_at_a_uri_are_loaded_and_reported(root, on_s3, tmp_path, monkeypatch, capsys):
    runs = [
        raysim.run(a_plan(root, on_s3, seed=seed, rounds=1).config.model_dump(), name=f"s{seed}") for seed in (0, 1)
    ]
    loaded = raysim.load(on_s3)
    assert [run.accuracy for run in loaded] == [run.accuracy for run in runs]
    assert raysim.load(f"{on_s3}/s1").clients.equals(runs[1].clients)
    assert not list(loaded.folder.rglob("checkpoints"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["raysim", "report", on_s3])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "report: reports/runs/report.md" in capsys.readouterr().out
    assert (tmp_path / "reports" / "runs" / "report.md").is_file()


def test_copy_fetches_what_changed_and_forgets_what_is_gone(tmp_path, machine, monkeypatch):
    there, fetched = tmp_path / "there", []
    (there / "run").mkdir(parents=True)
    for name in ("run/config.yaml", "run/progress.csv", "other"):
        (there / name).write_text(name)
        os.utime(there / name, (1e9, 1e9))
    fetch = RemoteFolder.fetch
    monkeypatch.setattr(RemoteFolder, "fetch", lambda *values: (fetched.append(sorted(values[2])), fetch(*values)))
    here = local_copy(f"file://{there}")
    (there / "other").unlink()
    (there / "run" / "progress.csv").write_text("more")
    os.utime(there / "run" / "progress.csv", (int(time.time()), int(time.time())))
    assert local_copy(f"file://{there}") == here
    assert local_copy(f"file://{there}") == here
    # What changed a moment ago may change once more within the second that some systems count in.
    assert fetched == [["other", "run/config.yaml", "run/progress.csv"], ["run/progress.csv"], ["run/progress.csv"]]
    assert sorted(path.name for path in here.rglob("[!.]*")) == ["config.yaml", "progress.csv", "run"]
    assert (here / "run" / "progress.csv").read_text() == "more"
