"""The pages about methods: every method on one of them, tables of options from the code, links and numbers that are true."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

from methods import GROUPS, METHODS
from raysim.base.options import options_of
from tests.docs.method_tables import BLOCK, PAGES, TASK_PAGE, written

TEXTS = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
#: The studies whose results stand on the page of each of the four methods.
STUDIES = {
    "fedvg": ("fedvg_claim", "fedvg_digits", "fedvg_scoring", "fedvg_cifar10"),
    "flfa": ("flfa_digits",),
    "livar": ("livar_digits", "livar_cifar100"),
    "univarfl": ("univarfl_shapes", "univarfl_pacs", "univarfl_cifar10"),
}
#: Groups of methods with a page of their own.
OWN_PAGE = {"Privacy": "privacy", "Compression": "compression"}
RECIPES = PAGES.parents[1] / "configs" / "papers"
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
RESULT = re.compile(r"\d+\.\d+ ± \d+\.\d+")


def test_every_method_is_on_one_page():
    named = Counter(block[1] for text in TEXTS.values() for block in BLOCK.finditer(text))
    assert named == Counter(METHODS.keys())


def test_baselines_stand_in_the_groups_of_the_code():
    overviews = TEXTS[PAGES / "baselines.md"] + TEXTS[PAGES / "robustness.md"]
    rows = re.findall(r"^\| \[(.+)\]\((\w+\.md)\S*\) \| (.+) \|$", overviews, re.MULTILINE)
    groups = dict(GROUPS)
    assert groups.pop("The four papers") == list(STUDIES)
    for title, page in OWN_PAGE.items():
        assert methods_on(f"{page}.md") == groups.pop(title)
    assert {title: names.replace("`", "").split(", ") for title, _, names in rows} == groups
    for title, page, _ in rows:
        assert [name for name in methods_on(page) if name in groups[title]] == groups[title]


def methods_on(page: str) -> list[str]:
    return [block[1] for block in BLOCK.finditer(TEXTS[PAGES / page])]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_tables_of_options_are_the_methods_own(path: Path):
    assert written(TEXTS[path]) == TEXTS[path], "run `python -m tests.docs.method_tables`"


def test_table_of_tasks_is_the_methods_own():
    assert written(TASK_PAGE.read_text()) == TASK_PAGE.read_text(), "run `python -m tests.docs.method_tables`"


@pytest.mark.parametrize("name", STUDIES)
def test_results_are_those_of_our_study(name: str):
    tables = [table for study in STUDIES[name] for table in (PAGES.parent / "studies" / study).rglob("*.csv")]
    rows = [row for table in tables for row in csv.DictReader(table.open()) if row.get("std")]
    known = {f"{float(row['mean']):.2f} ± {float(row['std']):.2f}" for row in rows}
    said = set(RESULT.findall(TEXTS[PAGES / f"{name}.md"]))
    assert said
    assert said <= known


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_and_pictures_are_there(path: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[path]):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), target
            assert not heading or heading in headings_of(page.read_text()), target


def headings_of(text: str) -> set[str]:
    return {re.sub(r"[^\w\s-]", "", line[1]).strip().lower().replace(" ", "-") for line in HEADING.finditer(text)}


def test_recipes_are_there():
    shipped = {f"{file.parent.name}/{file.stem}" for file in RECIPES.glob("*/*.yaml")}
    for path, text in TEXTS.items():
        section = text.partition("## Recipes\n")[2].partition("\n## ")[0]
        named = re.findall(rf"\b{path.stem}/(\w+)", section)
        assert {f"{path.stem}/{name}" for name in named} <= shipped, path
        assert named or path.stem not in STUDIES


def test_every_option_has_a_meaning():
    assert not [f"{name}.{o.name}" for name, make in METHODS.items() for o in options_of(make) if not o.meaning]
