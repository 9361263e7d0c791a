"""Elastic aggregation: property checks, sampling, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.elastic import elastic, elasticity, output_norm, sample
from raysim.base.errors import MethodError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.core.weights import RightMap, normalised
from raysim.training.tasks import cross_entropy
from tests.support.federations import plan_of, run, server_on

LAYOUT = layout_of(torch.nn.Linear(2, 1), head="none")  # weight of 2, bias of 1
FORMS = {"element": {}, "clients": {"as_in": "fl-bench"}}


def server_with(omegas, shares):
    """A server's view in which client k reported omegas[k], elements or tensors."""
    rows = torch.tensor(omegas, dtype=torch.float64)
    weights = normalised(torch.tensor(shares, dtype=torch.float64))
    return SimpleNamespace(
        layout=LAYOUT,
        weights={leaf.name: weights for leaf in LAYOUT.params},
        report={"omega": rows},
        total=lambda name, given: torch.cat(
            [given[leaf.name] @ rows[:, leaf.offset : leaf.end] for leaf in LAYOUT.params]
        ),
        log=lambda *_: None,
    )


def factors(form, omegas, shares, tau=0.5):
    """[3]: what the method multiplies an update by."""
    step, _ = elastic(tau=tau, **FORMS[form]).server_update(torch.ones(3).double(), {}, server_with(omegas, shares))
    return step


def test_by_hand():
    assert factors("element", [[1, 2, 0], [3, 6, 4]], [1, 1]).tolist() == [1.0, 0.5, 1.0]  # Omega = 2, 4, 2
    assert factors("clients", [[1, 3], [3, 6]], [1, 1]).tolist() == [pytest.approx(1.5 - 2 / 3)] * 2 + [0.75]


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_do_not_sum_to_one_average_the_sensitivities_all_the_same(form):
    """FedNova's, for one: otherwise Omega would pass the largest Omega_k, and zeta fall below tau."""
    rows = [[1.0, 2.0, 0.5], [3.0, 6.0, 4.0]]
    rows = rows if form == "element" else [row[:2] for row in rows]
    server = server_with(rows, [1, 3])
    server.weights["weight"] = 2.5 * server.weights["weight"]
    step, _ = elastic(**FORMS[form]).server_update(torch.ones(3).double(), {}, server)
    assert torch.allclose(step, factors(form, rows, [1, 3]), rtol=1e-12)


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_equal_sensitivities_give_tau_in_both_readings_of_the_maximum(tau):
    assert factors("element", [[0.3] * 3] * 4, [1, 2, 3, 2], tau).tolist() == [tau] * 3
    # equal across clients is enough where the maximum is over clients
    assert factors("clients", [[0.3, 0.7]] * 4, [1, 2, 3, 2], tau).tolist() == [pytest.approx(tau, abs=1e-15)] * 3


numbers = st.lists(st.floats(0, 1e6), min_size=3, max_size=3)


@settings(deadline=None)
@given(omegas=st.lists(numbers, min_size=1, max_size=5), tau=st.floats(0, 2), data=st.data())
def test_zeta_lies_between_tau_and_1_plus_tau(omegas, tau, data):
    shares = data.draw(st.lists(st.floats(0.1, 10), min_size=len(omegas), max_size=len(omegas)))
    for form in FORMS:
        rows = omegas if form == "element" else [row[:2] for row in omegas]
        zeta = factors(form, rows, shares, tau)
        assert bool((zeta >= tau - 1e-12).all())
        assert bool((zeta <= 1 + tau + 1e-12).all())


def test_zeta_of_a_run_stays_in_its_range_and_is_logged(root):
    for options in FORMS.values():
        plan = plan_of(root, [{"elastic": options}, "fednova"], model={"norm": "batch"})
        record = server_on(plan, root).run_round(0)
        zeta = record.arrays["elastic.zeta"]
        assert 0.5 <= zeta.min() < zeta.max() <= 1.5
        assert record.arrays["elastic.zeta:columns"].tolist() == [leaf.name for leaf in plan.layout.params]


@settings(deadline=None)
@given(omegas=st.lists(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_scaling_all_sensitivities_changes_nothing(omegas):
    for form in FORMS:
        rows = omegas if form == "element" else [row[:2] for row in omegas]
        scaled = [[1e-4 * value for value in row] for row in rows]
        shares = [1.0] * len(rows)
        assert torch.allclose(factors(form, rows, shares), factors(form, scaled, shares), rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_where_nobody_moved_the_model_stays(form, root):
    plan = plan_of(root, ["tests.support.toys:stands_still", {"elastic": FORMS[form]}])
    server = server_on(plan, root)
    before = server.params_sha256()
    server.run_round(0)
    assert server.params_sha256() == before


def test_no_sensitivity_at_all_is_no_division_by_zero():
    for form, width in (("element", 3), ("clients", 2)):
        assert factors(form, [[0.0] * width] * 2, [1, 1]).tolist() == [1.5] * 3
    assert elasticity(torch.zeros(2), torch.zeros(()), 0.5).tolist() == [1.5, 1.5]


def client_of(count, batch_size, *, cuts):
    images = torch.arange(count)[:, None].float()
    batches = [Batch(x, x[:, 0].long()) for x in images.split(cuts)]
    return SimpleNamespace(
        num_examples=count,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
        batches=lambda: iter(batches),
    )


@pytest.mark.parametrize("cuts", [256, 10, 7])
@pytest.mark.parametrize(
    ("count", "ratio", "sizes"),
    [
        (40, 1.0, [8] * 5),
        (41, 1.0, [8] * 4 + [9]),
        (42, 1.0, [8] * 5 + [2]),
        (40, 0.3, [8, 4]),
        (3, 0.3, [2]),
        (1, 0.3, [1]),
    ],
)
def test_sample_has_the_clients_batch_size_whatever_the_passes_are(count, ratio, sizes, cuts):
    batches = list(sample(client_of(count, 8, cuts=cuts), ratio))
    assert [len(batch.targets) for batch in batches] == sizes
    seen = torch.cat([batch.targets for batch in batches]).tolist()
    assert seen == sorted(set(seen))
    again = torch.cat([batch.targets for batch in sample(client_of(count, 8, cuts=256), ratio)]).tolist()
    assert seen == again


def test_sensitivity_is_that_of_the_outputs_or_of_the_loss():
    layout = LAYOUT
    asked = []
    client = client_of(8, 4, cuts=8)
    client.layout, client.start, client.num_steps = layout, torch.zeros(layout.num_params), 1
    client.model = SimpleNamespace(
        criterion=cross_entropy, gradient=lambda loss, point, batch: asked.append(loss) or torch.ones_like(point)
    )
    for options in FORMS.values():
        elastic(sample_ratio=0.5, **options).report(client)
    assert asked == [output_norm, cross_entropy]


def test_sensitivity_is_taken_at_the_broadcast_point(root):
    """Not where training ended: a round without learning rate reports the same."""
    omegas = []
    for lr in (0.1, 1e-30):
        plan = plan_of(root, [{"elastic": {"as_in": "fl-bench"}}], local={"lr": lr}, model={"norm": "batch"})
        omegas.append(server_on(plan, root).run_round(0).arrays["elastic.zeta"])
    assert (omegas[0] == omegas[1]).all()


def test_weights_that_are_no_average_of_clients_are_refused():
    server = server_with([[1, 2, 3], [4, 5, 6]], [1, 1])
    server.weights["weight"] = RightMap(torch.eye(2).double().repeat(2, 1, 1) / 2)
    with pytest.raises(MethodError, match="weight is a linear map"):
        elastic().server_update(torch.ones(3), {}, server)
    server.weights["weight"] = torch.full((2, 1), 0.5, dtype=torch.float64)
    with pytest.raises(MethodError, match="one per row"):
        elastic(as_in="fl-bench").server_update(torch.ones(3), {}, server)


def test_elastic_leaves_buffers_and_personal_leaves_alone(root):
    """BatchNorm statistics are those of plain averaging from the same start."""
    plain, scaled = (run(plan_of(root, m, model={"norm": "batch"}), root, rounds=1) for m in ([], ["elastic"]))
    count = plain.layout.num_params
    assert torch.equal(plain.state[count:], scaled.state[count:])
    assert not torch.equal(plain.params, scaled.params)
    run(plan_of(root, ["tests.support.toys:personal_head", "elastic"]), root, rounds=2)
