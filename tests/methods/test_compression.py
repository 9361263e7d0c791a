"""Compressed updates: what is sent of an update, its bytes, and what is kept for later."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods import compression
from methods.compression import (
    drawn_of,
    largest_of,
    packed_bytes,
    power_sgd,
    qsgd,
    quantised,
    random_k,
    scaled_signs,
    sign,
    sign_majority,
    signs_of,
    top_k,
)
from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.method import Update
from raysim.core.seeding import torch_generator
from tests.support.federations import plan_of, server_on, updates_of

NETWORK = torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.Linear(10, 7))
LAYOUT, HALF = layout_of(NETWORK, head="1"), layout_of(NETWORK, head="1", shared=["0.weight", "0.bias"])
SIZE = LAYOUT.num_params

METHODS = {"top_k": top_k(share=0.1), "random_k": random_k(share=0.1), "sign": sign(), "power_sgd": power_sgd(rank=1)}
#: Without a memory: unbiased, or one vote.
FORGETFUL = {
    "random_k": random_k(share=0.1, error_feedback=False),
    "qsgd": qsgd(levels=3, bucket=20),
    "sign_majority": sign_majority(),
}


def client_of(seed=0, layout=LAYOUT):
    return SimpleNamespace(layout=layout, memory={}, generator=torch_generator(seed))


def normal(seed=0, size=SIZE):
    return torch.randn(size, generator=torch_generator(seed))


# --- naive twins --------------------------------------------------------------------------------------------------------------


def naive_top(values, count):
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))[:count]
    return [value if i in order else 0.0 for i, value in enumerate(values)]


def naive_sign(values):
    scale = sum(abs(v) for v in values) / len(values)
    return [math.copysign(scale, v) for v in values]


@pytest.mark.parametrize("layout", [LAYOUT, HALF], ids=["whole", "personal"])
@pytest.mark.parametrize("name", ["top_k", "sign"])
def test_what_is_sent_is_the_naive_twins_over_rounds(name, layout):
    """Error feedback with lists: c = C(u + e), e+ = u + e - c, over the shared entries."""
    client, shared = client_of(layout=layout), sum(leaf.size for leaf in layout.shared)
    error = [0.0] * shared
    for index in range(4):
        update = normal(index)
        sent, size = METHODS[name].outgoing(Update(update, 0), client)
        wanted = [float(u) + e for u, e in zip(update, error, strict=False)]
        count = round(0.1 * shared)
        told = naive_top(wanted, count) if name == "top_k" else naive_sign(wanted)
        error = [w - c for w, c in zip(wanted, told, strict=True)]
        torch.testing.assert_close(sent[:shared], torch.tensor(told), atol=1e-5, rtol=1e-5)
        assert not sent[shared:].any()
        assert size == (8 * count if name == "top_k" else 4 + math.ceil(shared / 8))


def test_qsgd_sends_levels_of_the_bucket_norm_next_to_the_entry():
    values, levels, bucket = normal(size=70).double(), 5, 16
    values[[3, 40]] = 0
    sent, _ = quantised(values.float(), torch_generator(1), levels=levels, bucket=bucket)
    for i, (v, q) in enumerate(zip(values.tolist(), sent.tolist(), strict=True)):
        first = i - i % bucket
        norm = math.sqrt(sum(float(w) ** 2 for w in values[first : first + bucket]))
        exact, level = levels * v / norm, levels * q / norm
        assert abs(level - round(level)) < 1e-5
        assert abs(level - exact) < 1
        assert level * v >= 0


def test_power_sgd_is_the_papers_subspace_iteration():
    """P = orth(M Q) by Gram-Schmidt, Q = M' P, with Q of the round before and what was not sent."""
    client, rank, layer = client_of(), 2, LAYOUT.by_name["0.weight"]
    method, basis, error = power_sgd(rank=rank), None, np.zeros(layer.shape)
    for index in range(3):
        update = normal(index)
        drawn = torch.randn(12, rank, generator=torch_generator(0)).double().numpy()  # the first draw of the client
        matrix = LAYOUT.view(update, layer).double().numpy() + error
        left = matrix @ (drawn if basis is None else basis)
        for column in range(rank):
            for before in range(column):
                left[:, column] -= left[:, before] @ left[:, column] * left[:, before]
            left[:, column] /= np.sqrt(np.sum(left[:, column] ** 2))
        basis = matrix.T @ left
        error = matrix - left @ basis.T
        sent, size = method.outgoing(Update(update, 0), client)
        np.testing.assert_allclose(LAYOUT.view(sent, layer).numpy(), left @ basis.T, atol=1e-4)
        basis = np.asarray(client.memory["bases"]["0.weight"], np.float64)  # the sign of a column is the library's
        np.testing.assert_allclose(LAYOUT.view(sent, "0.bias"), LAYOUT.view(update, "0.bias"), atol=1e-6)
        assert size == 4 * (rank * (10 + 12) + 10 + rank * (7 + 10) + 7)


def test_power_sgd_comes_to_the_best_matrix_of_that_rank():
    client, update = client_of(), normal()
    method = power_sgd(rank=2, error_feedback=False)
    for _ in range(400):
        sent, _ = method.outgoing(Update(update, 0), client)
    matrix = LAYOUT.view(update, "0.weight")
    u, s, vh = torch.linalg.svd(matrix)
    torch.testing.assert_close(LAYOUT.view(sent, "0.weight"), u[:, :2] * s[:2] @ vh[:2], atol=1e-3, rtol=1e-3)
    assert "error" not in client.memory


def test_power_sgd_finds_its_basis_again_after_an_update_of_0():
    """From a basis of 0 the first axes would be taken, and a matrix without entries there, such as rows of tokens, never sent."""
    client, method = client_of(), power_sgd(rank=1, error_feedback=False)
    matrix = torch.outer(torch.arange(10.0), normal(size=12))
    update = torch.cat([matrix.flatten(), torch.zeros(SIZE - matrix.numel())])
    method.outgoing(Update(torch.zeros(SIZE), 0), client)
    sent, _ = method.outgoing(Update(update, 0), client)
    torch.testing.assert_close(sent, update, atol=1e-5, rtol=1e-5)


# --- properties -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qsgd", "random_k"])
def test_the_mean_over_the_draws_is_the_update(name):
    """4,000 draws: every entry within 5 of its own standard errors."""
    values, client = normal(), client_of()
    draws = torch.stack([FORGETFUL[name].outgoing(Update(values, 0), client)[0] for _ in range(4000)]).double()
    errors = draws.std(dim=0) / math.sqrt(4000)
    assert bool(((draws.mean(dim=0) - values).abs() <= 5 * errors + 1e-6).all())
    assert float(errors.max()) > 0
    if name == "random_k":  # k/d of the entries, d/k times as long: d/k - 1 of ||u||^2 is its variance
        share = round(0.1 * SIZE) / SIZE
        spread = (draws - values).square().sum(dim=1).mean() / values.square().sum()
        assert float(spread) == pytest.approx(1 / share - 1, rel=0.1)
    else:  # lemma 3.1, bucket by bucket
        spread = (draws - values).square().sum(dim=1).mean() / values.square().sum()
        assert float(spread) <= min(20 / 3**2, math.sqrt(20) / 3)


def test_top_k_leaves_no_more_than_one_minus_the_share():
    for seed in range(20):
        values = normal(seed) ** (1 + seed % 3)
        left = values - largest_of(values, 0.25)[0]
        assert float(left.square().sum()) <= (1 - round(0.25 * SIZE) / SIZE) * float(values.square().sum())
    flat = torch.ones(40)  # the bound is reached
    assert float((flat - largest_of(flat, 0.25)[0]).sum()) == 30


def test_scaled_signs_leave_what_the_paper_says():
    """Karimireddy et al. 2019, the density of a vector: 1 - ||v||_1^2 / (d ||v||_2^2) of the squared length."""
    values = normal()
    left = values - scaled_signs(values, torch_generator(0))[0]
    density = float(values.abs().sum() ** 2 / (SIZE * values.square().sum()))
    assert float(left.square().sum() / values.square().sum()) == pytest.approx(1 - density, rel=1e-4)


def test_the_sign_of_0_is_drawn():
    values = torch.cat([torch.zeros(4000), torch.full((10,), 2.0), torch.full((10,), -2.0)])
    sent, _ = signs_of(values, torch_generator(0))
    assert abs(float(sent[:4000].mean())) < 5 / math.sqrt(4000)
    assert torch.equal(sent[4000:], values[4000:] / 2)


@pytest.mark.parametrize("layout", [LAYOUT, HALF], ids=["whole", "personal"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_and_what_is_kept_sum_to_all_updates(name, layout):
    client, total, sent = client_of(layout=layout), torch.zeros(SIZE), torch.zeros(SIZE)
    for index in range(12):
        update = normal(index)
        total += layout.zero_personal_(update.clone())
        sent += METHODS[name].outgoing(Update(update, 0), client)[0]
    torch.testing.assert_close(sent + client.memory["error"], total, atol=1e-4, rtol=0)
    assert float((sent - total).norm()) > 0.1


def test_with_error_feedback_a_constant_update_arrives_and_without_it_does_not():
    update, mean = normal(), {}
    for error_feedback in (True, False):
        method, client = top_k(share=0.1, error_feedback=error_feedback), client_of()
        mean[error_feedback] = sum(method.outgoing(Update(update, 0), client)[0] for _ in range(200)) / 200
    assert float((mean[True] - update).norm()) < 0.1 * float(update.norm())
    assert float((mean[False] - update).norm()) > 0.5 * float(update.norm())


@pytest.mark.parametrize("name", FORGETFUL)
def test_methods_without_a_memory_keep_nothing(name):
    client = client_of()
    FORGETFUL[name].outgoing(Update(normal(), 0), client)
    assert client.memory == {}
    assert "client-memory" not in FORGETFUL[name].needs


@pytest.mark.parametrize("name", ["top_k", "random_k", "power_sgd"])
def test_all_of_an_update_is_that_update(name):
    method = power_sgd(rank=99) if name == "power_sgd" else getattr(compression, name)(share=1.0)
    sent, _ = method.outgoing(Update(normal(), 0), client_of())
    torch.testing.assert_close(sent, normal(), atol=0, rtol=0)


@pytest.mark.parametrize("name", [*METHODS, "qsgd"])
def test_an_update_of_0_is_sent_as_0(name):
    method = METHODS.get(name) or FORGETFUL[name]
    sent, _ = method.outgoing(Update(torch.zeros(SIZE), 0), client_of())
    assert not sent.any()


# --- bytes ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 64, 501])
def test_packed_codes_take_the_fewest_whole_bytes(width, count):
    assert packed_bytes(count, width) == np.packbits(np.zeros(count * width, bool)).nbytes


def test_bytes_are_those_of_the_encoded_form():
    """Places are int32, values float32, a seed int64, codes packed bits."""
    values, generator = normal(size=1000), torch_generator(0)
    assert largest_of(values, 0.05)[1] == 50 * (4 + 4)
    assert drawn_of(values, generator, share=0.05, is_unbiased=False)[1] == 50 * 4 + 8
    assert quantised(values, generator, levels=7, bucket=512)[1] == 500 + 2 * 4  # 15 values: 4 bits
    assert quantised(values, generator, levels=1, bucket=512)[1] == 250 + 2 * 4
    assert scaled_signs(values, generator)[1] == 125 + 4
    assert signs_of(values, generator)[1] == 125


def test_sparse_updates_keep_their_entries_and_the_draws_decide_which():
    values = normal()
    drawn, again, other = (
        drawn_of(values, torch_generator(seed), share=0.2, is_unbiased=False)[0] for seed in (3, 3, 4)
    )
    for sent in (drawn, largest_of(values, 0.2)[0]):
        assert int((sent != 0).sum()) == round(0.2 * SIZE)
        assert torch.equal(sent[sent != 0], values[sent != 0])
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)


# --- in a federation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_sign_majority_is_a_vote_of_the_participants(root, norm):
    plan = plan_of(root, [{"sign_majority": {"server_lr": 0.01}}], model={"norm": norm}, cohort={"size": 6})
    server, plain = server_on(plan, root), server_on(plan_of(root, model={"norm": norm}, cohort={"size": 6}), root)
    before, size = server.params.clone(), server.layout.num_params
    record = server.run_round(0)
    plain.run_round(0)
    updates = torch.stack([*updates_of(plain).values()])[:, :size]
    votes, nobody = updates.sign().sum(0), updates.eq(0).any(0)
    moved = (server.params - before) / 0.01
    torch.testing.assert_close(moved[~nobody], votes.sign()[~nobody], atol=1e-4, rtol=0)
    assert bool((votes[~nobody] == 0).any())  # ties of six, which move nothing
    assert bool((moved.abs() < 1.0001).all())
    buffers = 4 * sum(leaf.size for leaf in server.layout.shared if leaf.is_buffer)
    assert record.metrics["comm/up_mb"] == pytest.approx(6 * (math.ceil(size / 8) + buffers) / 1e6)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["sign_majority", "fedvg"], "sign_majority and fedvg both decide weights"),
        (["fedavgm", "sign_majority"], "put sign_majority before fedavgm"),
    ],
)
def test_what_cannot_be_is_one_clear_error(root, methods, words):
    with pytest.raises(ConfigError, match=words) as caught:
        plan_of(root, methods)
    assert len(caught.value.faults) == 1
