"""The pages of studies: every number with a decimal point comes from the study's report.

Such a number stands in a row of one of the reports or tables below the study's folder, rounded as the page prints it, and
the paragraph names that row; or it is the difference of two numbers of its paragraph. A number of the study's files in
`configs` is a setting. Code is left out, and so are whole numbers, which count things.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER, CONFIGS = ROOT / "docs" / "studies", ROOT / "configs"
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)")
#: A paragraph, an entry of a list, or a row of a table.
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=- )|\n(?=\|)")

#: Pages that are older than this rule: they also tell what is in progress.csv, whose runs are gone.
OLDER = ("livar_digits", "univarfl_shapes")
STUDIES = [path.parent for path in sorted(FOLDER.glob("*/README.md")) if path.parent.name not in OLDER]

Cell = tuple[Decimal, frozenset[str]]  # a number of a report, and the words that name its row


def numbers(text: str) -> list[Decimal]:
    return [Decimal(found) for found in NUMBER.findall(text)]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", text.lower()))


def reported(study: Path) -> list[Cell]:
    """The numbers of a study's reports and tables, each with the words of its row."""
    cells: list[Cell] = []
    for path in study.rglob("report.md"):
        row = frozenset[str]()
        for line in path.read_text().splitlines():
            first, _, rest = line.strip("|").partition("|")
            if not line.startswith("|"):
                row, rest = words(line), line
            elif "&nbsp;" not in first:  # a row below another one, such as its published numbers, has that one's name
                row = words(first)
            cells += [(number, row) for number in numbers(rest)]
    for path in study.rglob("table.csv"):
        for line in csv.DictReader(path.open()):
            names = list(line)
            row = words(" ".join(line[name] or "" for name in names[: names.index("metric")]))
            columns = ("mean", "std", "published_mean", "published_std", "difference")
            cells += [(abs(Decimal(line[name])), row) for name in columns if line.get(name)]
    return cells


def settings(text: str, study: Path) -> set[Decimal]:
    """The numbers of the files in configs that a page names, and of tables of others beside it."""
    files = {CONFIGS / name for name in re.findall(r"configs/([\w/]+\.yaml)", text)}
    files |= {study / name for name in re.findall(r"\]\((\w+\.csv)\)", text)}
    return {Decimal(found) for path in files for found in re.findall(r"\d+(?:\.\d+)?", path.read_text())}


def unknown(text: str, cells: list[Cell], known: set[Decimal]) -> list[str]:
    """Numbers of a text that are no setting, no cell of a row that their paragraph names, and no difference in it."""
    return [str(number) for paragraph in PARAGRAPH.split(text) for number in _unknown(paragraph, cells, known)]


def _unknown(paragraph: str, cells: list[Cell], known: set[Decimal]) -> Iterator[Decimal]:
    prose = CODE.sub(" ", paragraph)
    here, there = words(paragraph), numbers(prose)
    named = {number for number, row in cells if row & here} | known
    found = [number for number in there if any(rounds(exact, number) for exact in named)]
    differences = {abs(one - two) for one, two in combinations(found, 2)}
    yield from (number for number in there if number not in found and number not in differences)


def rounds(exact: Decimal, printed: Decimal) -> bool:
    """Whether a number, itself perhaps rounded, is printed so with fewer digits."""
    return any(exact.quantize(printed, way) == printed for way in (ROUND_HALF_UP, ROUND_HALF_DOWN))


def test_numbers_are_rounded_settings_apart_and_code_left_out():
    cells = [(Decimal("88.454"), words("FedVG")), (Decimal("1.25"), words("FedVG"))]
    text = "FedVG has 88.5 and 88.45, 1.2 or 1.3 less at alpha 0.5; `0.7` is code, 12 a count"
    assert unknown(text, cells, {Decimal("0.5")}) == []
    assert unknown("FedVG has 88.4 against 0.51; version 1.2.3", cells, set()) == ["88.4", "0.51"]


def test_a_number_stands_beside_the_name_of_its_row_and_a_difference_beside_its_two_numbers():
    cells = [(Decimal("50.00"), words("FedAvg")), (Decimal("53.50"), words("FedVG"))]
    assert unknown("FedVG has 53.50, FedAvg 50.00: 3.50 points", cells, set()) == []
    assert unknown("FedVG is 3.50 points ahead\n\nFedAvg has 53.50", cells, set()) == ["3.50", "53.50"]


def test_cells_are_read_with_the_name_of_their_row(tmp_path):
    (tmp_path / "report.md").write_text(
        "| method | a |\n|---|---|\n| FedVG | 61.25 |\n| &nbsp;&nbsp;published | 60.5 |"
    )
    lines = ["method,alpha,metric,mean,std", "A,0.1,accuracy,53.5,", "B,0.5,accuracy,61,1.25"]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    assert reported(tmp_path) == [
        (Decimal("61.25"), {"fedvg"}),
        (Decimal("60.5"), {"fedvg"}),
        (Decimal("53.5"), {"a", "0.1"}),
        (Decimal("61"), {"b", "0.5"}),
        (Decimal("1.25"), {"b", "0.5"}),
    ]


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_numbers_of_a_page_are_those_of_the_rows_that_it_names(study: Path):
    text = (study / "README.md").read_text()
    assert unknown(text, reported(study), settings(text, study)) == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_numbers_of_the_gallery_are_those_of_the_reports(study: Path):
    sections = (FOLDER / "README.md").read_text().split("\n## ")
    (section,) = [section for section in sections if f"]({study.name}/README.md)" in section]
    page = (study / "README.md").read_text()
    assert unknown(section, reported(study), settings(page, study)) == []
