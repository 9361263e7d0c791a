"""The house stays readable: no file or class that does not fit in the head."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict

from packaging.requirements import Requirement

from tests.structure import CLASS_LINES, FILE_LINES, ROOT, code_lines, sources, too_long


def test_no_file_or_class_is_too_long():
    files = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources()}
    assert not {name: count for name, count in files.items() if count > FILE_LINES}
    assert not too_long((ast.ClassDef,), CLASS_LINES)


def test_code_lines_leave_out_blanks_comments_and_docstrings():
    text = '"""One.\n\nTwo."""\n\nx = 1  # why\n\n\ndef f():\n    """Doc."""\n    # no code\n    return """a\nb"""\n'
    assert code_lines(text) == 4


def test_constraints_min_are_the_floors_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        needed
        for name, extra in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for needed in extra
    ]
    floors = map(Requirement, [*project["dependencies"], *extras])
    minima = map(Requirement, (ROOT / "constraints-min.txt").read_text().splitlines())
    versions = {minimum.name: str(minimum.specifier) for minimum in minima}
    assert {floor.name: str(floor.specifier).replace(">=", "==") for floor in floors}.items() <= versions.items()


def test_the_name_of_a_public_class_stands_once():
    homes = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}
