"""The pages of studies: every number with a decimal point comes from the study's report.

The number is a cell of a report below the study's folder, rounded as the page prints the number, and the paragraph names
the cell's row and column; or the number is the difference of two numbers of its paragraph that share a row or a column, and
its sentence names both rows. A number of the study's files in `configs` is a setting. Code is left out, and so are whole
numbers, which count things.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDER, CONFIGS = ROOT / "docs" / "studies", ROOT / "configs"
BLOCK, CODE = re.compile(r"```.*?```", re.DOTALL), re.compile(r"`[^`]*`|\]\([^)]*\)")
#: With the sign of a standard deviation, which stays apart from a mean as a negative number.
NUMBER = re.compile(r"(?<![\w.])(?:± )?\d+\.\d+(?![\w.]*\w)")
#: A paragraph, an entry of a list, or a row of a table.
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=- )|\n(?=\|)")
SENTENCE = re.compile(r"(?<=[.;])\s+(?!\d)")
#: Words of pages for a report's words, and words that name nothing.
SPELLINGS = {"batchnorm": "batch", "paper": "published", "plain": "none", "transformer": "vit", "without": "none"}
STOP = {"", "a", "and", "at", "by", "for", "in", "is", "it", "not", "of", "on", "over", "that", "the", "to", "with"}

STUDIES = [path.parent for path in sorted(FOLDER.glob("*/README.md"))]

Words = frozenset[str]


class Cell(NamedTuple):
    """A number of a report: the words of its row, those of each part of its column, and the table if it is a mean."""

    number: Decimal
    row: Words
    column: frozenset[Words] = frozenset()
    table: str = ""


def numbers(text: str) -> list[Decimal]:
    return [Decimal(found.replace("± ", "-")) for found in NUMBER.findall(text)]


def words(text: str) -> Words:
    found = re.findall(r"[a-z0-9]+(?:[.,][a-z0-9]+)*", f"{text} {text.replace('-', '')}".lower())
    return frozenset(SPELLINGS.get(word, word.removesuffix(".0").rstrip("s")) for word in found) - STOP


def parts(text: str) -> frozenset[Words]:
    """The words of each part of a column's name, such as `alpha = 0.1, validation = even`."""
    return frozenset(filter(None, map(words, re.split(r", |: | / ", re.sub(r"\w+ = ", "", text)))))


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def reported(study: Path) -> list[Cell]:
    """The numbers of a study's reports; a part of a column's name that all such columns share names nothing."""
    cells = [(path, *found) for path in sorted(study.rglob("report.md")) for found in _cells(path)]
    shared: dict[tuple, frozenset[Words]] = {}
    for _, kind, cell in cells:
        shared[kind] = shared.get(kind, cell.column) & cell.column
    places = {path: _place(path, study) for path, _, _ in cells}
    return [cell._replace(column=cell.column - shared[kind] | places[path]) for path, kind, cell in cells]


def _place(path: Path, study: Path) -> frozenset[Words]:
    """The words that tell a second report from the study's report: of its folder and of its title."""
    title, main = (words(file.read_text().partition("\n")[0]) for file in (path, study / "report.md"))
    place = (title - main) | words(path.parent.name.replace("_", " "))
    return frozenset([place] if path.parent != study else [])


def _cells(path: Path) -> Iterator[tuple[tuple, Cell]]:
    heading, head, row = "", [], words("")
    for line in path.read_text().splitlines():
        first, *rest = split(line)
        if not line.startswith("|"):
            heading, head = line.removeprefix("### Over seeds") if line.startswith("#") else heading, []
            yield from (((), Cell(number, words(line))) for number in numbers(line))
        elif not head:
            head = [first, *rest]
            kind = first, "/" in heading, *(sorted(set(re.findall(r"(\w+) = ", line))) or rest)
        else:
            row = (row if "&nbsp;" in first else words("")) | words(first)  # below another row: a row of that one
            table = "" if head[0] in ("better than", "difference") else f"{path} {heading}"
            for name, text in zip(head[1:], rest, strict=True):
                column = parts(f"{heading}, {name}")
                yield from ((kind, Cell(number, row, column, table)) for number in numbers(text))


def settings(text: str, study: Path) -> set[Decimal]:
    """The numbers of the files in configs that a page names, and of tables of others beside it."""
    files = {CONFIGS / name for name in re.findall(r"configs/([\w/]+\.yaml)", text)}
    files |= {study / name for name in re.findall(r"\]\((\w+\.csv)\)", text)}
    return {Decimal(found) for path in files for found in re.findall(r"\d+(?:\.\d+)?", path.read_text())}


def unknown(text: str, cells: list[Cell], known: set[Decimal]) -> list[str]:
    """Numbers of a text that are no setting, no cell whose row and column are named, and no difference of two cells."""
    rows = {cell.row for cell in cells}
    shorter = {row: [other for other in rows if other < row] for row in rows}
    found: list[str] = []
    for name, prose in pieces(BLOCK.sub("", text)):
        here = words(name)
        rows = {row for row in shorter if row & here and not any(row & here <= other for other in shorter[row])}
        named = [cell for cell in cells if cell.row in rows and all(part & here for part in cell.column)]
        found += [str(abs(number)) for number in _unknown(CODE.sub(" ", prose), named, known)]
    return found


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Each paragraph with its words and the heading's, and each cell of a table with those of its row and column."""
    heading, head = "", []
    for paragraph in PARAGRAPH.split(text):
        if paragraph.startswith("#"):
            heading, _, paragraph = paragraph.partition("\n")
        if not paragraph.startswith("|"):
            head = []
            yield f"{heading} {paragraph}", paragraph
        elif not head:
            head = split(paragraph)
        else:
            first, *rest = split(paragraph)
            yield from ((f"{heading} {first} {name}", cell) for name, cell in zip(head[1:], rest, strict=True))


def _unknown(prose: str, named: list[Cell], known: set[Decimal]) -> Iterator[Decimal]:
    quoted = {number: [cell for cell in named if rounds(cell.number, number)] for number in numbers(prose)}
    means = [(number, cell) for number, found in quoted.items() for cell in found if cell.table and number > 0]
    lead = " ".join(re.findall(r"\*\*[^*]*\*\*", prose))
    for sentence in SENTENCE.split(prose):
        here = words(f"{lead} {sentence}")
        differences = {
            abs(one - two)
            for (one, a), (two, b) in combinations(means, 2)
            if a.table == b.table and (a.row == b.row or a.column == b.column) and a.row & here and b.row & here
        }
        for number in numbers(sentence):
            if not quoted[number] and number not in differences and not any(rounds(n, abs(number)) for n in known):
                yield number


def rounds(exact: Decimal, printed: Decimal) -> bool:
    """Whether a number, itself perhaps rounded, is printed so with fewer digits."""
    return any(exact.quantize(printed, way) == printed for way in (ROUND_HALF_UP, ROUND_HALF_DOWN))


def cells_of(path: Path, report: str) -> list[Cell]:
    (path / "report.md").write_text(report)
    return reported(path)


TABLE = "| method | alpha = 0.1, set = even | alpha = 1, set = even |\n|---|---|---|\n"


def test_numbers_are_rounded_settings_apart_and_code_left_out():
    cells = [Cell(Decimal("88.454"), words("FedVG")), Cell(Decimal("1.25"), words("FedVG"))]
    text = "FedVG has 88.5 and 88.45, 1.2 or 1.3 less at alpha 0.5; `0.7` is code, 12 a count"
    assert unknown(text, cells, {Decimal("0.5")}) == []
    assert unknown("FedVG has 88.4 against 0.51; version 1.2.3", cells, set()) == ["88.4", "0.51"]


def test_a_number_stands_beside_the_names_of_its_row_and_column(tmp_path):
    cells = cells_of(tmp_path, TABLE + "| FedVG | 53.50 ± 1.25 | 61.25 |\n| FedVG, loss | 50.00 | 60.50 |")
    assert unknown("FedVG has 53.50 ± 1.25 at alpha 0.1", cells, {Decimal("0.1")}) == []
    assert unknown("FedVG has 1.25 and ± 53.50 at alpha 0.1", cells, {Decimal("0.1")}) == ["1.25", "53.50"]
    assert unknown("FedVG has 53.50 and 1.25 at alpha 1", cells, {Decimal("0.1")}) == ["53.50", "1.25"]
    assert unknown("FedVG has 50.00 at alpha 0.1, FedAvg 53.50", cells, {Decimal("0.1")}) == ["50.00"]
    assert unknown("The loss has 50.00\n\nat alpha 0.1", cells, {Decimal("0.1")}) == ["50.00"]
    page = "## FedVG\n\n| | alpha 0.1 | alpha 1 |\n|---|---|---|\n| norm | 53.50 | 61.25 |\n| loss | 60.50 | 50.00 |"
    assert unknown(page, cells, {Decimal("0.1")}) == ["60.50", "50.00"]


def test_a_difference_shares_a_row_or_a_column_and_its_sentence_names_both_rows(tmp_path):
    cells = cells_of(tmp_path, TABLE + "| FedAvg | 50.00 | 60.00 |\n| FedVG | 53.50 | 61.25 |\n| MOON | 40.0 | 41.0 |")
    quoted = "At alpha 0.1 and 1, FedVG has 53.50 and 61.25. FedAvg has 50.00 and 60.00."
    assert (
        unknown(
            f"{quoted} FedVG is 3.50 ahead of FedAvg, and 7.75 lower at alpha 0.1 than at 1.", cells, {Decimal("0.1")}
        )
        == []
    )
    assert unknown(f"{quoted} FedVG is 11.25 ahead of FedAvg.", cells, {Decimal("0.1")}) == ["11.25"]
    assert unknown(f"{quoted} MOON is 3.50 ahead of FedVG.", cells, {Decimal("0.1")}) == ["3.50"]
    assert unknown("FedVG is 3.50 ahead of FedAvg at alpha 0.1", cells, {Decimal("0.1")}) == ["3.50"]


def test_cells_are_read_with_the_names_of_their_row_column_and_second_report(tmp_path):
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "report.md").write_text("# b\n| method | a |\n|---|---|\n| FedVG | 1.5 |")
    report = f"# a\n{TABLE}| FedVG | 61.25 | - |\n| &nbsp;&nbsp;published | 60.5 | - |\n| MOON | - | 2.5 |"
    first, below, last, late = sorted(cells_of(tmp_path, report), key=lambda cell: -cell.number)
    assert [cell.row for cell in (first, below, last, late)] == [
        {"fedvg"},
        {"fedvg", "nbsp", "published"},
        {"moon"},
        {"fedvg"},
    ]
    assert [cell.column for cell in (first, last, late)] == [{words("0.1")}, {words("1")}, {words("b late")}]


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_numbers_of_a_page_are_those_of_the_rows_that_it_names(study: Path):
    text = (study / "README.md").read_text()
    assert unknown(text, reported(study), settings(text, study)) == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_numbers_of_the_gallery_are_those_of_the_reports(study: Path):
    sections = (FOLDER / "README.md").read_text().split("\n### ")
    (section,) = [section for section in sections if f"]({study.name}/README.md)" in section]
    page = (study / "README.md").read_text()
    assert unknown(section, reported(study), settings(page, study)) == []
