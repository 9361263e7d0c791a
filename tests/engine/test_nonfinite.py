"""The sentence for an update that is not finite says where the first such number came from, and nothing else is blamed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from raysim import Method
from raysim.base.errors import RaysimError
from raysim.core.method import Vector
from tests.support.runs import a_plan, quietly

HERE = "tests.engine.test_nonfinite"


def is_dark(images):
    """Whether these are images of the set, and not the random pixels that raysim tries such code with before a run."""
    return bool(images.mean() < 0.4)


class Network(nn.Module):
    def __init__(self, inputs: int, classes: int, act: str):
        super().__init__()
        self.fc, self.act = nn.Linear(inputs, classes), act

    def forward(self, x):
        logits = self.fc(x.flatten(1))
        if is_dark(x) and self.act == "log":
            return torch.log(logits - 1e6)
        return logits + torch.sqrt(logits * 0) if self.act == "root" else logits  # whose derivative at 0 is not finite


def network(num_classes, input_shape, *, act: str = "none"):
    return Network(int(np.prod(input_shape)), num_classes, act)


def augment(images, *, factor: float):
    return images * factor if is_dark(images) else images


def loss_of_nan():
    return Method("loss_of_nan", loss=lambda inner, client: lambda outputs, batch: inner(outputs, batch) * torch.nan)


def sends_nan():
    return Method("sends_nan", broadcast=lambda message, state: message._replace(params=message.params * torch.nan))


def reports_nan():
    return Method("reports_nan", report=lambda client: {"v": Vector(torch.full_like(client.params, torch.nan))})


OWN = {"name": f"{HERE}:network"}
MLP = {"name": "mlp"}


def augmented(factor):
    return {"model": MLP, "data": {"augment": {f"{HERE}:augment": {"factor": factor}}}}


@pytest.mark.parametrize(
    ("methods", "groups", "words"),
    [
        ([], augmented(1e39), "its inputs, at local step 1: look at the augmentation, or"),
        ([], augmented(3e38), "its loss, at local step 1: look at the model, at the size of the inputs"),
        ([], {"model": {**OWN, "act": "log"}}, "its loss, at local step 1: look at the model"),
        (
            [],
            {"model": {**OWN, "act": "root"}},
            r"its gradient of fc\.weight, at local step 1: look for a non-finite derivative",
        ),
        (
            ["fedprox", f"{HERE}:loss_of_nan"],
            {},
            "its loss, at local step 1: look at the model, .* and at the losses of the methods",
        ),
        (
            [{"tests.support.toys:poison": {"client": 0}}],
            {},
            r"its gradient of \S+, at local step 1: .* and at the gradients of the methods",
        ),
        ([f"{HERE}:sends_nan"], {}, "the server's message.*: check the methods that change the message"),
        ([f"{HERE}:reports_nan"], {}, "is finite, but its report reports_nan/v is not: look at the method's report"),
        ([], {"model": MLP, "local": {"lr": 1e30}}, r"at local step \d+: lower local\.lr"),
        ([], {"model": MLP, "local": {"lr": 1e30, "momentum": 0.9, "batch_size": 4}}, r"step \d+: lower local\.lr"),
    ],
)
def test_the_first_number_that_is_not_finite_is_named(methods, groups, words, root, tmp_path):
    plan = a_plan(root, tmp_path, methods, partition={"num_clients": 1}, cohort={"size": 1}, **groups)
    with pytest.raises(RaysimError, match=rf"all 1 clients in round 1\. .*client 0.*{words}") as caught:
        quietly(plan)
    assert ("local.lr" in str(caught.value)) == ("local" in groups)
