"""What a process that computes asks of its C library and of PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import torch

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


def test_arithmetic_is_settled_on_a_gpu_and_restored_at_the_end():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with device.arithmetic_kept():
        device.settle_arithmetic(before[0] + 1, "cuda")
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (before[0] + 1, True)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
