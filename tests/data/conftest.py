"""The readers' tests write small sets in published formats, which are not what FACTS says of the whole ones."""

from __future__ import annotations

import pytest

from raysim.data import sources


@pytest.fixture(autouse=True)
def no_facts(monkeypatch):
    monkeypatch.setattr(sources, "FACTS", {})
