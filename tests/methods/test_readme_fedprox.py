"""The README shows FedProx whole."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_file_of_fedprox_verbatim():
    assert f"```python\n{(ROOT / 'methods' / 'fedprox.py').read_text()}```" in (ROOT / "README.md").read_text()
