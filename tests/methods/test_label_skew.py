"""FedRS and FedLC: their property checks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods.fedlc import fedlc
from methods.fedrs import fedrs
from raysim.core.method import Batch, Outputs
from raysim.training.tasks import cross_entropy
from tests.support.federations import plan_of, run, server_on

COUNTS = torch.tensor([0, 4, 1, 16])


def client_of(counts=COUNTS, bias=True):
    torch.manual_seed(0)
    head = nn.Linear(5, len(counts), bias=bias)
    module = nn.ModuleDict({"fc": head})
    return SimpleNamespace(class_counts=counts, head="fc", model=SimpleNamespace(module=module)), head


def data(n=6, classes=(1, 2, 3)):
    z = torch.randn(n, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([classes[i % len(classes)] for i in range(n)])
    return z, Batch(z, labels)


# --- FedRS ------------------------------------------------------------------------------------------------------------


def test_fedrs_with_alpha_1_or_every_class_present_is_plain_cross_entropy(root):
    digest = run(plan_of(root), root, rounds=1).params_sha256()
    assert run(plan_of(root, [{"fedrs": {"alpha": 1}}]), root, rounds=1).params_sha256() == digest
    iid = {"partition": {"scheme": "iid", "num_clients": 12}}
    digest = run(plan_of(root, **iid), root, rounds=1).params_sha256()
    assert run(plan_of(root, ["fedrs"], **iid), root, rounds=1).params_sha256() == digest


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_the_head_match_the_closed_form(bias):
    client, head = client_of(bias=bias)
    z, batch = data()
    loss = fedrs(alpha=0.3).loss(cross_entropy, client)
    loss(Outputs(head(z), z), batch).backward()
    scale = torch.tensor([0.3, 1, 1, 1])
    with torch.no_grad():
        logits = scale * (z @ head.weight.t()) + (head.bias if bias else 0)
        error = (logits.softmax(1) - F.one_hot(batch.targets, 4)) / len(z)
    assert torch.allclose(head.weight.grad, scale[:, None] * (error.t() @ z), atol=1e-6)
    if bias:
        assert torch.allclose(head.bias.grad, error.sum(0), atol=1e-6)


def test_an_absent_class_with_alpha_0_still_takes_its_share():
    client, head = client_of(bias=False)
    z, batch = data()
    value = fedrs(alpha=0).loss(cross_entropy, client)(Outputs(head(z), z), batch)
    kept = head(z).clone()
    kept[:, 0] = 0
    assert value.item() == pytest.approx(F.cross_entropy(kept, batch.targets).item())


# --- FedLC ------------------------------------------------------------------------------------------------------------


def test_fedlc_without_margin_is_plain_cross_entropy(root):
    digest = run(plan_of(root), root, rounds=1).params_sha256()
    assert run(plan_of(root, [{"fedlc": {"tau": 0}}]), root, rounds=1).params_sha256() == digest
    assert run(plan_of(root, ["fedlc"]), root, rounds=1).params_sha256() != digest


def test_equal_counts_shift_every_logit_alike():
    client, head = client_of(torch.tensor([7, 7, 7, 7]))
    z, batch = data()
    out = Outputs(head(z), z)
    assert torch.allclose(fedlc(tau=2.0).loss(cross_entropy, client)(out, batch), cross_entropy(out, batch))


def test_margins_are_the_fourth_root_of_the_counts():
    client, head = client_of()
    z, batch = data()
    out = Outputs(head(z), z)
    margin = torch.tensor([1e-8**-0.25, 4**-0.25, 1.0, 0.5]) * 0.3
    want = F.cross_entropy(out.logits - margin, batch.targets)
    assert torch.allclose(fedlc(tau=0.3).loss(cross_entropy, client)(out, batch), want)


def test_large_logits_do_not_overflow_and_constants_do_not_matter():
    client, head = client_of()
    z, batch = data()
    loss = fedlc().loss(cross_entropy, client)
    logits = head(z).detach()
    want = float(loss(Outputs(logits, z), batch))
    assert float(loss(Outputs(logits + 3, z), batch)) == pytest.approx(want, rel=1e-4)
    assert bool(torch.isfinite(loss(Outputs(logits * 1e5, z), batch)))


@pytest.mark.parametrize("name", ["fedrs", "fedlc"])
def test_evaluation_sees_plain_logits(name, root):
    plain, server = server_on(plan_of(root), root), server_on(plan_of(root, [name]), root)
    assert server.evaluate() == plain.evaluate()
    server.run_round(0)
    plain.state = server.state.clone()
    assert server.evaluate() == plain.evaluate()
