"""What a process that computes asks of its C library."""

from __future__ import annotations

from types import SimpleNamespace

from raysim.engine import device


def test_the_c_library_is_told_to_keep_what_is_freed(monkeypatch):
    said = {}
    libc = SimpleNamespace(mallopt=lambda parameter, value: said.update({parameter: value}))
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: libc)
    device.keep_freed_memory()
    # As malloc.h numbers them: up to 1 GiB from the heap, and no trimming below what an int holds.
    assert said == {-3: 2**30, -1: 2**31 - 1}


def test_without_that_library_nothing_is_asked(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    device.keep_freed_memory()
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: SimpleNamespace())
    device.keep_freed_memory()
