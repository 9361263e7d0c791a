"""Compressed downlink: the rounding, its bytes, and what the server keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from methods.quantised_broadcast import quantised_broadcast, rounded
from raysim.base.errors import ConfigError
from raysim.core.method import Message
from raysim.core.seeding import torch_generator
from tests.support.federations import plan_of, probe, server_on, server_with, updates_of


def test_rounding_by_hand():
    values = torch.tensor([-1.0, 0.0, 0.5, 2.0])  # two bits: levels -1, 0, 1, 2
    seen = {tuple(rounded(values, 2, torch_generator(seed))[0].tolist()) for seed in range(40)}
    assert seen == {(-1.0, 0.0, 0.0, 2.0), (-1.0, 0.0, 1.0, 2.0)}


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_rounding_has_no_bias_and_moves_no_value_by_a_level(bits):
    values = torch.randn(50, generator=torch_generator(0))
    generator, level = torch_generator(1), float(values.max() - values.min()) / (2**bits - 1)
    draws = torch.stack([rounded(values, bits, generator)[0] for _ in range(3000)]).double()
    assert float((draws - values).abs().max()) < level * (1 + 1e-5)
    assert float((draws.mean(dim=0) - values).abs().max()) < 4.5 * level / 2 / 3000**0.5


def test_a_constant_leaf_is_sent_as_it_is():
    assert rounded(torch.full((5,), 0.3), 4, torch_generator(0))[0].tolist() == [pytest.approx(0.3)] * 5


@pytest.mark.parametrize("bits", [4, 8])
def test_clients_start_from_the_rounded_model_and_the_server_keeps_the_whole_one(root, bits):
    starts = []

    def server_update(update, state, server):
        starts.append((server.start, server.params))
        return update, state

    server = server_with(root, probe(server_update=server_update), [{"quantised_broadcast": {"bits": bits}}])
    method = quantised_broadcast(bits=bits)
    state = method.init(server.params, server.layout)
    for index in range(2):
        before = server.params.clone()
        sent = method.broadcast(
            Message(before, {}), {**state, "seed": server.method_state["quantised_broadcast"]["seed"]}
        )
        record = server.run_round(index)
        start, kept = starts[index]
        assert torch.equal(start, sent.params)
        assert not torch.equal(start, before)
        assert torch.equal(kept, before)
        updates = torch.stack([*updates_of(server).values()])[:, : len(before)].double()
        weights = torch.from_numpy(record.clients["weight"])
        torch.testing.assert_close(server.params, before + (weights @ updates).float())
    assert starts[0][0].ne(starts[1][0]).any()


@pytest.mark.parametrize("bits", [2, 8])
def test_downlink_counts_the_encoded_parameters(root, bits):
    plain = server_on(plan_of(root, []), root)
    server = server_on(plan_of(root, [{"quantised_broadcast": {"bits": bits}}]), root)
    whole, encoded = (each.run_round(0).metrics for each in (plain, server))
    wanted = sum(-(-leaf.size * bits // 8) + 8 for leaf in server.layout.params)
    saved = (whole["comm/down_mb"] - encoded["comm/down_mb"]) * 1e6 / 7  # clients of a round
    assert saved == pytest.approx(4 * server.layout.num_params - wanted)
    assert encoded["comm/up_mb"] == whole["comm/up_mb"]


def test_with_all_levels_of_a_byte_the_model_learns_as_without(root):
    moves = []
    for methods in ([], ["quantised_broadcast"]):
        server = server_on(plan_of(root, methods), root)
        before = server.params.clone()
        server.run_round(0)
        moves.append((server.params - before).numpy())
    assert np.corrcoef(*moves)[0, 1] > 0.99


def test_what_moves_the_broadcast_point_is_refused_beside_it(root):
    with pytest.raises(ConfigError, match="both decide broadcast-point"):
        plan_of(root, ["fedacg", "quantised_broadcast"])
