"""Seeds: one for each run, purpose, round and client."""

from __future__ import annotations

from itertools import product

from raysim.core.seeding import derive_seed


def test_a_seed_depends_on_each_of_its_arguments():
    seeds = {derive_seed(*each) for each in product((0, 1), ("cohort", "batches"), (0, 1, 11), (0, 1, 11))}
    assert len(seeds) == 36
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_stay_what_they_were():
    """Twins take their seeds from the same function: only this number tells another one."""
    assert derive_seed(3, "batches", 1, 2) == 749071318767424386
