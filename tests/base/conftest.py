"""The folder of a user's own code."""

from __future__ import annotations

import sys

import pytest

from tests.support.own_folder import write_files


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The user's folder, which this process stands in and can import from."""
    monkeypatch.chdir(write_files(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(tmp_path))
    ]:
        del sys.modules[name]
