"""Pictures of the documentation: what pages show is there, what is there is shown, and none is large."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SUFFIXES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")

#: The target of a link or picture in Markdown, or of one in HTML.
TARGETS = re.compile(r"\]\(\s*<?([^)\s>#]+)|(?:src|srcset|href)=[\"']([^\"'#\s]+)")

MOST_BYTES = 400_000


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(text, folder):
    """The pictures that a page names, as paths; those on other hosts are left out."""
    targets = [first or second for first, second in TARGETS.findall(text)]
    return {(folder / target).resolve() for target in targets if target.endswith(SUFFIXES) and "://" not in target}


def stored():
    return {path.resolve() for path in (ROOT / "docs").rglob("*") if path.suffix in SUFFIXES}


def test_pictures_of_a_page_are_found_in_links_and_in_html():
    text = '![a b](figures/a.png) [![x](b.svg)](page.md) <img src="c.png"> ![](https://example.org/d.png) `e.png`'
    assert shown(text, ROOT) == {ROOT / "figures" / "a.png", ROOT / "b.svg", ROOT / "c.png"}


def test_pictures_that_pages_show_are_there():
    missing = {
        page.name: [str(path) for path in shown(page.read_text(), page.parent) if not path.is_file()]
        for page in pages()
    }
    assert not {name: paths for name, paths in missing.items() if paths}


def test_pictures_are_shown_somewhere():
    named = set().union(*(shown(page.read_text(), page.parent) for page in pages()))
    assert sorted(map(str, stored() - named)) == []


def test_pictures_and_notebooks_are_small():
    files = [*stored(), *(ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert {str(path): path.stat().st_size for path in files if path.stat().st_size > MOST_BYTES} == {}
