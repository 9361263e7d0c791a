"""The estimate before anything is allocated."""

from __future__ import annotations

from raysim.base.ram import memory_bytes, memory_fault


def test_what_does_not_fit_is_said_with_both_sizes():
    there = memory_bytes()
    assert 2**28 < there < 2**50
    assert memory_fault(there) == ""
    assert memory_fault(10**15).startswith("would take at least 1,000.0 TB of memory; the machine has ")
