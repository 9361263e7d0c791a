"""keep_factors changes nothing and logs what each client's adapters were."""

from __future__ import annotations

import pytest
import torch

from raysim.base.errors import ConfigError
from tests.support.federations import lora_plan, plan_of, server_on
from tests.twins.livar import NaiveLivar

FEW = {"data": {"test": 0.8}, "cohort": {"size": 3}, "rounds": 1}


@pytest.mark.slow
def test_kept_factors_are_the_clients_own_and_nothing_else_changes(root):
    plan = lora_plan(root, ["livar", "keep_factors"], **FEW)
    server, naive = server_on(plan, root), NaiveLivar(plan)
    record = server.run_round(0)
    plain = server_on(lora_plan(root, ["livar"], **FEW), root)
    plain.run_round(0)
    assert server.params_sha256() == plain.params_sha256()
    clients = record.arrays["keep_factors.blocks.1.mlp.fc2.a:clients"].tolist()
    models = [naive.train(client, 0)[0] for client in clients]
    for layer in naive.layers:
        for factor in "ab":
            want = torch.stack([naive.factor(model, layer, factor.upper()) for model in models])
            got = torch.from_numpy(record.arrays[f"keep_factors.{layer}.{factor}"])
            assert torch.allclose(got, want, atol=1e-5), (layer, factor)
    counts = [len(plan.manifest.clients[client]) for client in clients]
    assert record.arrays["keep_factors.num_examples"].tolist() == counts
    assert (record.arrays["keep_factors.num_steps"] == record.clients["num_steps"]).all()


def test_model_without_adapters_is_refused(root):
    with pytest.raises(ConfigError, match="lora"):
        plan_of(root, ["keep_factors"])
