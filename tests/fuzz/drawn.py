"""Slips of one token that a seed draws from code, each in a copy of the tree: which of them no test notices.

`python -m tests.fuzz.drawn --seed 20261123 --count 100` draws them from `methods`, `raysim/training` and `raysim/engine`, in
proportion to the lines of code. Each is tried against a few test files that are about its module, so one that passes here may
still be noticed by the whole suite; what passes that is read by a person, since no program can tell a slip that changes
nothing. `--results FILE --seconds 80` does a part, and the same command goes on with what FILE does not hold.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import random
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutants import OUTPUT, PROJECT, copy_of_project, passes

AREAS = ("methods", "raysim/training", "raysim/engine")

#: Seconds after which the tests of a slip are ended: it hangs, and that is noticed.
LIMIT_S = 240

#: What a token may become. `not` and `~` go.
SLIPS: dict[str, tuple[str, ...]] = {
    **{"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)},
    **{"+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "//": ("/",), "**": ("*",), "%": ("//",), "@": ("*",)},
    **{"&": ("|",), "|": ("&",), "+=": ("-=",), "-=": ("+=",), "*=": ("/=",), "/=": ("*=",), "~": ("",)},
    **{"and": ("or",), "or": ("and",), "not": ("",), "is": ("is not",), "in": ("not in",)},
    **{"True": ("False",), "False": ("True",), "break": ("continue",), "continue": ("break",)},
}

#: What a called function may become.
CALLS = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "argmax": "argmin"},
    **{"minimum": "maximum", "maximum": "minimum", "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like"},
    **{"ceil": "floor", "floor": "ceil", "cumsum": "cumprod", "train": "eval", "eval": "train"},
}

#: Words after which an operator has one operand.
BEFORE_UNARY = frozenset(("return", "and", "or", "not", "in", "is", "if", "else", "lambda", "yield", "assert"))

WHOLE = "tests/methods/test_against_reference.py tests/methods/test_personal.py tests/methods/test_combinations.py"
PARTICIPATION = "tests/engine/test_participation.py"
RAY = "tests/engine/ray -k 'killed_with or memory_of or cannot_be_built'"

#: File -> test files about it, beside `tests/<folder>/test_<name>.py`.
NEAR: dict[str, str] = {
    "methods/attack.py": "tests/methods/test_attack.py",
    "methods/attack_data.py": "tests/methods/test_poisoned_data.py",
    "methods/bounds.py": "tests/methods/test_fedvg.py tests/methods/test_fednova.py",
    "methods/diagnostics.py": "tests/methods/test_agreement.py",
    "methods/dp.py": "tests/methods/test_privacy.py tests/methods/test_epsilon.py",
    "methods/fedlc.py": "tests/methods/test_label_skew.py",
    "methods/fedopt.py": "tests/methods/test_fedopt.py tests/methods/test_baselines_against_reference.py",
    "methods/fedprox.py": "tests/methods/test_property_checks.py tests/methods/test_against_reference.py",
    "methods/fedrs.py": "tests/methods/test_label_skew.py",
    "methods/fedvg.py": "tests/methods/test_fedvg_options.py",
    "methods/fedvg_cosine.py": "tests/methods/test_fedvg_options.py",
    "methods/fedvg_loss.py": "tests/methods/test_fedvg_options.py",
    "methods/feedback.py": "tests/methods/test_flfa.py",
    "methods/flfa.py": "tests/methods/test_feedback.py",
    "methods/granularity.py": "tests/methods/test_fedvg.py tests/methods/test_fedvg_options.py tests/methods/test_fisher.py",
    "methods/livar/": "tests/methods/livar",
    "methods/moments.py": "tests/methods/test_ccvr.py tests/methods/test_univarfl.py",
    "methods/robust_filters.py": "tests/methods/test_robust.py tests/methods/test_robust_bounds.py",
    "methods/robust_means.py": "tests/methods/test_robust.py tests/methods/test_robust_bounds.py",
    "methods/scored.py": "tests/methods/test_fedvg.py tests/methods/test_fedvg_options.py tests/methods/test_fisher.py",
    "methods/uniform.py": "tests/methods/test_against_reference.py",
    "methods/voters.py": "tests/methods/test_robust.py tests/methods/test_robust_bounds.py",
    "raysim/training/augment.py": "tests/training/test_inputs.py",
    "raysim/training/evaluate.py": "tests/training/test_local.py tests/engine/test_scorer.py",
    "raysim/training/inputs.py": "tests/training/test_local.py",
    "raysim/training/local.py": PARTICIPATION,
    "raysim/training/model.py": "tests/training/test_local.py tests/methods/test_fedvg.py",
    "raysim/engine/client_results.py": "tests/base/test_own_faults.py tests/core/test_hooks.py tests/engine/test_outgoing.py",
    "raysim/engine/client_views.py": "tests/engine/test_trainer.py tests/core/test_hooks.py tests/methods/test_moon.py",
    "raysim/engine/cohort.py": f"{PARTICIPATION} tests/engine/test_run.py tests/engine/test_outgoing.py",
    "raysim/engine/device.py": "tests/engine/test_scorer.py tests/methods/test_fedvg_options.py",
    "raysim/engine/messages.py": f"tests/engine/test_server.py {PARTICIPATION}",
    "raysim/engine/pool.py": f"tests/engine/test_server.py {PARTICIPATION}",
    "raysim/engine/ray/nodes.py": "",
    "raysim/engine/ray/shards.py": "tests/plan/test_weights.py",
    "raysim/engine/ray/watch.py": "",
    "raysim/engine/ray/": RAY,
    "raysim/engine/round_metrics.py": "tests/engine/test_run.py",
    "raysim/engine/server.py": f"{PARTICIPATION} tests/engine/test_run.py tests/engine/test_checkpoint.py",
    "raysim/engine/server_views.py": f"tests/engine/test_server.py tests/core/test_hooks.py {PARTICIPATION}",
    "raysim/engine/simulation.py": "tests/running/test_stop.py tests/engine/test_checkpoint.py",
    "raysim/engine/trainer.py": f"tests/engine/test_server.py {PARTICIPATION} tests/methods/test_personal.py",
}


@dataclass(frozen=True)
class Slip:
    """A token of a file, and what stands there instead; lines from 1, columns from 0."""

    file: str
    line: int
    column: int
    token: str
    slip: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.token!r} -> {self.slip!r}"

    def of(self, content: str) -> str:
        """The file's content with the slip in it."""
        lines = content.splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.column] + self.slip + line[self.column + len(self.token) :]
        return "".join(lines)


def slips_of(file: Path) -> tuple[list[tuple[Slip, ...]], int]:
    """The tokens that may slip, each with all that it may become, and the lines of code in the file."""
    text = file.read_text()
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    ]
    spans = list(_without_slips(ast.parse(text)))
    path, places = str(file.relative_to(PROJECT)), []
    for number, token in enumerate(tokens[1:-1], start=1):
        if any(start <= token.start < end for start, end in spans):
            continue
        slips = _slips(*tokens[number - 1 : number + 2])
        if slips:
            places.append(tuple(Slip(path, *token.start, token.string, slip) for slip in slips))
    return places, len({token.start[0] for token in tokens if token.type != tokenize.STRING})


def _slips(before: tokenize.TokenInfo, token: tokenize.TokenInfo, after: tokenize.TokenInfo) -> tuple[str, ...]:
    word = token.string
    if token.type == tokenize.NUMBER:
        if word.isdigit():
            return (str(int(word) + 1), str(int(word) - 1)) if int(word) else ("1",)
        return ("1.0",) if float(word) == 0 else (repr(float(word) / 2), repr(float(word) * 4))
    if token.type == tokenize.NAME and word in CALLS:
        return (CALLS[word],) if after.string == "(" else ()
    has_left = before.string not in BEFORE_UNARY and (before.type != tokenize.OP or before.string in ")]}")
    if word in ("*", "**", "/") and (not has_left or after.string in (",", ")")):
        return ()  # arguments
    if word == "-" and not has_left:
        return ("",)
    if (word, after.string) == ("is", "not") or (before.string, word) == ("not", "in"):
        return ()  # one operator of two words, whose `not` may go
    return SLIPS.get(word, ()) if token.type != tokenize.STRING else ()


def _without_slips(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where no slip makes a program: types, imports, the `in` of loops, the `@` of decorators."""
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for part in parts:
            if isinstance(part, ast.stmt | ast.expr):
                yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)
        if isinstance(node, ast.For | ast.comprehension):
            target, source = node.target, node.iter
            yield (target.end_lineno or 0, target.end_col_offset or 0), (source.lineno, source.col_offset)
        for decorator in getattr(node, "decorator_list", ()):
            yield (decorator.lineno, 0), (decorator.lineno, decorator.col_offset)


def draw(seed: int, count: int) -> list[Slip]:
    """So many slips of different tokens, by area in proportion to lines of code, in the order of files and lines."""
    generator, places, lines = random.Random(seed), {}, {}
    for area in AREAS:
        parts = [slips_of(file) for file in sorted((PROJECT / area).rglob("*.py"))]
        places[area] = [place for part, _ in parts for place in part]
        lines[area] = sum(number for _, number in parts)
    shares = {area: round(count * lines[area] / sum(lines.values())) for area in AREAS}
    shares[AREAS[-1]] += count - sum(shares.values())
    chosen = [place for area in AREAS for place in sorted(generator.sample(places[area], shares[area]), key=_where)]
    return [generator.choice(place) for place in chosen]


def _where(place: tuple[Slip, ...]) -> tuple[str, int, int]:
    return place[0].file, place[0].line, place[0].column


def files_about(file: str) -> str:
    """The test files about a file, as pytest is told."""
    path = Path(file)
    folder = "/".join(part for part in path.parent.parts if part != "raysim")
    beside = f"tests/{folder}/test_{path.stem}.py"
    further = next((tests for start, tests in NEAR.items() if file.startswith(start)), "")
    return " ".join([beside] * (PROJECT / beside).is_file() + [further] * bool(further)) or WHOLE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", default="", help="slips whose name holds this")
    parser.add_argument("--list", action="store_true", help="name the slips; none is tried")
    parser.add_argument("--results", type=Path, help="verdicts so far, a line each; these slips are not tried again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further slip is tried")
    given = parser.parse_args()
    slips = [slip for slip in draw(given.seed, given.count) if given.only in str(slip)]
    if given.list:
        print(*(f"{slip} | {_line(slip)}" for slip in slips), sep="\n")
        return 0
    verdicts: dict[str, str] = {}  # slip -> the test that noticed it; "" if none did
    if given.results is not None and given.results.is_file():
        verdicts = dict(map(json.loads, given.results.read_text().splitlines()))
    importlib.import_module("torch.utils.tensorboard")  # once, for all forks
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_project(Path(folder) / "tree")
        for slip in slips:
            if str(slip) in verdicts:
                continue
            if time.monotonic() - start > given.seconds:
                break
            verdict = verdicts[str(slip)] = _verdict(tree, slip)
            print(f"{slip} | {_line(slip)}\n  {verdict or 'PASSED'}", flush=True)
            if given.results is not None:
                with open(given.results, "a") as file:
                    file.write(json.dumps([str(slip), verdict]) + "\n")
    tried = [slip for slip in slips if str(slip) in verdicts]
    survivors = [str(slip) for slip in tried if not verdicts[str(slip)]]
    print(f"{len(tried)} of {len(slips)} slips, {len(survivors)} passed", *survivors, sep="\n")
    return 1 if survivors else 0


def _verdict(tree: Path, slip: Slip) -> str:
    """The test that notices a slip, "" if none does."""
    content = slip.of((PROJECT / slip.file).read_text())
    if passes(tree, files_about(slip.file), LIMIT_S, slip.file, content, with_ray="engine/ray/" in slip.file):
        return ""
    return _first_failure(tree / OUTPUT)


def _first_failure(output: Path) -> str:
    """The test that failed; where none did, the last line of what pytest said: nothing can be imported, or it hung."""
    lines = output.read_text(errors="replace").splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("FAILED ")]
    return (failed or lines[-1:] or ["no test began"])[0]


def _line(slip: Slip) -> str:
    return (PROJECT / slip.file).read_text().splitlines()[slip.line - 1].strip()


if __name__ == "__main__":
    sys.exit(main())
