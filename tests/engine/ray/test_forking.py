"""Ray's workers as forks of one process: what reaches a worker, and who ends with whom."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from raysim.engine.ray import forking
from raysim.engine.ray.forking import ADDRESS, ForkServer, ask_for_worker
from tests.support.sweeps import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

WORKER = """
import json, os, sys, threading, time
facts = dict(
    pid=os.getpid(), parent=os.getppid(), group=os.getpgid(0), argv=sys.argv, path=sys.path[0], folder=os.getcwd(),
    given=os.environ.get("GIVEN"), names=len(os.environ), torch="torch" in sys.modules, ray="ray" in sys.modules,
    badness=open("/proc/self/oom_score_adj").read(), name=__name__, threads=threading.active_count(),
    libraries=sorted({"torchvision", "timm", "peft"} & set(sys.modules)),
)
print("out"); print("err", file=sys.stderr)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(facts, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def started(server, tmp_path):
    """started(seconds, environment) -> (the process that Ray knows, facts of the forked worker, output's file)."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    processes = []

    def start(seconds, environment=None, context=None):
        at, folder, output = tmp_path / "facts.json", tmp_path / "folder", tmp_path / "output"
        folder.mkdir(exist_ok=True)
        at.unlink(missing_ok=True)
        raised = 'echo 500 > /proc/self/oom_score_adj; exec "$0" "$@"'
        worker = [forking.__file__, str(script), str(at), str(seconds), "--language=PYTHON"]
        worker += [] if context is None else [f"{forking.CONTEXT}{json.dumps(context)}"]
        command = ["sh", "-c", raised, sys.executable, *worker]
        with output.open("w") as file:
            environment = environment or {ADDRESS: server.address, "GIVEN": "ü"}
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        processes.append(process)
        wait_for(at.exists)
        return process, json.loads(at.read_text()), output

    yield start
    for process in processes:
        process.kill()
        process.wait()


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_worker_is_a_fork_with_what_ray_gave_it(server, started, tmp_path):
    process, facts, output = started(0)
    assert process.wait(60) == 0
    assert output.read_text() == "out\nerr\n"
    assert facts["torch"]
    assert not facts["ray"], "Ray reads the token of its session as it is imported"
    assert facts["argv"] == [str(tmp_path / "worker.py"), str(tmp_path / "facts.json"), "0"]
    assert (facts["path"], facts["folder"]) == (str(tmp_path), str(tmp_path / "folder"))
    assert (facts["given"], facts["name"], facts["threads"]) == ("ü", "__main__", 1)
    assert facts["badness"] == "500\n"
    assert facts["names"] <= 4, "the environment is Ray's alone"
    assert facts["libraries"] == [], "the quickstart needs none of these"
    assert facts["pid"] == facts["group"] != process.pid
    assert "--serve" in psutil.Process(facts["parent"]).cmdline()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "libraries"),
    [
        ([("no_module:net", False), ("resnet18", False)], ["torchvision"]),
        ([("resnet20", True), ("vit_b16", False)], ["peft", "timm", "torchvision"]),
        ([("gru", False), ("transformers:folder", False)], []),
    ],
)
def test_libraries_of_the_models_are_imported_before_the_forks(started, models, libraries):
    server = ForkServer(models)
    _, facts, _ = started(0, {ADDRESS: server.address})
    server.close()
    assert facts["libraries"] == libraries
    assert facts["threads"] == 1, "a fork of a process with threads may hang"


@pytest.mark.parametrize(("prefix", "is_forked"), [([], True), (["true", "&&"], False)])
def test_a_runtime_environment_of_variables_alone_is_forked(started, prefix, is_forked):
    """Ray Tune gives its trials variables; a runtime environment that changes more is set up by Ray."""
    context = {"env_vars": {"GIVEN": "trial ${ADDED}"}, "command_prefix": prefix, "py_executable": sys.executable}
    _, facts, _ = started(0, context=context)
    assert facts["torch"] == is_forked
    assert facts["given"].startswith("trial ")


def test_the_process_that_ray_knows_ends_with_the_worker(started):
    process, facts, _ = started(600)
    assert process.poll() is None
    os.kill(facts["pid"], signal.SIGKILL)
    assert process.wait(30) == 0
    wait_for(lambda: not psutil.pid_exists(facts["pid"]))  # not even a zombie is left


def test_without_a_fork_server_ray_sets_the_worker_up_itself(tmp_path):
    assert not ask_for_worker(["worker.py"], str(tmp_path / "nobody"))
    command = [sys.executable, forking.__file__, "-c", "import sys; print(sys.argv, 'torch' in sys.modules)", "x"]
    ended = subprocess.run([*command, "--language=PYTHON"], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "['-c', 'x'] False\n"


def test_workers_outlive_a_killed_fork_server(started):
    server = ForkServer()
    process, facts, _ = started(600, {ADDRESS: server.address})
    os.kill(facts["parent"], signal.SIGKILL)
    server.close()
    assert not ask_for_worker(["worker.py"], server.address)
    assert process.poll() is None
    assert not is_gone(facts["pid"])
    os.kill(facts["pid"], signal.SIGKILL)
    assert process.wait(30) == 0


def test_the_fork_server_ends_with_the_process_that_started_it():
    code = (
        "from raysim.engine.ray.forking import ForkServer as F; import time; f = F(); print(f._process.pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)"], stdout=subprocess.PIPE, text=True
    ) as owner:
        pid = int(owner.stdout.readline())
        assert not is_gone(pid)
        owner.kill()
    wait_for(lambda: is_gone(pid))


def test_workers_of_a_local_ray_are_forked(ray_cluster):
    def parent():
        return psutil.Process().parent().cmdline()

    assert "--serve" in ray_cluster.get(ray_cluster.remote(parent).remote())
    running = {
        Path(part).name for process in psutil.Process().children(recursive=True) for part in process.cmdline()[:3]
    }
    assert "forking.py" in running
    assert not running & {"dashboard.py", "monitor.py", "log_monitor.py"}


def test_a_worker_gets_the_three_streams_of_the_process_that_asks(tmp_path):
    found = []

    def answer():
        with listener.accept()[0] as connection:
            size, streams, _, _ = socket.recv_fds(connection, 8, 3)
            with connection.makefile("rb") as stream:
                stream.read(int.from_bytes(size, "big"))
        for stream in streams:
            found.append(os.path.sameopenfile(stream, len(found)))
            os.close(stream)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_for_worker([], str(tmp_path / "socket"))
        thread.join()
    assert found == [True] * 3
