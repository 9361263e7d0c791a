"""`make bench`: round time, ratio to the bare loop, start-up time, peak memory, and where the time goes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import ray
import yaml

from raysim.build import Plan, Recipe, make_server, make_trainer
from raysim.check import check
from raysim.data.arrow import ImageSet, in_batches, write_set
from raysim.data.federation import build_shards, shard_tasks
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.pipeline import write_with_ray_data
from raysim.data.sources import set_path
from raysim.engine.plan import choose_cohort
from raysim.engine.ray.session import ray_session
from raysim.engine.ray.trainers import pool_of_trainers
from raysim.engine.server import Server
from raysim.models import ModelSpec
from tests.bench import local
from tests.bench.bare import Bare, images_of

OBJECT_STORE_MB = 100

CASES = {
    "a": {
        "about": "100 clients, 10 a round, CNN of 2.2 M parameters on 3x32x32, batch 32, Dirichlet 0.1 of 40,000 images",
        "examples": 40_000,
        "rounds": 8,
        "config": {
            "partition": {"scheme": "dirichlet", "alpha": 0.1, "num_clients": 100, "min_samples": 10},
            "model": {"name": "cnn"},
            "local": {"lr": 0.01, "batch_size": 32},
            "cohort": {"size": 10},
        },
    },
    "b": {
        "about": "500 clients of 50 images, 100 a round, MLP 3072-64-10, batch 10",
        "examples": 25_000,
        "rounds": 40,
        "config": {
            "partition": {"scheme": "iid", "num_clients": 500},
            "model": {"name": "mlp"},
            "local": {"lr": 0.01, "batch_size": 10},
            "cohort": {"size": 100},
        },
    },
}


#: N_val against E times the examples of a client as in the paper's own set-up is 3.1; here 1.5, so that it takes minutes.
SCORING = {
    "about": "100 clients, 10 a round, 2 local epochs, CNN of 2.2 M parameters on 3x32x32, batch 32, 800 validation images",
    "examples": 40_000,
    "rounds": 6,
    "validation": 0.02,
    "config": {**CASES["a"]["config"], "local": {"lr": 0.01, "batch_size": 32, "epochs": 2}},
}


def prepared(name: str, root: Path, case: dict, **groups) -> tuple[Plan, Recipe]:
    """A checked plan of a case on random images, and its recipe."""
    images, labels = images_of(case["examples"])
    set_name = f"bench{case['examples']}"
    write_set(set_path(root, set_name), set_name, map(str, range(10)), in_batches(images, labels))
    raw = {
        **case["config"],
        "rounds": case["rounds"] + 2,
        "evaluation": {"every": 0},
        "data": {"name": set_name, "root": str(root), "test": 0, "validation": case.get("validation", 0)},
        "resources": {"backend": "ray", "trainers": 2},
        **groups,
    }
    plan = check(raw, name)
    shards = build_shards(plan.manifest, root / "shards")
    return plan, plan.recipe(shards)


def server_of(recipe: Recipe, closing: contextlib.ExitStack) -> Server:
    trainers = pool_of_trainers(
        partial(make_trainer, recipe), num_trainers=2, cpus_per_trainer=1, gpus_per_trainer=0, keeps_memory=False
    )
    return make_server(recipe, closing.enter_context(trainers))


def scoring(root: Path) -> None:
    """FedVG's round time over FedAvg's beside the ratio of the counted samples: scoring runs in parallel, once."""
    case = SCORING
    servers, plans, closing = {}, {}, contextlib.ExitStack()
    for name, methods in (("FedAvg", []), ("FedVG", ["fedvg"])):
        plans[name], recipe = prepared(name, root, case, methods=methods)
        servers[name] = server_of(recipe, closing)
    plan, config = plans["FedVG"], plans["FedVG"].config
    times: dict[str, list[float]] = {name: [] for name in servers}
    predicted = []
    for index in range(case["rounds"] + 1):
        spent = {}
        for name, server in servers.items():
            began = time.perf_counter()
            record = server.run_round(index)
            spent[name] = time.perf_counter() - began
        if index:  # the first round touches fresh memory
            trained = config.local.epochs * float(record.clients["num_examples"].sum())
            scored = len(record.clients["client"]) * len(plan.manifest.validation)
            predicted.append((trained + scored) / trained)
            for name in servers:
                times[name].append(spent[name])
    closing.close()
    sums = {name: float(np.sum(values)) for name, values in times.items()}
    ratio, expected = sums["FedVG"] / sums["FedAvg"], float(np.mean(predicted))
    print(f"(scoring) {case['about']}; {case['rounds']} rounds interleaved")
    for name in servers:
        print(f"    {name:12} {1000 * np.median(times[name]):9.1f} ms a round (median)")
    print(
        f"    FedVG over FedAvg: {ratio:.3f} of the sums; predicted from the samples: {expected:.3f} "
        f"({100 * (ratio / expected - 1):+.1f} %)",
        flush=True,
    )


def measure(name: str, root: Path) -> None:
    """Interleave rounds of raysim on Ray and of both bare loops; print medians and ratios."""
    case = CASES[name]
    plan, recipe = prepared(name, root, case)
    options = {key: value for key, value in case["config"]["model"].items() if key != "name"}
    spec = ModelSpec(plan.config.model.name, 10, plan.info.shape, options)
    settings = {"lr": plan.config.local.lr, "batch_size": plan.config.local.batch_size, "seed": plan.config.seed}
    rows = list(plan.manifest.clients)
    closing = contextlib.ExitStack()
    server = server_of(recipe, closing)
    two = Bare(spec, case["examples"], rows, settings, processes=2, threads=1)
    one = Bare(spec, case["examples"], rows, settings, processes=1, threads=2)
    times: dict[str, list[float]] = {
        "raysim": [],
        "bare 2 x 1": [],
        "bare 1 x 2": [],
        "train": [],
        "aggregate": [],
        "clients": [],
    }
    peak = 0.0
    for index in range(case["rounds"] + 2):
        clients = choose_cohort(len(rows), plan.config.cohort_size, seed=0, round_index=index).tolist()
        began = time.perf_counter()
        record = server.run_round(index)
        spent = time.perf_counter() - began
        both = two.round(index, clients), one.round(index, clients)
        if index < 2:
            continue  # the first rounds touch fresh memory
        times["raysim"].append(spent)
        times["bare 2 x 1"].append(both[0])
        times["bare 1 x 2"].append(both[1])
        times["train"].append(record.metrics["system/train_s"])
        times["aggregate"].append(record.metrics["system/aggregate_s"])
        times["clients"].append(float(record.clients["seconds"].sum()) / 2)
        peak = max(peak, memory_of_ray())
    for system in (two, one):
        system.close()
    closing.close()
    report(name, case, times, peak)


def report(name: str, case: dict, times: dict[str, list[float]], peak: float) -> None:
    sums = {key: float(np.sum(values)) for key, values in times.items()}
    best = min(("bare 2 x 1", "bare 1 x 2"), key=lambda key: sums[key])
    ratios = np.array(times["raysim"]) / np.array(times[best])
    rounds = len(times["raysim"])
    print(f"({name}) {case['about']}; {rounds} rounds interleaved")
    for key in ("raysim", "bare 2 x 1", "bare 1 x 2"):
        print(
            f"    {key:12} {1000 * np.median(times[key]):9.1f} ms a round (median), {1000 * sums[key] / rounds:9.1f} ms (mean)"
        )
    print(
        f"    ratio to the best bare loop ({best}): {sums['raysim'] / sums[best]:.3f} of the sums, {np.median(ratios):.3f} median"
    )
    print(
        f"    where raysim's round goes: clients' own work {sums['clients'] / sums['raysim']:.0%} (balanced over 2 trainers), "
        f"imbalance, Ray and transport {(sums['train'] - sums['clients']) / sums['raysim']:.0%}, "
        f"weights and sum {sums['aggregate'] / sums['raysim']:.0%}, "
        f"rest {(sums['raysim'] - sums['train'] - sums['aggregate']) / sums['raysim']:.0%}"
    )
    print(f"    peak memory of driver and actors: {peak:.0f} MB (proportional set size)", flush=True)


def memory_of_ray() -> float:
    """MB of this process and the Ray workers below it; shared pages counted once, in parts."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            if process.pid == os.getpid() or process.name().startswith("ray::"):
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6


def sharding(root: Path) -> None:
    """60,000 images into 1,000 clients: the Ray Data pipeline against a plain rewrite of the file by pyarrow."""
    count = 60_000
    images, labels = images_of(count)
    path = set_path(root, "bench60000")
    write_set(path, "bench60000", map(str, range(10)), in_batches(images, labels))
    size = path.stat().st_size / 1e6
    spec = PartitionSpec(scheme="dirichlet", alpha=0.3, num_clients=1000, test=1 / 6, validation=0)
    manifest = make_manifest(ImageSet(path), spec)
    write_with_ray_data(shard_tasks(manifest, root / "warm")[:6])  # starts Ray Data's own actors and both workers
    peak = PeakMemory()
    began = time.perf_counter()
    build_shards(manifest, root / "many", write_with_ray_data)
    spent = time.perf_counter() - began
    used = peak.stop()
    began = time.perf_counter()
    with pa.OSFile(str(root / "plain.arrow"), "wb") as sink:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        with pa.ipc.new_file(sink, reader.schema) as writer:
            for index in range(reader.num_record_batches):
                writer.write_batch(reader.get_batch(index))
    plain = time.perf_counter() - began
    print(f"sharding {count} images of {size:.0f} MB into 1,000 clients, object store {OBJECT_STORE_MB} MB")
    print(
        f"    Ray Data pipeline: {spent:6.2f} s, {size / spent:6.0f} MB/s, private memory grew by {used:.0f} MB at most"
    )
    print(f"    plain pyarrow rewrite, in order, one process: {plain:6.2f} s, {size / plain:6.0f} MB/s", flush=True)


class PeakMemory:
    """Samples the private memory of this process and its Ray workers every 50 ms; MB above the start."""

    def __init__(self) -> None:
        self._start = self._peak = private_memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, private_memory())

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self._peak - self._start


def private_memory() -> float:
    """MB that this process and its Ray workers hold themselves (RssAnon); pages of mapped files do not count."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            if process.pid == os.getpid() or process.name().startswith("ray::"):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += sum(int(amount) for amount in re.findall(r"RssAnon:\s+(\d+) kB", status))
    return total / 1e3


def start_up(root: Path) -> None:
    """Seconds from the command to the first round: as the command itself reports, shards already cached."""
    project = Path(__file__).parent.parent.parent
    raw = yaml.safe_load((project / "configs" / "quickstart.yaml").read_text())
    path = root / "quickstart.yaml"
    path.write_text(
        yaml.safe_dump(
            {**raw, "rounds": 1, "storage": str(root / "runs"), "data": {"name": "digits", "root": str(root)}}
        )
    )
    for attempt in range(3):
        command = [sys.executable, "-m", "raysim", "run", str(path), f"name=s{attempt}"]
        began = time.perf_counter()
        output = subprocess.run(command, capture_output=True, text=True, cwd=project, check=True).stdout
        spent = time.perf_counter() - began
        match = re.search(r"\(([\d.]+) s to start", output)
        kind = "shards to build" if attempt == 0 else "shards cached"
        print(
            f"start-up ({kind}): first round after {match[1] if match else '?'} s (as printed); whole command {spent:.1f} s",
            flush=True,
        )


def main() -> None:
    names = sys.argv[1:] or [*CASES, "scoring", "start", "shard", "local"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "start" in names:
            start_up(root)
        if "shard" in names:
            ray.init(
                address="local",
                num_cpus=2,
                object_store_memory=OBJECT_STORE_MB * 10**6,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
            sharding(root)
            ray.shutdown()
        with ray_session(num_cpus=4):  # two of the servers of `scoring` wait while the other works
            for name in names:
                if name in CASES:
                    measure(name, root)
            if "scoring" in names:
                scoring(root)
    if "local" in names:
        local.main()


if __name__ == "__main__":
    main()
