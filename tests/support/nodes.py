"""A Ray cluster of several nodes on one machine, of real `ray start` processes, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

PROJECT = Path(__file__).parent.parent.parent
RAY = Path(sys.executable).parent / "ray"
#: Of all nodes but the head. A driver of Ray may connect to any node that has the driver's address.
WORKER_IP = "127.0.0.2"

#: Seconds for anything that takes a few on a machine that has nothing else to do.
PATIENCE_S = 240

#: Ray's emulated cloud, by its class: of its own type, `fake_multinode`, the wheels lack a file.
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"

#: Marks a node as going, by a resource that it alone has. The second reason is preemption.
DRAIN = """
import sys, time, ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client
address, name, notice_s = sys.argv[1:]
with ray.init(address, log_to_driver=False):
    (node,) = (node["NodeID"] for node in ray.nodes() if name in node["Resources"])
    deadline_ms = int(1000 * (time.time() + float(notice_s)))
    assert internal_kv_get_gcs_client().drain_node(node, 2, "a test", deadline_ms)[0]
    time.sleep(1.5)  # trainers look once a second
"""

#: Fields that Ray wants to see in the file of a cluster, and that its emulated cloud has no use for.
UNUSED = (
    *("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@cache
def can_hide_folders() -> bool:
    """Whether this user may mount something in a mount namespace: then a folder can be taken from a worker's sight."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def without(folders: Sequence[Path], command: Sequence[str]) -> list[str]:
    """A command to whose processes these folders are empty; the command itself, if this user may not mount anything.

    So a node is kept from the head's folder: nodes may take the one of the head, and on one machine a node
    would write its own address there, to which drivers then connect, and unpack a job's files over those in use.
    """
    if not can_hide_folders():
        return list(command)
    mounts = 'while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done; shift; exec "$@"'
    return ["unshare", "--mount", "sh", "-ec", mounts, "sh", *map(str, folders), "--", *command]


class Cluster:
    """A head and workers; each node has its own local folders, its own object store, and its own process group.

    Args:
      hidden: a folder that workers cannot see: an empty file system is mounted over it in their mount namespace.
      idle_workers: how many idle processes a node keeps; Ray keeps as many as the node has CPUs.
      store_mb: size of each node's object store.
      types: node types of Ray's own emulated autoscaler (name -> resources, most nodes); it ends nodes that were idle
        for 5 s. Its nodes share the head's local folder. None: nodes come by `add` alone.

    Attributes:
      metrics: where Ray shows those of a node.
    """

    def __init__(
        self,
        head_cpus: float = 0,
        hidden: Path | None = None,
        *,
        idle_workers: int | None = None,
        store_mb: int = 200,
        types: Mapping[str, tuple[Mapping[str, float], int]] | None = None,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))  # short: it holds sockets
        self.hidden = hidden
        self._store = f"--object-store-memory={store_mb * 10**6}"
        self._nodes: dict[str, subprocess.Popen] = {}
        self.metrics: dict[str, str] = {}
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.environment = {
            # Where Ray sees PYTEST_CURRENT_TEST, it raises what its users get as a warning (of slower serialization, e.g.).
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))},
            "PYTHONPATH": str(PROJECT),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",  # a token of its own: no other Ray of this machine can be meant
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **({} if idle_workers is None else {"RAY_num_workers_soft_limit": str(idle_workers)}),
        }
        clients = f"--ray-client-server-port={free_port()}"
        options = ["--head", f"--port={self.port}", clients, "--include-dashboard=false", f"--num-cpus={head_cpus:g}"]
        self._drivers: list[subprocess.Popen] = []
        self._autoscaler: dict[str, str] = {}
        if types is not None:
            (self.folder / "types.yaml").write_text(json.dumps(self._autoscaling(types, store_mb)))
            options.append(f"--autoscaling-config={self.folder / 'types.yaml'}")
            self._autoscaler = {
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            }
        self._head_options = options
        self.start_head()

    def start_head(self) -> None:
        """Start the head, at first or after it was killed; it knows nothing of the cluster of before."""
        self._start("head", self._head_options)

    def _autoscaling(self, types: Mapping[str, tuple[Mapping[str, float], int]], store_mb: int) -> dict[str, object]:
        """The file that `ray start` takes. Ray's `AutoscalingCluster` is not used: it ends every Ray of this machine."""
        provider = {"type": "external", "module": PROVIDER, "use_node_id_as_ip": True, "disable_node_updaters": True}
        places = {"gcs_address": self.address, "head_node_id": FAKE_HEAD_NODE_ID, "launch_multiple": True}
        workers = {
            name: {
                "resources": {**resources, "object_store_memory": store_mb * 10**6},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            }
            for name, (resources, most) in types.items()
        }
        return {
            "cluster_name": "emulated",
            "max_workers": sum(most for _, most in types.values()),
            "idle_timeout_minutes": 5 / 60,
            "provider": {**provider, **places, "disable_launch_config_check": True},
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                **workers,
            },
            "head_node_type": "ray.head.default",
            "upscaling_speed": 1000,
            "docker": {},
            "auth": {},
            "file_mounts": {},
            **{name: [] for name in UNUSED},
        }

    def add(self, name: str, cpus: float = 1, gpus: float = 0, **custom: float) -> None:
        shares = [f"--num-cpus={cpus:g}", f"--num-gpus={gpus:g}", f"--resources={json.dumps(custom)}"]
        self._start(name, [f"--address={self.address}", *shares])

    def _start(self, name: str, options: list[str]) -> None:
        home = self.folder / name
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        ip, metrics_port = "127.0.0.1" if name == "head" else WORKER_IP, free_port()
        self.metrics[name] = f"http://{ip}:{metrics_port}/metrics"
        common = ["--block", "--disable-usage-stats", f"--node-ip-address={ip}", self._store]
        common.append(f"--metrics-export-port={metrics_port}")
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        command = [str(RAY), "start", *options, f"--temp-dir={home}", *common, *ports]
        if name != "head":
            command = without([self.folder / "head", *([self.hidden] if self.hidden else [])], command)
        try:
            # Ray gives a node 30 s to start, too few on a busy machine.
            if not any(self._is_up(name, command) for _ in range(4)):
                raise AssertionError((home / "log").read_text())
        except BaseException:
            self.close()
            raise

    def _is_up(self, name: str, command: list[str]) -> bool:
        """Start a node's processes; whether they came up."""
        home = self.folder / name
        with open(home / "log", "w") as log:
            process = subprocess.Popen(
                command,
                env={
                    **self.environment,
                    **(self._autoscaler if name == "head" else {}),
                    "TMPDIR": str(home / "tmp"),
                    "RAYSIM_CACHE": str(home / "cache"),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes[name] = process
        wait_for(lambda: "will now block" in (home / "log").read_text() or process.poll() is not None)
        return process.poll() is None

    def kill(self, name: str) -> None:
        """SIGKILL to everything of a node at once: raylet, agents, workers."""
        process = self._nodes.pop(name)
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(process.pid)
            family = [leader, *leader.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        process.wait()

    def drain(self, name: str, notice_s: float) -> None:
        """Give notice to a node that was added with a resource of its own name, as a cloud does before it takes a machine."""
        words = [sys.executable, "-c", DRAIN, self.address, name, str(notice_s)]
        subprocess.run(words, env=self.environment, check=True, timeout=PATIENCE_S)

    def lose_one(self) -> None:
        """SIGKILL to a node that the autoscaler started; its workers end with it."""
        next(raylet for raylet in self._raylets("head") if "--head" not in raylet.cmdline()).kill()

    def trainers(self, name: str) -> int:
        """Trainers of a node that are built: the file that they tell their stack to is the last thing they make."""
        built = 0
        for member in psutil.Process(self._nodes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it has just ended
                files = {os.readlink(file) for file in Path(f"/proc/{member.pid}/fd").iterdir()}
                built += any("raysim-stack" in file for file in files)
        return built

    def num_nodes(self) -> int:
        """Nodes that live, by their main process; those of the autoscaler are the head's children."""
        return sum(len(self._raylets(name)) for name in self._nodes)

    def _raylets(self, name: str) -> list[psutil.Process]:
        raylets = []
        for member in psutil.Process(self._nodes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if member.name() == "raylet" and member.status() != psutil.STATUS_ZOMBIE:
                    raylets.append(member)
        return raylets

    def control_s(self) -> float:
        """CPU seconds that Ray's control process has spent."""
        members = psutil.Process(self._nodes["head"].pid).children(recursive=True)
        (control,) = (member for member in members if member.name() == "gcs_server")
        times = control.cpu_times()
        return float(times.user + times.system)

    def control_shares(self, windows: int, seconds: float = 3, calm: float = 0.1) -> list[float]:
        """Shares of a CPU that Ray's control process takes, window after window, up to the first below `calm`.

        What it does once after a loss, and what others take of the CPUs, may fill a window; what it does for ever fills all.
        """
        shares: list[float] = []
        while len(shares) < windows and not (shares and shares[-1] < calm):
            began, before = time.monotonic(), self.control_s()
            time.sleep(seconds)
            shares.append((self.control_s() - before) / (time.monotonic() - began))
        return shares

    def close(self) -> None:
        for driver in self._drivers:
            driver.kill()
            driver.wait()
        for name in reversed(list(self._nodes)):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, config: Path, *overrides: str, verb: str = "run") -> Driver:
        """`raysim run`, or another verb, as a driver on the head."""
        log = self.folder / f"driver-{len(self._drivers)}.log"
        with open(log, "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "raysim", verb, str(config), *overrides],
                cwd=PROJECT,
                env={**self.environment, "RAY_ADDRESS": self.address},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._drivers.append(process)
        return Driver(process, log)


class Driver:
    """A run on a cluster."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self._process, self._log = process, log

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens while the run goes on."""

        def happened() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            return condition()

        wait_for(happened)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL, to the command alone."""
        self._process.kill()
        self._process.wait()

    def status(self, seconds: float = PATIENCE_S) -> int:
        """How it ends, which is waited for."""
        return self._process.wait(seconds)

    def finish(self, seconds: float = PATIENCE_S) -> None:
        """Wait until it has ended well."""
        status = self.status(seconds)
        assert status == 0, f"{self._log.read_text()}\nexit status {status}"


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened within {seconds:g} s"
        time.sleep(0.05)
