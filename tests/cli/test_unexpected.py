"""The last resort: one sentence on the terminal, the traceback in a file."""

from __future__ import annotations

import errno

import pytest

from raysim.base.errors import RaysimError
from raysim.cli import main as command
from raysim.cli.unexpected import sentence


@pytest.fixture
def failing(monkeypatch, tmp_path):
    def fail():
        raise KeyError("a slip\nof ours")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "app", fail)
    return tmp_path


def test_an_error_nobody_foresaw_is_one_sentence_and_a_file(failing, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    (kept,) = failing.glob("raysim-error-*.txt")
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("KeyError: 'a slip\\nof ours'. The fault is in raysim")
    assert str(kept) in printed
    assert "in fail" in kept.read_text()


def test_a_full_disk_is_no_fault_of_ours():
    error = OSError(errno.ENOSPC, "No space left on device")
    assert "Free space" in sentence(error)
    assert "fault is in raysim" not in sentence(error)


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch):
    from raysim.engine.ray import session

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RaysimError, match=r"no Ray cluster answers in RAY_ADDRESS=127\.0\.0\.1:1"):
        session._start()
