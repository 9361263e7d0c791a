"""Slips of one token that a seed draws from code, each in a copy of the tree: which of them no test notices.

`python -m tests.fuzz.drawn --seed 20261127 --count 150 --costs FILE` draws slips from seven parts of the code, in proportion to
their lines of code and at least 15 of each. FILE is written by `tests.support.costs` with `--lines`: it says which tests execute
which lines. A slip is tried against the tests that execute its line, then against those of its file, the cheapest first, up to a
minute of them. Slips that pass are read by a person, since no program can tell a slip that changes nothing. `--results FILE
--seconds 80` does a part, and the same command resumes with the slips that the results do not hold.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import random
import re
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutants import OUTPUT, PROJECT, copy_of_project, passes

AREAS = ("methods", *(f"raysim/{room}" for room in ("training", "engine", "plan", "data", "tuning", "reporting")))

#: Least number of slips of an area, as a share of all.
LEAST = 0.1

#: Seconds of tests, as they took without a slip, that a slip is tried against: first few, since most slips are noticed at once.
TESTS_S = (5, 60)

#: Seconds after which the tests of a slip are ended: it hangs, and that is noticed.
LIMIT_S = 300

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
        value = ast.literal_eval(word)
        return ("1.0",) if value == 0 else (repr(value / 2), repr(value * 4))
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
    """Return slips of different tokens, in the order of areas, files and lines: see `LEAST` for their number by area."""
    generator, places, lines = random.Random(seed), {}, {}
    for area in AREAS:
        parts = [slips_of(file) for file in sorted((PROJECT / area).rglob("*.py"))]
        places[area] = [place for part, _ in parts for place in part]
        lines[area] = sum(number for _, number in parts)
    shares = {area: max(round(count * LEAST), round(count * lines[area] / sum(lines.values()))) for area in AREAS}
    largest = max(shares, key=lambda area: shares[area])
    shares[largest] += count - sum(shares.values())
    chosen = [place for area in AREAS for place in sorted(generator.sample(places[area], shares[area]), key=_where)]
    return [generator.choice(place) for place in chosen]


def _where(place: tuple[Slip, ...]) -> tuple[str, int, int]:
    return place[0].file, place[0].line, place[0].column


@dataclass(frozen=True)
class Cost:
    """Name and wall seconds of a test, and the lines that it executes, by file."""

    name: str
    wall_s: float
    lines: dict[str, list[int]]


def costs_of(file: Path) -> list[Cost]:
    """Return the tests that passed through `tests.support.costs --lines`, the cheapest first."""
    records = (json.loads(line) for line in file.read_text().splitlines())
    return sorted((Cost(name, wall_s, lines) for name, wall_s, _, lines in records), key=lambda test: test.wall_s)


def relevant_tests(slip: Slip, costs: list[Cost], seconds: float) -> list[str]:
    """Return tests that execute the slip's line, then those that execute others of its file, for so many seconds."""
    near = [test for test in costs if slip.file in test.lines]
    chosen, left = [], seconds
    for test in sorted(near, key=lambda test: slip.line not in test.lines[slip.file]):
        if test.wall_s <= left:
            chosen.append(test.name)
            left -= test.wall_s
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", default="", help="slips whose name holds this")
    parser.add_argument("--list", action="store_true", help="name the slips; none is tried")
    parser.add_argument("--costs", type=Path, help="tests with the lines that they execute, by tests.support.costs")
    parser.add_argument("--results", type=Path, help="verdicts so far, a line each; these slips are not tried again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further slip is tried")
    given = parser.parse_args()
    slips = [slip for slip in draw(given.seed, given.count) if given.only in str(slip)]
    if given.list:
        print(*(f"{slip} | {_line(slip)}" for slip in slips), sep="\n")
        return 0
    if given.costs is None:
        parser.error("--costs is missing")
    costs = costs_of(given.costs)
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
            verdict = verdicts[str(slip)] = _verdict(tree, slip, costs)
            print(f"{slip} | {_line(slip)}\n  {verdict or 'PASSED'}", flush=True)
            if given.results is not None:
                with open(given.results, "a") as file:
                    file.write(json.dumps([str(slip), verdict]) + "\n")
    tried = [slip for slip in slips if str(slip) in verdicts]
    survivors = [str(slip) for slip in tried if not verdicts[str(slip)]]
    print(f"{len(tried)} of {len(slips)} slips, {len(survivors)} passed", *survivors, sep="\n")
    return 1 if survivors else 0


def _verdict(tree: Path, slip: Slip, costs: list[Cost]) -> str:
    """Return the test that notices a slip, "" if none does. Tests that fail in the copied tree without a slip are dropped."""
    content = slip.of((PROJECT / slip.file).read_text())
    for seconds in TESTS_S:
        tests = relevant_tests(slip, costs, seconds)
        while tests and not passes(tree, tests, LIMIT_S, slip.file, content):
            failed = _first_failure(tree / OUTPUT)
            if failed not in tests or passes(tree, [failed], LIMIT_S):
                return failed
            tests.remove(failed)
    return ""


def _first_failure(output: Path) -> str:
    """The test that failed; where none did, the last line of what pytest said: nothing can be imported, or it hung."""
    lines = output.read_text(errors="replace").splitlines()
    failed = [match[1] for line in lines if (match := re.fullmatch(r"FAILED (.*) \((?:setup|call|teardown)\)", line))]
    return (failed or lines[-1:] or ["no test began"])[0]


def _line(slip: Slip) -> str:
    return (PROJECT / slip.file).read_text().splitlines()[slip.line - 1].strip()


if __name__ == "__main__":
    sys.exit(main())
