"""Long and large: what grows over thousands of rounds with kills, and what a thousand trials or runs cost.

    python -m tests.bench.endurance rounds [--count 10000] [--kill-s 300] [--trials 50]   an Optuna sweep beside it
    python -m tests.bench.endurance trials [--count 1000]
    python -m tests.bench.endurance report [--count 1000]

Every number is told on the clock and in CPU time of the command, since others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml

import raysim
from raysim.data.sources import prepare
from raysim.folders.run_folder import RunFolder
from raysim.running.results import Run
from raysim.tuning.plan import Sweep, plan_sweep

PROJECT = Path(__file__).parent.parent.parent

#: Seconds between two looks at a run, and the share of each life of a process that is not counted: caches fill.
LOOK_S, WARM = 5.0, 0.2

#: What a process of Ray is called -> what it is here.
KINDS = {"ServerActor": "server", "TrainerActor": "trainer", "raylet": "raylet"}


def configuration(folder: Path, name: str, **groups: object) -> dict[str, object]:
    """A run whose rounds take a few hundredths of a second."""
    return {
        "name": name,
        "storage": str(folder / "runs"),
        "data": {"name": "digits", "root": str(folder / "data")},
        "partition": {"scheme": "iid", "num_clients": 100},
        "model": {"name": "mlp", "hidden": 8},
        "cohort": {"size": 4},
        "local": {"lr": 0.1, "steps": 2, "batch_size": 16},
        **groups,
    }


def command(*words: object) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "raysim", *map(str, words)]


@contextmanager
def started(*words: object, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A raysim command, in a session of its own that ends with the block; its output goes to a file."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with open(output, "a") as file:
        process = subprocess.Popen(
            command(*words), stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass
class Look:
    """What a run held at a moment: quantity -> number; megabytes, counts of descriptors and of files."""

    round_index: int
    numbers: dict[str, float] = field(default_factory=dict)


def look(process: subprocess.Popen[str], folder: Path) -> Look:
    """The driver, its Ray and its run directory as they are now."""
    progress = folder / "progress.csv"
    seen = Look(progress.read_bytes().count(b"\n") - 1 if progress.is_file() else 0)
    with suppress(psutil.Error):
        driver = psutil.Process(process.pid)
        for each in (driver, *driver.children(recursive=True)):
            with suppress(psutil.Error):
                title = " ".join(each.cmdline()[:1])
                kind = "driver" if each == driver else next((KINDS[key] for key in KINDS if key in title), "")
                if not kind:
                    continue
                memory = each.memory_full_info()
                seen.numbers[f"{kind} MB"] = max(seen.numbers.get(f"{kind} MB", 0), memory.uss / 1e6)
                seen.numbers[f"{kind} descriptors"] = max(seen.numbers.get(f"{kind} descriptors", 0), each.num_fds())
                if kind == "raylet":  # the object store is its shared memory
                    seen.numbers["object store MB"] = memory.shared / 1e6
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    seen.numbers["files"] = len(files)
    with suppress(FileNotFoundError):  # a checkpoint that was put aside meanwhile
        seen.numbers["folder MB"] = sum(path.stat().st_size for path in files) / 1e6
    return seen


def slopes(lives: Sequence[Sequence[Look]]) -> dict[str, float]:
    """Quantity -> its growth in 1,000 rounds: one slope for all lives of the processes, each with a level of its own."""
    points: dict[str, list[tuple[float, float]]] = {}
    for life in lives:
        warm = life[round(WARM * len(life)) :]
        for name in {name for seen in warm for name in seen.numbers}:
            values = np.array([(seen.round_index, seen.numbers[name]) for seen in warm if name in seen.numbers])
            if len(values) > 2:
                points.setdefault(name, []).extend(map(tuple, values - values.mean(0)))
    growth = {}
    for name, pairs in points.items():
        rounds, values = np.array(pairs).T
        if (rounds**2).sum():
            growth[name] = 1000 * float((rounds * values).sum() / (rounds**2).sum())
    return growth


def a_trainer(process: subprocess.Popen[str]) -> psutil.Process | None:
    """A trainer of a run, drawn at random."""
    with suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
        trainers = [each for each in below if "TrainerActor" in " ".join(each.cmdline()[:1])]
        return random.choice(trainers) if trainers else None
    return None


def long_run(folder: Path, count: int, kill_s: float, most_s: float) -> None:
    """Rounds on Ray; every `kill_s` seconds the driver or a trainer is killed, in turn; what is unfinished goes on."""
    raw = configuration(folder, "long", rounds=count, checkpoint={"every_s": 10})
    raw["resources"] = {"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5}
    (folder / "long.yaml").write_text(yaml.safe_dump(raw))
    run, output = folder / "runs" / "long", folder / "long.txt"
    lives: list[list[Look]] = []
    kills, began = {"driver": 0, "trainer": 0}, time.monotonic()
    while True:
        with started("run", folder / "long.yaml", output=output) as process:
            lives.append([])
            killed_at, is_killed = time.monotonic(), False
            while process.poll() is None and time.monotonic() - began < most_s:
                time.sleep(LOOK_S)
                lives[-1].append(look(process, run))
                if time.monotonic() - killed_at < kill_s or not lives[-1][-1].round_index:
                    continue
                killed_at = time.monotonic()
                if kills["trainer"] < kills["driver"]:
                    if trainer := a_trainer(process):
                        trainer.kill()
                        kills["trainer"] += 1
                else:
                    process.kill()
                    kills["driver"] += 1
                    is_killed = True
                    process.wait()
            if is_killed:
                continue
            break
    done = lives[-1][-1].round_index if lives[-1] else 0
    print(f"{done} of {count} rounds in {time.monotonic() - began:.0f} s; killed: {kills}; status {process.returncode}")
    for name, slope in sorted(slopes(lives).items()):
        first, last = (
            next((seen.numbers[name] for seen in order if name in seen.numbers), 0.0)
            for order in (lives[0][len(lives[0]) // 2 :], lives[-1][::-1])
        )
        print(f"{name}: {slope:+.3f} in 1,000 rounds ({first:.1f} at first, {last:.1f} at the end)")
    if process.returncode == 0:
        twin = raysim.run(raw, name="twin", resources={"backend": "serial"}, checkpoint={"every_s": 600}, quiet=True)
        same = twin.summary["params_sha256"] == json.loads((run / "summary.json").read_text())["params_sha256"]
        print("the hash of an undisturbed serial run" if same else "ANOTHER HASH than an undisturbed serial run has")
    elif process.returncode is not None and time.monotonic() - began < most_s:
        print(output.read_text()[-2000:])


def search_file(folder: Path, count: int) -> Path:
    """An Optuna sweep of tiny trials, to run beside."""
    raw = configuration(folder, "search", rounds=3, resources={"backend": "serial", "cpus_per_trainer": 0.5})
    space = {"local.lr": {"loguniform": [1e-3, 1.0]}}
    raw["tune"] = {"search": "optuna", "num_samples": count, "max_concurrent": 1, "param_space": space}
    (folder / "search.yaml").write_text(yaml.safe_dump(raw))
    return folder / "search.yaml"


def rounds(folder: Path, given: argparse.Namespace) -> None:
    if not given.trials:
        long_run(folder, given.count, given.kill_s, given.most_s)
        return
    with started("tune", search_file(folder, given.trials), output=folder / "search.txt") as process:
        long_run(folder, given.count, given.kill_s, given.most_s)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        done = [run for run in RunFolder.below(folder / "runs" / "search") if run.status.name == "completed"]
        print(f"beside it: {len(done)} of {given.trials} trials of a search with Optuna; status {process.poll()}")


# --- trials -----------------------------------------------------------------------------------------------------------


def many_trials(folder: Path, count: int) -> Path:
    """A sweep of the smallest trials there are, by their learning rates: they share a partition."""
    raw = configuration(folder, "many", rounds=1, resources={"backend": "serial", "cpus_per_trainer": 0.5})
    raw |= {"partition": {"scheme": "iid", "num_clients": 4}, "cohort": {"size": 1}}
    rates = [round(0.1 + index / 100_000, 5) for index in range(count)]
    raw["tune"] = {"param_space": {"local.lr": {"grid_search": rates}}}
    (folder / "many.yaml").write_text(yaml.safe_dump(raw))
    return folder / "many.yaml"


def spoken(process: subprocess.Popen[str], output: Path, pattern: str, most_s: float) -> tuple[float, float]:
    """(seconds on the clock, CPU seconds of the process) when its output first holds a pattern, or it ended."""
    began, driver, cpu_s = time.monotonic(), psutil.Process(process.pid), 0.0
    while process.poll() is None and time.monotonic() - began < most_s:
        with suppress(psutil.Error):
            times = driver.cpu_times()
            cpu_s = times.user + times.system
        if re.search(pattern, output.read_text()):
            break
        time.sleep(0.2)
    return time.monotonic() - began, cpu_s


def trials(folder: Path, given: argparse.Namespace) -> None:
    file, output, count = many_trials(folder, given.count), folder / "many.txt", given.count
    with started("tune", file, output=output) as process:
        clock, cpu = spoken(process, output, r"trials in ", given.most_s)
        print(f"start with none of {count} trials finished: {clock:.1f} s, of its CPU {cpu:.1f} s")
        last, looks = 0, []
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < given.most_s:
            time.sleep(1)
            done = sum(1 for _ in (folder / "runs" / "many").glob("*/COMPLETED"))
            with suppress(psutil.Error):
                driver = psutil.Process(process.pid)
                times = driver.cpu_times()
                memory_mb = driver.memory_info().rss / 1e6
                looks.append((done, time.monotonic() - began, times.user + times.system, memory_mb))
            last = max(last, done)
        print(f"{last} of {count} trials finished; status {process.poll()}")
        if process.poll():
            print(output.read_text()[-2000:])
        for share in (0.0, 0.25, 0.5, 0.75):
            part = [each for each in looks if share * last < each[0] <= (share + 0.25) * last]
            if len(part) > 1 and (n := part[-1][0] - part[0][0]):
                seconds, cpu_s = ((part[-1][index] - part[0][index]) / n for index in (1, 2))
                span, mb = f"trials {part[0][0]} to {part[-1][0]}", part[-1][3]
                print(f"{span}: {seconds:.2f} s each, of the driver's CPU {cpu_s:.3f} s; {mb:.0f} MB")
    if not last:
        return
    sweep = plan_sweep(yaml.safe_load(file.read_text()), str(file))
    for left in (count // 2, 1):
        filled(sweep)
        for trial in sweep.trials[-left:]:
            shutil.rmtree(sweep.folder / trial.name)
        again = folder / f"again-{left}.txt"
        with started("tune", file, output=again) as process:
            clock, cpu = spoken(process, again, r"trials to run in ", given.most_s)
        print(f"start with {count - left} of {count} trials finished: {clock:.1f} s, of its CPU {cpu:.1f} s")


def filled(sweep: Sweep) -> None:
    """Give trials that are not finished the results of one that is, under their own configuration."""
    first = next(run for run in RunFolder.below(sweep.folder) if run.status.name == "completed")
    for trial in sweep.trials:
        own = RunFolder(sweep.folder / trial.name)
        if not own.status.is_finished:
            shutil.rmtree(own.path, ignore_errors=True)
            shutil.copytree(first.path, own.path)
            own.write_config(trial.config.model_dump(mode="json"))


# --- a report ---------------------------------------------------------------------------------------------------------


def many_runs(folder: Path, count: int) -> None:
    """Copies of a run under other labels, each with accuracies of its own and its own seal."""
    first = raysim.run(configuration(folder, "first", rounds=20, resources={"backend": "serial"}), quiet=True)
    generator = np.random.default_rng(0)
    for index in range(count):
        seed, cell = divmod(index, 20)
        alpha, method = divmod(cell, 4)
        write_copy(first, folder / "many" / f"{index:05d}", seed, {"method": f"m{method}", "alpha": alpha}, generator)


def write_copy(first: Run, path: Path, seed: int, labels: Mapping[str, object], generator: np.random.Generator) -> None:
    shutil.copytree(first.folder, path)
    files = RunFolder(path)
    files.write_config({**files.read_config(), "seed": seed, "labels": labels, "name": path.name})
    shift = float(generator.normal(0, 0.01))
    scores = {key: first.summary[key] + shift for key in ("accuracy", "best_accuracy", "mean_last_10pct_accuracy")}
    files.write_json(files.summary, {**first.summary, **scores, "params_sha256": f"{seed}-{labels}"})
    files.mark("COMPLETED")


def report(folder: Path, given: argparse.Namespace) -> None:
    many_runs(folder, given.count)
    output = folder / "report.txt"
    with started("report", folder / "many", "--out", folder / "report", output=output) as process:
        clock, cpu = spoken(process, output, r"\Znothing", given.most_s)
    text = (folder / "report" / "report.md").read_text() if process.returncode == 0 else output.read_text()
    print(f"a report over {given.count} runs: {clock:.1f} s, of its CPU {cpu:.1f} s; status {process.returncode}")
    print(text[:300] if process.returncode == 0 else text[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rounds", "trials", "report"))
    parser.add_argument("--count", type=int, help="rounds, trials or runs")
    parser.add_argument("--kill-s", type=float, default=300, help="seconds between two kills")
    parser.add_argument("--trials", type=int, default=0, help="of a search with Optuna beside the rounds")
    parser.add_argument("--most-s", type=float, default=float("inf"), help="seconds after which it ends, unfinished")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what it started ends with it
    given.count = given.count or {"rounds": 10_000, "trials": 1_000, "report": 1_000}[given.part]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare("digits", folder / "data")
        {"rounds": rounds, "trials": trials, "report": report}[given.part](folder, given)


if __name__ == "__main__":
    main()
