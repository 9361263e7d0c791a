"""`import raysim` in every surrounding."""

from __future__ import annotations

import os
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
