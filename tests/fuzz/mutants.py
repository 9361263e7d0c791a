"""Slips that a careless change would make, each in a copy of the tree: which of them no test notices.

`python -m tests.fuzz.mutants [WORD ...]` tries those of the files whose path holds one of the words, or all. Every slip is
tried against a few test files that are about its module, so one that passes here may still be noticed by the whole suite.
Without any slip the same tests must pass: that is tried first. Exit status 1: a slip passed. With `--results FILE --seconds
80` it does a part, and the same command resumes with the slips that FILE does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2]

#: Seconds after which tests without a slip are ended, and times of those after which the tests of a slip are, if these are
#: longer than LEAST_S: it hangs, and that is noticed.
LIMIT_S, PATIENCE, LEAST_S = 200, 3, 60

#: In the copied tree: what the tests of the last slip said.
OUTPUT = "output"

REFERENCE = "tests/methods/test_against_reference.py"

#: File -> (what pytest is told, (text, slip) ...). Each text stands once in its file.
MUTANTS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "raysim/core/layout.py": (
        "tests/core/test_layout.py tests/engine/test_client_results.py",
        (
            ("torch.maximum(highest, -lowest)", "torch.maximum(highest, lowest)"),
            ("4 * sum(leaf.size for leaf in self.shared)", "4 * sum(leaf.size for leaf in self.leaves)"),
            ("for leaf in self.personal:", "for leaf in self.shared:"),
            ("part.view(out, height, width, channels).permute(0, 3, 1, 2)", "part.view(leaf.shape)"),
        ),
    ),
    "raysim/core/weights.py": (
        "tests/core/test_weights.py",
        (("scores.sum(dim=0, keepdim=True)", "scores.sum(dim=-1, keepdim=True)"), ("RightMap(w.maps[rows])", "w")),
    ),
    "raysim/core/stack.py": (
        "tests/core/test_hooks.py",
        (
            ("gradient or gradient_of(loss)", "gradient_of(loss)"),
            ("run(params.clone(), layout)", "run(params, layout)"),
            ("(partition.shared & wanted.shared) - frozen", "partition.shared & wanted.shared"),
            ('is_uniform = any(method.base_weights == "uniform"', 'is_uniform = all(method.base_weights == "uniform"'),
        ),
    ),
    "raysim/core/conflicts.py": (
        "tests/core/test_conflicts.py",
        (
            ("_replaces(second, kind) and not _replaces(first, kind)", "_replaces(first, kind)"),
            ("fnmatchcase(resource, wanted) and not fnmatchcase(resource, left_out)", "fnmatchcase(resource, wanted)"),
        ),
    ),
    "raysim/core/seeding.py": (
        "tests/core/test_seeding.py",
        (
            ("|{round_index}|{client}", "|{round_index}"),
            ("|{round_index}|{client}", "|{client}"),
            ("{run_seed}|{purpose}|", "{run_seed}|"),
        ),
    ),
    "raysim/training/aggregate.py": (
        "tests/training/test_aggregate.py",
        (
            ("math.frexp(total)[1] + 1)", "math.frexp(total)[1])"),
            ("weight.abs().flatten(1).amax(dim=1)", "weight.flatten(1).amax(dim=1)"),
            ("weight.maps.abs().sum(dim=1)", "weight.maps.abs().sum(dim=2)"),
            ("math.fsum((_largest(", "sum((_largest("),
            ("(table[:, 1:] != table[:, :-1]).any(dim=0)", "(table[:, 1:] != table[:, :-1]).all(dim=0)"),
            ("if last == first and grids[first] == 0:", "if grids[first] == 0:"),
        ),
    ),
    "raysim/training/local.py": (
        "tests/training/test_local.py tests/engine/test_participation.py",
        (
            ("if e - s > 1] if skip_single", "if e - s >= 1] if skip_single"),
            ("math.ceil(share * settings.epochs * per_epoch - 1e-9)", "int(share * settings.epochs * per_epoch)"),
            ("self.lr * self.lr_decay**round_index", "self.lr * self.lr_decay ** (round_index + 1)"),
            ("buffer.mul_(settings.momentum).add_(grad)", "buffer.mul_(settings.momentum).add_(grad, alpha=0.1)"),
            ("buffer = grad.clone() if buffer is None", "buffer = grad if buffer is None"),
            ("(grad.norm() + 1e-6)).clamp(max=1.0)", "(grad.norm() + 1e-6))"),
            ("float(total) / num_steps if num_steps", "float(model.loss) if num_steps"),
            ("due = bounds[: num_steps - done]", "due = bounds"),
            ("    model.module.train()\n", "    model.module.eval()\n"),
        ),
    ),
    "raysim/training/stacked.py": (
        "tests/training/test_stacked.py",
        (
            ("batch.inputs, batch.targets, 1 / length", "batch.inputs, batch.targets, 1 / size"),
            ("below.mul_(x > 0)", "below.mul_(x >= 0)"),
            ("(time.perf_counter() - began) / sum(steps)", "time.perf_counter() - began"),
            ("sum(steps > done for steps", "sum(steps > done + 1 for steps"),
        ),
    ),
    "raysim/training/metrics.py": (
        "tests/training/test_metrics.py",
        (
            ('confidences, side="left")', 'confidences, side="right")'),
            (
                "labels.astype(np.int64) * num_classes + predictions",
                "predictions.astype(np.int64) * num_classes + labels",
            ),
            ("right[true > 0] / true[true > 0]", "right / np.maximum(1, true)"),
            ("(~np.isnan(table)).astype(float)", "np.ones_like(table)"),
        ),
    ),
    "raysim/training/evaluate.py": (
        "tests/training/test_local.py tests/engine/test_scorer.py",
        (
            ("sum(part.loss for part in parts)", "sum(part.loss for part in parts) / len(parts)"),
            ("model.task.total(logits, batch.targets)", "model.task.total(logits, batch.targets) / len(logits)"),
            ("    model.module.eval()\n    losses", "    losses"),
        ),
    ),
    "raysim/training/inputs.py": (
        "tests/training/test_inputs.py tests/training/test_local.py",
        (
            ("if len(starts) > 1 and count - starts[-1] == 1:", "if starts and count - starts[-1] == 1:"),
            ("if len(starts) > 1 and count - starts[-1] == 1:", "if len(starts) > 1 and count - starts[-1] < 1:"),
        ),
    ),
    "raysim/training/model.py": (
        "tests/training/test_local.py tests/methods/test_fedvg.py",
        (
            ("(self.params, batch).clone()\n", "(self.params, batch)\n"),
            ("total(logits, batch.targets) / num_examples", "total(logits, batch.targets) / len(logits)"),
            (
                "buffer.fill_((counters or {}).get(name, 0))",
                "buffer.fill_(counters.get(name, 0)) if counters else None",
            ),
        ),
    ),
    "raysim/core/cohorts.py": (
        "tests/engine/test_schedule.py tests/engine/test_participation.py",
        (
            ('derive_seed(seed, "cohort", round_index)', 'derive_seed(seed, "cohort")'),
            ("stays = draws >= dropout", "stays = draws < dropout"),
        ),
    ),
    "raysim/engine/schedule.py": (
        "tests/engine/test_schedule.py tests/engine/test_participation.py tests/plan/test_resources.py",
        (
            ("before * count // total", "before * count // (2 * total)"),
            ("len(members) // least_clients", "len(members)"),
            ("(-member[0], member[1])", "-member[0]"),
            ('"straggler", round_index, client', '"dropout-out", round_index, client'),
            ("int(there) * int(1 / each + 1e-9)", "int(there / each + 1e-9)"),
        ),
    ),
    "raysim/engine/cohort.py": (
        "tests/engine/test_server.py tests/engine/test_run.py tests/engine/test_participation.py -k 'not slow or nonfinite'",
        (
            ("int(cohort.kept(values).max())", "int(cohort.kept(values).min())"),
            ("in self.reports.peaks.values()]", 'in [self.reports.peaks["update"]]]'),
            ("if memory is not None and client in kept:", "if memory is not None and client:"),
            ("np.searchsorted(kept, clients)", "np.arange(len(clients))"),
        ),
    ),
    "raysim/engine/server.py": (
        f"tests/engine/test_server.py tests/engine/test_run.py tests/engine/test_participation.py {REFERENCE} "
        "-k 'not slow or nonfinite or (matches_reference and fedavg)'",
        (
            (
                "stack.broadcast(self.params.clone(), self.method_state)",
                "stack.broadcast(self.params, self.method_state)",
            ),
            ("is_due(round_index + 1, self.evaluate_every", "is_due(round_index, self.evaluate_every"),
            ("buffers = self.buffers + total[size:].float()", "buffers = self.buffers"),
            ("if round_index < phase.rounds:", "if round_index <= phase.rounds:"),
            (
                '        cohort.drop_nonfinite(round_index, skips=self.on_nonfinite == "skip")\n',
                "        self._commit_memories(cohort)\n"
                '        cohort.drop_nonfinite(round_index, skips=self.on_nonfinite == "skip")\n',
            ),
        ),
    ),
    "raysim/engine/server_views.py": (
        "tests/engine/test_server.py",
        (("view.is_active.double() * (1 if", "torch.ones_like(view.is_active).double() * (1 if"),),
    ),
    "raysim/engine/client_results.py": (
        "tests/engine/test_outgoing.py",
        (
            ("not bool(torch.isfinite(model.state).all())", "False"),
            ("sent.num_bytes + layout.shared_bytes - shared", "sent.num_bytes"),
        ),
    ),
    "raysim/engine/server.py, restored": (
        "tests/engine/test_checkpoint.py tests/running/test_stop.py -k 'not slow and not ray'",
        (
            ("dict(self.counters), pack(self.method_state), ", "dict(self.counters), {}, "),
            ("self.counters = dict(snapshot.counters)", "self.counters = {}"),
            ("changed, self._changed = sorted(self._changed), set()", "changed = sorted(self._changed)[:1]"),
        ),
    ),
    "raysim/engine/scorer.py": (
        "tests/engine/test_scorer.py",
        (
            ("for part in self._slices(name)]\n        if", "for part in self._slices(name)[:8]]\n        if"),
            ("rows = rows // batch_size * batch_size or rows", "rows = rows or batch_size"),
        ),
    ),
    "raysim/engine/trainer.py": (
        f"tests/engine/test_trainer.py tests/engine/test_server.py tests/methods/test_personal.py {REFERENCE} "
        "-k 'not slow or (matches_reference and fedavg)'",
        (
            ('"batches", current.index, client', '"batches", client, current.index'),
            ("        return self.model.state.clone()\n", "        return self.model.state\n"),
            ("function(update[:size].clone(), shared)", "function(update[:size], shared)"),
        ),
    ),
    "raysim/engine/messages.py": (
        "tests/engine/test_messages.py tests/engine/test_trainer.py",
        (("torch.from_numpy(x.copy())", "torch.from_numpy(x)"),),
    ),
    "raysim/engine/checkpoint.py": (
        "tests/engine/test_checkpoint.py -k 'not slow'",
        (
            ("for folder in complete[-KEPT:]:", "for folder in complete[-1:]:"),
            ("if _joint_digest((values, skeleton)) != digest:", "if not digest:"),
            ("self._memories, self._digests = names, digests", "self._digests = digests"),
        ),
    ),
    "raysim/engine/simulation.py": (
        "tests/engine/test_simulation.py tests/running/test_stop.py tests/engine/test_checkpoint.py"
        " -k '(not slow or ends_early) and not ray'",
        (
            ("records = recorder.flush()", "records = {}"),
            ("is_last = next_round == num_rounds or bool(reason)", "is_last = next_round == num_rounds"),
            ("raise Interrupted(received[0], next_round)", "raise Interrupted(received[0], round_index)"),
        ),
    ),
    "raysim/engine/round_metrics.py": (
        "tests/engine/test_round_metrics.py tests/engine/test_run.py",
        (
            ("np.nansum(losses * steps) / steps.sum()", "np.nanmean(losses)"),
            ("count * bytes_down(message, layout)", "bytes_down(message, layout)"),
            ("float((~cohort.is_kept).sum())", "float(cohort.is_kept.sum())"),
        ),
    ),
    "raysim/reporting/significance.py": (
        "tests/reporting/test_significance.py tests/reporting/test_metrics.py tests/reporting/test_inside.py",
        (
            ("difference(cell, bases[row, column])", "difference(bases[row, column], cell)"),
            ("ways[observed:].sum()", "ways[observed + 1 :].sum()"),
            ("np.arange(len(p), 0, -1)", "len(p)"),
            ("gaps = gaps[gaps != 0]", "gaps = gaps[gaps >= 0]"),
        ),
    ),
    "raysim/reporting/tables.py": (
        "tests/reporting/test_report.py tests/reporting/test_metrics.py",
        (
            ("np.std(values, ddof=1)", "np.std(values)"),
            ('reverse=self.metric.mode == "max"', "reverse=True"),
            ("if row not in self.bounds}", "if row}"),
        ),
    ),
    "raysim/reporting/contents.py": (
        "tests/reporting/test_inside.py tests/reporting/test_names.py tests/reporting/test_metrics.py "
        "tests/reporting/test_targets.py",
        (
            ("if value >= target - 1e-9)", "if value > target + 1e-9)"),
            ('if int(row["round"]) <= reached]', 'if int(row["round"]) < reached]'),
            ("level / 100)", "level)"),
            ('"system/train_s").values())[1:]', '"system/train_s").values())'),
            ("if average.n == most]", "if average.n]"),
            ("sort=False).mean()", "sort=False).sum()"),
            ("axis=1).fillna(0.0).T", "axis=1).T"),
        ),
    ),
    "raysim/reporting/measure.py": (
        "tests/reporting/test_metrics.py",
        (
            ("index >= count - max(1, math.ceil(count / 10))", "index > count - max(1, math.ceil(count / 10))"),
            ('(max if self.mode == "max" else min)', '(max if self.mode == "min" else min)'),
        ),
    ),
}


def passes(tree: Path, arguments: Sequence[str], limit_s: float, file: str = "", content: str = "") -> bool:
    """Whether pytest passes in the copied tree with other content in one of its files, within `limit_s` seconds."""
    path, kept = tree / file, tree / "kept"
    if file:
        shutil.copy2(path, kept)  # with its time, by which Python knows what it has compiled
        path.write_text(content)
    # A fork: this process has imported PyTorch already, and nothing of raysim.
    child = multiprocessing.get_context("fork").Process(target=_test, args=(tree, arguments, bool(file)))
    child.start()
    child.join(limit_s)
    if child.is_alive():
        os.killpg(child.pid or 0, signal.SIGKILL)  # with the processes that its tests started
        child.join()
    if file:
        shutil.copy2(kept, path)
    return child.exitcode == 0


def slipped(file: Path, text: str, slip: str) -> str:
    """The file's content with one text, which stands there once, become another."""
    content = file.read_text()
    assert content.count(text) == 1, f"{file} holds {content.count(text)} times: {text}"
    return content.replace(text, slip)


def _test(tree: Path, arguments: Sequence[str], is_slip: bool) -> None:
    os.setpgrp()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = is_slip
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    output = os.open(tree / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    plain = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tree / 'tmp'}", "-m", "not cluster"]
    os._exit(int(pytest.main([*plain, *arguments])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of paths; none: all files")
    parser.add_argument("--results", type=Path, help="verdicts so far, a line each; these slips are not tried again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further slip is tried")
    given = parser.parse_args()
    found: dict[str, bool] = {}  # slip -> whether the tests passed
    sound_s: dict[str, float] = {}  # group -> seconds of its tests without a slip
    if given.results is not None and given.results.is_file():
        for name, value in map(json.loads, given.results.read_text().splitlines()):
            (found if isinstance(value, bool) else sound_s)[name] = value
    groups = [group for group in MUTANTS if not given.words or any(word in group for word in given.words)]
    due = [(group, *pair) for group in groups for pair in MUTANTS[group][1] if _name(group, *pair) not in found]

    def keep(name: str, value: float) -> None:
        if given.results is not None:
            with open(given.results, "a") as file:
                file.write(json.dumps([name, value]) + "\n")

    importlib.import_module("torch.utils.tensorboard")  # once, for all forks
    start, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_project(Path(folder) / "tree")
        for group, text, slip in due:
            told, began = _arguments(MUTANTS[group][0]), time.monotonic()
            if began - start > given.seconds:
                break
            if group not in sound_s:
                if not passes(tree, told, LIMIT_S):
                    print(f"{group}: its tests fail without any slip, or take over {LIMIT_S} s", flush=True)
                    return 2
                keep(group, spent := time.monotonic() - began)
                sound_s[group], began = spent, time.monotonic()
                print(f"{group}: {spent:.0f} s without a slip", flush=True)
            limit_s = max(LEAST_S, PATIENCE * sound_s[group])
            file = group.partition(",")[0]
            has_passed = passes(tree, told, limit_s, file, slipped(tree / file, text, slip))
            keep(_name(group, text, slip), has_passed)
            found[_name(group, text, slip)] = has_passed
            verdict, done = "PASSED" if has_passed else "noticed", done + 1
            print(f"  {verdict}, {time.monotonic() - began:.0f} s: {slip.strip()}", flush=True)
    survivors = [name for name, has_passed in found.items() if has_passed]
    print(f"{len(found)} slips, {len(survivors)} passed", *survivors, sep="\n")
    if left := len(due) - done:
        print(f"{left} slips are left: the same command resumes")
    return 1 if survivors else 0


def _arguments(told: str) -> list[str]:
    """Return what pytest is called with: slow tests and tests that start Ray are left out unless chosen by `-k`."""
    return [*shlex.split(told), *([] if " -k " in told else ["-k", "not slow"]), "-m", "not ray and not cluster"]


def _name(group: str, text: str, slip: str) -> str:
    """What a slip is called in the file of results."""
    return f"{group}: {text!r} -> {slip!r}"


def copy_of_project(tree: Path) -> Path:
    """A copy of the project, in which slips are made."""
    tree.mkdir()
    for part in ("raysim", "methods", "configs", "cluster", "docs", "tests"):
        shutil.copytree(PROJECT / part, tree / part)
    for part in PROJECT.glob("*.*"):
        shutil.copy2(part, tree) if part.is_file() else None
    return tree


if __name__ == "__main__":
    sys.exit(main())
