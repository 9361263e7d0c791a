"""The pages of studies: every number with a decimal point comes from the study's report.

Such a number is in one of the reports or tables below the study's folder, rounded as the page prints it, or it is the
difference of the means of two cells of one table that differ in a single label. A number of the study's files in
`configs/studies` is a setting. Code is left out, and so are whole numbers, which count things.
"""

from __future__ import annotations

import csv
import re
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER, FILES = ROOT / "docs" / "studies", ROOT / "configs" / "studies"
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)")

#: Pages that are older than this rule: they also tell what is in progress.csv, whose runs are gone.
OLDER = ("livar_digits", "univarfl_shapes")
STUDIES = [path.parent for path in sorted(FOLDER.glob("*/README.md")) if path.parent.name not in OLDER]


def numbers(text: str) -> list[Decimal]:
    return [Decimal(found) for found in NUMBER.findall(text)]


def reported(study: Path) -> set[Decimal]:
    """All numbers of the reports and tables of a study, and the differences of means of neighbouring cells."""
    found = {number for path in study.rglob("report.md") for number in numbers(path.read_text())}
    for path in study.rglob("table.csv"):
        rows = [row for row in csv.DictReader(path.open()) if row["mean"]]
        cells = [(labels_of(row), Decimal(row["mean"])) for row in rows]
        found |= {number for row in rows for number in (Decimal(row["mean"]), Decimal(row["std"] or 0))}
        found |= {abs(mean - other) for (one, mean), (two, other) in combinations(cells, 2) if len(one ^ two) == 2}
    return found


def labels_of(row: dict[str, str]) -> frozenset[tuple[str, str]]:
    """(label, value) of what stands before the metric in a row of table.csv."""
    names = list(row)
    return frozenset((name, row[name]) for name in names[: names.index("metric")] if row[name])


def settings(text: str) -> set[Decimal]:
    """The numbers of the files in configs/studies that a page names."""
    files = {FILES / name for name in re.findall(r"configs/studies/(\w+\.yaml)", text)}
    return {Decimal(found) for path in files for found in re.findall(r"\d+(?:\.\d+)?", path.read_text())}


def unknown(text: str, known: set[Decimal]) -> list[str]:
    """Numbers of a text that no known one rounds to."""
    return [str(number) for number in numbers(CODE.sub(" ", text)) if not any(rounds(one, number) for one in known)]


def rounds(exact: Decimal, printed: Decimal) -> bool:
    """Whether a number, itself perhaps rounded, is printed so with fewer digits."""
    return any(exact.quantize(printed, way) == printed for way in (ROUND_HALF_UP, ROUND_HALF_DOWN))


def test_numbers_are_rounded_settings_apart_and_code_left_out():
    known = {Decimal("88.454"), Decimal("-1.25"), Decimal("0.5")}
    assert (
        unknown("88.5 and 88.45, 1.2 or 1.3 less at alpha 0.5; `0.7` is code, 12 a count", {*known, Decimal("1.25")})
        == []
    )
    assert unknown("88.4 against 0.51; version 1.2.3", known) == ["88.4", "0.51"]


def test_differences_are_of_cells_that_differ_in_one_label(tmp_path):
    lines = ["method,alpha,metric,mean,std", "A,0.1,accuracy,50,", "B,0.1,accuracy,53.5,", "B,0.5,accuracy,61,1.25"]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    assert reported(tmp_path) == {Decimal(number) for number in ("50", "53.5", "61", "0", "1.25", "3.5", "7.5")}


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_numbers_of_a_page_are_those_of_its_report(study: Path):
    text = (study / "README.md").read_text()
    assert unknown(text, reported(study) | settings(text)) == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_numbers_of_the_gallery_are_those_of_the_reports(study: Path):
    sections = (FOLDER / "README.md").read_text().split("\n## ")
    (section,) = [section for section in sections if f"]({study.name}/README.md)" in section]
    page = (study / "README.md").read_text()
    assert unknown(section, reported(study) | settings(page)) == []
