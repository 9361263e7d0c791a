"""What clients send, who waits for the others, and functions of all updates: each against the same done by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from raysim.base.errors import RaysimError
from raysim.core.cohorts import choose_cohort
from raysim.core.method import Crowd, Method, Update
from raysim.core.seeding import derive_seed, torch_generator
from raysim.engine.cohort import column_cuts
from raysim.training.local import train_locally
from tests.support.federations import plan_of, probe, run, server_on, server_with, updates_of
from tests.support.method_cases import ASYNCHRONOUS, CNN_CASES, names_of
from tests.support.toys import copies_the_others, middle_of_all

MEDIAN = "tests.support.toys:middle_of_all"
COPIES = "tests.support.toys:copies_the_others"


def test_what_is_sent_is_summed_and_what_reports_see(root):
    """Turned around and halved: the server moves by minus a half of FedAvg's step, and reports are of that model."""
    seen = {}

    def report(client):
        seen[client.id] = client.params.clone() - client.start
        return {}

    half = probe(outgoing=lambda update, client: update._replace(values=update.values * -0.5), report=report)
    plain, turned = server_on(plan_of(root), root), server_with(root, half)
    began, size = plain.state.clone(), plain.layout.num_params
    plain.run_round(0)
    turned.run_round(0)
    torch.testing.assert_close(turned.params - began[:size], -0.5 * (plain.params - began[:size]), atol=1e-7, rtol=1e-5)
    assert len(seen) == 7
    for client, update in updates_of(turned).items():
        torch.testing.assert_close(seen[client], update[:size], atol=1e-6, rtol=0)
        torch.testing.assert_close(update[:size], -0.5 * updates_of(plain)[client][:size], atol=0, rtol=0)


def double():
    return Method("double", outgoing=lambda update, client: update._replace(values=2 * update.values))


def add():
    return Method("add", outgoing=lambda update, client: update._replace(values=update.values + 1))


def test_hooks_compose_in_the_order_of_the_list(root):
    def sent(*names):
        server = server_on(plan_of(root, [f"tests.engine.test_outgoing:{name}" for name in names]), root)
        server.run_round(0)
        return updates_of(server)

    first, second, plain = sent("double", "add"), sent("add", "double"), sent()
    size = server_on(plan_of(root), root).layout.num_params
    for client, update in plain.items():
        assert torch.equal(first[client][:size], 2 * update[:size] + 1)
        assert torch.equal(second[client][:size], 2 * (update[:size] + 1))


def test_bytes_are_those_of_the_encoded_form(root):
    server = server_with(root, probe(outgoing=lambda update, client: update._replace(num_bytes=100)))
    plain = server_on(plan_of(root), root)
    record, before = server.run_round(0), plain.run_round(0)
    assert before.metrics["comm/up_mb"] == pytest.approx(7 * plain.layout.shared_bytes / 1e6)
    assert record.metrics["comm/up_mb"] == pytest.approx(7 * 100 / 1e6)


def test_buffers_go_as_they_are_and_personal_layers_stay(root):
    gone = probe(outgoing=lambda update, client: Update(torch.zeros_like(update.values), 0))
    server = server_with(root, gone, [{"personal": {"layers": ["fc2"]}}], model={"norm": "batch"})
    before = server.state.clone()
    record = server.run_round(0)
    size = server.layout.num_params
    assert torch.equal(server.params, before[:size])
    assert not torch.equal(server.buffers, before[size:])
    buffers = 4 * sum(leaf.size for leaf in server.layout.shared if leaf.is_buffer)
    assert record.metrics["comm/up_mb"] == pytest.approx(7 * buffers / 1e6)
    kept = [memory["raysim"]["fc2.weight"] for memory in server._memories.values() if memory]
    start = server.layout.view(before, "fc2.weight").numpy()
    assert len(kept) == 7
    assert all(not np.array_equal(values, start) for values in kept)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda update, client: update.values, "its outgoing returned Tensor, not a update"),
        (lambda update, client: update._replace(values=update.values[:3]), r"shape \(3,\)"),
    ],
)
def test_a_slip_is_named(root, hook, words):
    with pytest.raises(RaysimError, match=words):
        server_with(root, probe(outgoing=hook)).run_round(0)


@pytest.mark.parametrize("method", ["sign_majority", {"random_k": {"share": 0.01}}], ids=str)
def test_no_encoding_hides_an_update_that_is_not_finite(root, method):
    """One entry of one client is NaN: a sign would send it as -1, and a draw would leave it where it is."""
    one_step = {"cohort": {"size": 12}, "local": {"batch_size": 500}}

    def grads(inner, client):
        def gradient(params, batch):
            found = inner(params, batch)
            found[:1] = found[:1] if client.id else torch.nan
            return found

        return gradient

    server = server_with(root, probe(grads=grads), [method], on_nonfinite="skip", **one_step)
    assert [server.run_round(index).metrics["clients/dropped"] for index in range(2)] == [1, 1]
    server = server_with(root, probe(grads=grads), [method], **one_step)
    with pytest.raises(RaysimError, match=r"non-finite update of client 0 .*at the gradients of the methods"):
        server.run_round(0)


# --- functions of all updates ---------------------------------------------------------------------------------------------


def test_columns_hold_every_update_in_client_order(root):
    server = server_with(root, middle_of_all())
    before = server.params.clone()
    record = server.run_round(0)
    rows = torch.stack([*updates_of(server).values()])[:, : len(before)]
    torch.testing.assert_close(server.params, before + rows.median(dim=0).values, atol=0, rtol=0)
    products = record.arrays["middle_of_all.products"]
    assert products.shape == (8, 8)
    np.testing.assert_allclose(products[:7, :7], (rows.double() @ rows.double().T).numpy(), rtol=1e-12)


def test_of_nobody_columns_have_no_rows(root, nobody_comes):
    shapes = []

    def server_update(update, state, server):
        shapes.extend(server.map_columns(_shapes, None, update[None]))
        return update, state

    server = server_with(root, probe(server_update=server_update), cohort={"sampling": "poisson"})
    server.run_round(0)
    widths = [end - start for start, end in column_cuts(server.layout.num_params, 0)]
    assert shapes == [((0, width), (1, width)) for width in widths]


def _shapes(block, extra, shared):
    return tuple(block.shape), tuple(extra.shape)


def test_blocks_cover_all_columns_and_stay_small():
    for size, clients in [(1, 1), (4097, 3), (197_386, 100), (11_000_000, 100), (90_000_000, 1000)]:
        cuts = column_cuts(size, clients)
        assert cuts[0].start == 0
        assert cuts[-1].end == size
        assert all(one.end == two.start for one, two in pairwise(cuts))
        assert max(cut.end - cut.start for cut in cuts) * clients <= 2**24


@pytest.mark.slow
@pytest.mark.parametrize("methods", [[MEDIAN], [COPIES, "scaffold", {"fedvg": {"granularity": "block"}}]])
def test_any_number_of_trainers_gives_the_same_bits(root, ray_pools, methods):
    plan = plan_of(root, methods, model={"norm": "batch"}, rounds=2)

    def outcome(pool=None):
        server = server_on(plan, root, pool)
        arrays = [server.run_round(index).arrays for index in range(2)]
        return server.params_sha256(), [array.tobytes() for each in arrays for array in each.values()]

    expected = outcome()
    assert [outcome(pool) for pool in ray_pools(plan)] == [expected] * 3


# --- who waits for the others ---------------------------------------------------------------------------------------------


def test_latecomers_know_what_the_others_sent(root):
    server = server_with(root, copies_the_others())
    record = server.run_round(0)
    clients, updates, size = record.clients["client"], updates_of(server), server.layout.num_params
    late = set(Crowd(12, server.crowd("copies_the_others").seed).drawn(0.4).tolist()) & set(clients.tolist())
    others = [client for client in clients.tolist() if client not in late]
    assert late
    assert len(others) > 2
    sizes = torch.tensor([float(server.federation.sizes[client]) for client in others], dtype=torch.float64)
    rows = torch.stack([updates[client][:size].double() for client in others])
    mean = (sizes / sizes.sum()) @ rows
    for client in late:
        torch.testing.assert_close(updates[client][:size].double(), -mean, atol=1e-6, rtol=1e-4)
    # Blocks of both waves are told apart in the records, and nobody is there twice.
    blocks = dict(zip(clients.tolist(), record.clients["block"].tolist(), strict=True))
    assert not {blocks[client] for client in late} & {blocks[client] for client in others}
    assert len(set(clients.tolist())) == 7


def test_where_everybody_waits_nobody_knows_anything(root):
    server, plain = server_with(root, copies_the_others(share=1.0)), server_on(plan_of(root), root)
    server.run_round(0)
    plain.run_round(0)
    torch.testing.assert_close(server.params, plain.params, atol=1e-6, rtol=1e-5)


def test_the_same_clients_are_drawn_in_every_round():
    crowd = Crowd(1000, 5)
    assert len(crowd.drawn(0.2)) == 200
    assert torch.equal(crowd.drawn(0.2), Crowd(1000, 5).drawn(0.2))
    assert not torch.equal(crowd.drawn(0.2), Crowd(1000, 6).drawn(0.2))
    assert len(crowd.drawn(0.0)) == 0


# --- cohorts of varying size ----------------------------------------------------------------------------------------------


def test_each_client_takes_part_with_the_chance_of_its_share():
    turns = [choose_cohort(50, 10, seed=4, round_index=index, sampling="poisson") for index in range(4000)]
    sizes = np.array([len(turn) for turn in turns])
    # Binomial(50, 0.2): mean 10, variance 8; five standard errors of 4,000 draws.
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(8 / 4000)
    assert abs(sizes.var() - 8) < 5 * 8 * np.sqrt(2 / 4000)
    chances = np.bincount(np.concatenate(turns), minlength=50) / 4000
    assert abs(chances - 0.2).max() < 5 * np.sqrt(0.16 / 4000)
    # Whether two take part is independent: together in a share of 0.04.
    together = np.mean([{3, 17} <= set(turn.tolist()) for turn in turns])
    assert abs(together - 0.04) < 5 * np.sqrt(0.04 * 0.96 / 4000)


#: With dp a round of nobody is noise; an asynchronous round waits for updates.
CAN_BE_EMPTY = [
    name for name in CNN_CASES if not name.startswith("dp") and not names_of(CNN_CASES[name]) & ASYNCHRONOUS
]


@pytest.mark.parametrize("name", CAN_BE_EMPTY)
def test_a_round_of_nobody_moves_nothing(root, name, nobody_comes):
    server = server_on(plan_of(root, CNN_CASES[name], model={"norm": "batch"}, cohort={"sampling": "poisson"}), root)
    before = server.state.clone()
    record = server.run_round(0)
    assert torch.equal(server.state, before)
    assert record.metrics["clients/dropped"] == 1
    assert not any(server._memories.values())


def test_poisson_cohorts_differ_from_fixed_ones(root):
    plan = plan_of(root, cohort={"sampling": "poisson"})
    server = server_on(plan, root)
    sizes = [len(server.run_round(index).clients["client"]) for index in range(3)]
    assert len(set(sizes)) > 1
    assert run(plan, root).params_sha256() != run(plan_of(root), root).params_sha256()


# --- at the server's data -------------------------------------------------------------------------------------------------


def test_the_update_on_the_validation_set_is_that_of_a_client_with_these_rows(root):
    found = []

    def server_update(update, state, server):
        found.append(server.validation_update())
        return update, state

    server = server_with(root, probe(server_update=server_update, needs=frozenset({"validation-set"})))
    trainer, began = server.pool._trainer, server.state.clone()
    server.run_round(0)
    trainer.model.load(began, {})
    examples, settings = trainer.data.held_out("validation"), server.phases[0].settings
    generator = torch_generator(derive_seed(server.seed, "server/validation", 0))
    how = {"lr": settings.lr, "generator": generator}
    steps, _ = train_locally(trainer.model, trainer.model.criterion, None, examples, trainer.transform, settings, **how)
    assert steps > 1
    wanted = trainer.model.params - began[: server.layout.num_params]
    torch.testing.assert_close(found[0], wanted, atol=1e-7, rtol=0)


def test_a_function_of_test_batches_sees_the_global_model(root):
    right = []

    def override(state, server):
        counts = server.map_test(_right, None)
        right.append(sum(count for count, _ in counts) / sum(rows for _, rows in counts))
        return {}

    server = server_with(root, probe(evaluation_override=override))
    record = server.run_round(0)
    assert right == [pytest.approx(record.metrics["server/accuracy"], abs=1e-12)]


def _right(model, batch, shared):
    found = model.module(batch.inputs).argmax(1) == batch.targets
    return int(found.sum()), len(found)
