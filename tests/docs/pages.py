"""The pages of the documentation and their blocks of code, as the tests read them.

- `sh`, or no language: lines that begin with `raysim`, `python -m raysim` or `make` are commands.
- `yaml`: a configuration. `python`: is compiled, and run where it imports raysim.
- A block that begins with the comment `# NAME.py` or `# NAME.yaml` is a file of that name for the rest of its page.
- A block with a line `# not run: REASON` is no example that runs; `text` is no code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "cluster/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "report.md"),
]

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"(?:[\w./-]*/)?raysim$")
#: Words of a shell at which a command ends.
ENDS = {"|", ">", ">>", "&&", "||", ";", "&"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that this block is, if it is one."""
        first = re.match(r"# ([\w/]+\.(?:py|yaml))\n", self.text)
        return first[1] if first else None

    @property
    def runs(self) -> bool:
        """Whether it is Python that a reader would run."""
        runs = re.search(r"^import raysim$", self.text, re.MULTILINE) and "# not run:" not in self.text
        return bool(self.language == "python" and runs and not self.file)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in some languages, or all of them."""
    content = page.read_text()
    found = []
    for match in FENCE.finditer(content):
        text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        found.append(Block(page, content[: match.start()].count("\n") + 1, match["language"], text))
    return [block for block in found if not languages or block.language in languages]


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that are files."""
    for block in blocks(page, "python", "yaml"):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(where, words after `raysim` or `make`, with that word first) of every such command of a page."""
    for block in blocks(page, "", "sh", "bash"):
        for number, line in enumerate(block.text.replace("\\\n", "  ").splitlines(), block.line + 1):
            where = f"{name_of(page)}:{number}"
            try:
                lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
                lexer.wordchars += "{}[]$:=,@%^!+"
                lexer.whitespace_split = True
                words = list(lexer)
            except ValueError:  # an output, with one quotation mark
                continue
            yield from ((where, words) for words in _commands(words))


def _commands(words: list[str]) -> Iterator[list[str]]:
    for index, word in enumerate(words):
        begins = all("=" in before for before in words[:index]) or words[index - 1] in ENDS
        is_module = words[max(0, index - 1) : index] == ["-m"] and word == "raysim"
        if is_module or (begins and (PROGRAM.match(word) or word == "make")):
            rest = words[index + 1 :]
            end = next((place for place, each in enumerate(rest) if each in ENDS), len(rest))
            yield ["make" if word == "make" else "raysim", *rest[:end]]
