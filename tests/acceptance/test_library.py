"""`import raysim` in every surrounding, and as the README shows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_runs_everywhere_with_the_same_bits_and_leaves_ray_as_it_was(root, tmp_path):
    words = [sys.executable, "-m", "tests.samples.everywhere", str(root), str(tmp_path / "runs")]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    ended = subprocess.run(words, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert ended.stdout.endswith("the same bits everywhere\n"), ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_readme_section_runs(tmp_path, monkeypatch):
    section = (PROJECT / "README.md").read_text().partition("## From Python")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    shutil.copytree(PROJECT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["run"].folder == tmp_path / "runs" / "quickstart"
    assert [run.status.name for run in names["runs"]] == ["completed"] * 4
    assert (tmp_path / "runs" / "compared" / "report" / "report.md").is_file()
