"""A Ray of its own for these tests: two nodes, a token, and ports that nobody else has; and a clone to submit from."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from packaging.version import Version
from ray._private.runtime_env import packaging

from tests.support.nodes import WORKER_IP, without

PROJECT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent

#: Whether this Ray knows tokens. Before, RAY_AUTH_MODE has no effect.
HAS_TOKENS = Version(version("ray")) >= Version("2.52")

#: Whether `ray job` leaves out what a .rayignore names: from Ray 2.53.
READS_RAYIGNORE = hasattr(packaging, "_get_ignore_file")

#: Every process of the cluster inherits this variable, so that exactly those can be ended.
MARK = "RAYSIM_TEST_CLUSTER"


@dataclass(frozen=True)
class Cluster:
    """A running Ray with a dashboard. home: RAYSIM_HOME of its nodes; environment: of a user who has its token."""

    folder: Path
    home: Path
    address: str
    dashboard: str
    environment: dict[str, str]

    def command(
        self, *words: object, cwd: Path, timeout: float = 600, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command as its user types it."""
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def job(self, verb: str, *words: object, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """`ray job VERB ...`."""
        if verb == "submit" and not READS_RAYIGNORE and (cwd / ".rayignore").is_file():
            excludes = {"excludes": (cwd / ".rayignore").read_text().splitlines()}
            words = ("--runtime-env-json", json.dumps(excludes), *words)
        return self.command("ray", "job", verb, *words, cwd=cwd, timeout=timeout)

    def submit(self, config: str, *overrides: str, cwd: Path, options: tuple[str, ...] = (), verb: str = "run"):
        """`ray job submit` as the documentation has it."""
        words = ("--working-dir", ".", *options, "--", "python", "-m", "raysim", verb, config, *overrides)
        return self.job("submit", *words, cwd=cwd)

    def processes(self) -> list[psutil.Process]:
        """What runs in this cluster, jobs included."""
        return marked(self.folder)


def marked(folder: Path) -> list[psutil.Process]:
    """The processes that inherited MARK=folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def end(folder: Path) -> None:
    """End the processes marked with this folder, and no others."""
    for process in marked(folder):
        try:
            process.kill()
        except psutil.Error:
            continue
    deadline = time.monotonic() + 30
    while marked(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_for(condition, what: str, timeout: float = 300):
    """What condition() returns once it is true.

    Raises:
      AssertionError: it was not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {timeout:g} s")


@pytest.fixture(scope="session")
def cluster():
    """A head without CPUs and a worker node with three and a logical GPU, started as the cluster files do it."""
    folder = Path(tempfile.mkdtemp(prefix="rs"))  # short: Ray's sockets lie below it
    port, dashboard, client, *agents = free_ports(5)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RAYSIM_", "PYTEST_"))
    }
    environment |= {
        "HOME": str(folder),
        "PATH": f"{BIN}:{environment['PATH']}",
        "RAYSIM_HOME": str(folder / "shared"),
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    started = Cluster(
        folder,
        folder / "shared",
        f"127.0.0.1:{port}",
        f"http://127.0.0.1:{dashboard}",
        {**environment, "RAY_AUTH_MODE": "token", "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"},
    )

    def ray_start(place: str, *words: object) -> None:
        # Nodes must not share a folder: each unpacks the uploaded files into its own, over what is there.
        script = f'source {PROJECT}/cluster/env.sh && exec ray start --temp-dir={folder}/{place} "$@"'
        command = ["bash", "-c", script, "bash", *map(str, words)]
        if place != "head":
            command = without([folder / "head"], command)
        for _ in range(3):  # on a machine at its limits a raylet misses Ray's own deadline of 30 s
            here = {**environment, MARK: str(folder)}
            result = subprocess.run(command, env=here, cwd=folder, timeout=180, capture_output=True, text=True)
            if result.returncode == 0:
                return
            assert "timed out during startup" in result.stderr, result.stdout + result.stderr
            if place == "head":
                end(folder)
        raise AssertionError(f"Ray did not start in 3 attempts: {result.stderr}")

    try:
        if HAS_TOKENS:
            assert started.command("ray", "get-auth-token", "--generate", cwd=folder).returncode == 0
        head = ("--head", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}")
        head = (
            *head,
            f"--ray-client-server-port={client}",
            "--node-ip-address=127.0.0.1",
            "--num-cpus=0",
            "--num-gpus=0",
        )
        memory = "--object-store-memory=200000000"
        ray_start("head", *head, memory, f"--dashboard-agent-listen-port={agents[0]}")
        worker = (f"--address=127.0.0.1:{port}", f"--node-ip-address={WORKER_IP}", "--num-cpus=3", "--num-gpus=1")
        ray_start("worker", *worker, memory, f"--dashboard-agent-listen-port={agents[1]}")
        yield started
    finally:
        end(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """A clone of this project with what is not committed yet, and with data that must not be uploaded."""
    folder = tmp_path_factory.mktemp("clone") / "raysim"
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(folder)], check=True, timeout=120)
    listing = ["git", "ls-files", "--modified", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)
    for name in ("data/big/big.arrow", "mine/large.npz", ".venv/lib/torch.so", "runs/old/checkpoint.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "wb") as file:
            file.truncate(150 * 2**20)  # a sparse file: more than Ray takes, but no disk
    return folder
