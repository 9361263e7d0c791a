"""`python -m tests.structure`: the house in numbers: how much code and where, sizes, loose types, and what imports what."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION_LINES, CLASS_LINES, FOLDER_FILES = 60, 250, 15

#: The rooms of the simulation itself; all others are its shell: what is around it, from configurations to reports.
INNER_ROOMS = ("base", "core", "training", "engine", "models", "methods")


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
        return "figures" if parts[1:2] == ["figures"] else "methods"
    return parts[1] if len(parts) > 1 else "raysim"


def room_of(path: Path) -> str:
    """The room of a source file: "engine", "methods", ...; "raysim" for the files at its root."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "raysim" and len(parts) > 2 else parts[0]


def full_folders() -> dict[str, int]:
    """Folder -> number of its Python files, where these are more than FOLDER_FILES."""
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources())
    return {folder: count for folder, count in counts.items() if count > FOLDER_FILES}


def shared_file_names() -> dict[str, list[str]]:
    """Name of files -> the rooms that have one of it, where these are several."""
    rooms: dict[str, set[str]] = {}
    for path in sources():
        if not path.name.startswith("__"):
            rooms.setdefault(path.name, set()).add(room_of(path))
    return {name: sorted(homes) for name, homes in sorted(rooms.items()) if len(homes) > 1}


def shared_functions() -> set[str]:
    """Names of public functions, outside of classes, that stand in several files."""
    homes = Counter(
        node.name
        for path in sources()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    )
    return {name for name, count in homes.items() if count > 1}


#: Words that point at something instead of naming it.
POINTING = frozenset(
    (
        *("what", "those", "them", "it", "these", "that", "one", "other", "such"),
        *("else", "there", "some", "anew", "whose", "this", "its"),
    )
)


def _words(text: str) -> list[str]:
    """Lower-case words of a text, without code in backquotes."""
    return re.findall(r"[a-z][a-z'-]*", re.sub(r"`[^`]*`", " ", text).lower())


def pointing_words() -> tuple[float, float]:
    """(pointing words per 100 in first paragraphs of docstrings, percent of the short paragraphs with three or more)."""
    words, pointing, short, dense = 0, 0, 0, 0
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                found = _words(text.split("\n\n")[0])
                count = sum(word in POINTING for word in found)
                words, pointing = words + len(found), pointing + count
                short, dense = short + (len(found) <= 40), dense + (len(found) <= 40 and count >= 3)
    return 100 * pointing / words, 100 * dense / short


def shown_texts(source: str) -> list[str]:
    """Strings of four words or more, docstrings left out: messages, keys, captions, help. A value in an f-string is {}."""
    skipped: set[ast.AST] = set()
    texts = []
    for node in ast.walk(ast.parse(source)):
        if node in skipped:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)  # a docstring
        elif isinstance(node, ast.JoinedStr):
            skipped.update(value for value in node.values if isinstance(value, ast.Constant))
            texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return [text for text in texts if len(_words(text)) >= 4]


def pointing_words_shown() -> float:
    """Pointing words per 100 in the texts that users see."""
    found = [word for path in sources() for text in shown_texts(path.read_text()) for word in _words(text)]
    return 100 * sum(word in POINTING for word in found) / len(found)


def num_keys() -> int:
    """Keys of a configuration, groups too; those of a kind of group count once."""
    from raysim.cli.json_schema import ConfigFile

    schema = ConfigFile.model_json_schema()
    return sum(len(kind.get("properties", ())) for kind in (schema, *schema["$defs"].values()))


def main() -> None:
    texts = {path: path.read_text() for path in sources()}
    rooms: Counter[str] = Counter()
    for path, text in texts.items():
        rooms[room_of(path)] += code_lines(text)
    total, everything = rooms.total(), "\n".join(texts.values())
    shell = sum(count for room, count in rooms.items() if room not in INNER_ROOMS)
    print(f"lines of code in raysim and methods: {total} in {len(texts)} files")
    print(f"of these in the shell (all rooms but {', '.join(INNER_ROOMS)}): {shell}, {shell / total:.0%}")
    print("lines of code by room: " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    print(f"folders of more than {FOLDER_FILES} files: {full_folders()}")
    print(f"names of files in several rooms: {shared_file_names()}")
    print(f"names of public functions in several files: {len(shared_functions())} {sorted(shared_functions())}")
    print(f"keys of a configuration: {num_keys()}")
    classes = too_long((ast.ClassDef,), CLASS_LINES)
    print(f"classes over {CLASS_LINES} lines: {len(classes)} {classes}")
    functions = too_long((ast.FunctionDef, ast.AsyncFunctionDef), FUNCTION_LINES)
    print(f"functions over {FUNCTION_LINES} lines (docstring apart): {len(functions)} {functions}")
    print(
        "pointing words per 100 in docstrings: {:.1f}; short docstrings with three: {:.1f} %".format(*pointing_words())
    )
    print(f"pointing words per 100 in messages, keys, captions and help: {pointing_words_shown():.1f}")
    count = len(re.findall(r"\bAny\b", everything))
    print(f"`Any`: {count}; `dict[str, Any]`: {everything.count('dict[str, Any]')}")
    arrows = floors()
    print(f"imports between rooms: {sum(arrows.values())} in {len(arrows)} arrows")
    both = sorted(pair for pair in arrows if pair[::-1] in arrows and pair < pair[::-1])
    print(f"rooms that import each other: {both}")


if __name__ == "__main__":
    main()
