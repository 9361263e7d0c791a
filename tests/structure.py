"""`python -m tests.structure`: the house in numbers: sizes, loose types, and what imports what."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 250, 40


def sources() -> list[Path]:
    return sorted(path for folder in ("raysim", "methods") for path in (ROOT / folder).rglob("*.py"))


def code_lines(text: str) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    start_of_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and start_of_line
        if token.type not in skipped and not is_docstring:
            lines |= set(range(token.start[0], token.end[0] + 1))
        start_of_line = token.type in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.NL,
            tokenize.COMMENT,
        )
    return len(lines)


def too_long(kinds: tuple[type, ...], limit: int) -> list[str]:
    """`file:name lines` of classes or functions over a limit, docstrings not counted."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                doc = ast.get_docstring(node)
                size = node.end_lineno - node.lineno + 1 - (len(doc.splitlines()) + 1 if doc else 0)
                if size > limit:
                    found.append(f"{path.relative_to(ROOT)}:{node.name} {size}")
    return found


def floors() -> Counter[tuple[str, str]]:
    """(room, room) -> number of imports between rooms of raysim and methods."""
    arrows: Counter[tuple[str, str]] = Counter()
    for path in sources():
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for module in modules:
                if module.split(".")[0] in ("raysim", "methods"):
                    here, there = _room(name), _room(module.replace(".", "/"))
                    if here != there:
                        arrows[here, there] += 1
    return arrows


def _room(name: str) -> str:
    parts = name.split("/")
    if parts[0] == "methods":
        return "methods"
    return parts[1] if len(parts) > 1 else "raysim"


def main() -> None:
    texts = {path: path.read_text() for path in sources()}
    total = sum(code_lines(text) for text in texts.values())
    everything = "\n".join(texts.values())
    print(f"lines of code in raysim and methods: {total} in {len(texts)} files")
    long_files = [
        f"{p.relative_to(ROOT)} {len(t.splitlines())}" for p, t in texts.items() if len(t.splitlines()) > FILE_LINES
    ]
    print(f"files over {FILE_LINES} lines: {len(long_files)} {long_files}")
    classes = too_long((ast.ClassDef,), CLASS_LINES)
    print(f"classes over {CLASS_LINES} lines: {len(classes)} {classes}")
    functions = too_long((ast.FunctionDef, ast.AsyncFunctionDef), FUNCTION_LINES)
    print(f"functions over {FUNCTION_LINES} lines (docstring apart): {len(functions)} {functions}")
    count = len(re.findall(r"\bAny\b", everything))
    print(f"`Any`: {count}; `dict[str, Any]`: {everything.count('dict[str, Any]')}")
    arrows = floors()
    print(f"imports between rooms: {sum(arrows.values())} in {len(arrows)} arrows")
    both = sorted(pair for pair in arrows if pair[::-1] in arrows and pair < pair[::-1])
    print(f"rooms that import each other: {both}")


if __name__ == "__main__":
    main()
