"""Feature shift in a run: what clients train on and what the server tests on are shifted, the same in every process."""

from __future__ import annotations

import torch

from raysim.plan.build import feature_shift, make_trainer
from tests.support.federations import plan_of, recipe_of, run

SHIFT = {"data": {"shift": {"noise": {"std": 0.5}}}}


def test_clients_and_held_out_rows_are_shifted(root):
    data = {"shift": {"noise": {"std": 0.5}}, "root": str(root), "validation": 0.1, "test": 0.2}
    plan = plan_of(root, data=data)
    trainer, plain = (make_trainer(recipe_of(p, root)) for p in (plan, plan_of(root, data={**data, "shift": "none"})))
    shift, last = feature_shift(plan.config), plan.config.num_clients - 1
    for client in (0, last):
        stored = plain.data.client(client).inputs
        shifted = trainer.data.client(client).inputs
        assert torch.equal(shifted, shift.of_client(stored, client))
        assert torch.equal(shifted.round(), stored.float()) == (client == 0)
    for name in ("test", "validation"):
        stored, shifted = (one.data.held_out(name).inputs for one in (plain, trainer))
        assert torch.equal(shifted, shift.of_held_out(stored, name, None))
        assert len(trainer.data.held_out(name)) == len(stored)


def test_a_shift_changes_the_run_and_its_seed_is_the_runs(root):
    plain, noisy = run(plan_of(root), root, rounds=1), run(plan_of(root, **SHIFT), root, rounds=1)
    assert not torch.equal(plain.params, noisy.params)
    # Not that of the partition: two runs of equal rows would differ, and a sweep takes them for one.
    assert feature_shift(plan_of(root, **SHIFT, partition={"seed": 7}).config).seed == noisy.seed != 7
