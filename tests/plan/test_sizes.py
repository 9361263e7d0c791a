"""What no memory holds is refused by the check, and so is own code whose numbers are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raysim.base.errors import ConfigError
from tests.support.federations import plan_of

VIT = {"name": "vit", "dim": 16, "depth": 1, "heads": 2, "patch": 4}


def net(num_classes, input_shape, *, factor: float = 1.0):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_classes)

        def forward(self, x):
            x = (x - x.mean()) / x.std()  # of zeros that would be NaN
            return self.fc(x.flatten(1)) * factor

    return Scaled()


def noisy(images, *, factor: float = 1.0):
    return (images - images.mean()) / images.std() * factor


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"model": {"name": "mlp", "hidden": 10**12}}, r"its parameters would take at least [\d,.]+ TB"),
        ({"model": {**VIT, "dim": 10**7}}, "its parameters would take at least"),
        ({"model": {**VIT, "depth": 10**7}}, "must be less than or equal to 2000"),
        ({"model": {**VIT, "lora": {"rank": 10**11}}}, r"adapters of rank 100000000000 would take at least"),
        ({"model": {"name": "resnet20", "depth": 6 * 10**6 + 2}}, "must be less than or equal to 2000"),
        (
            {"data": {"resize": 10**6}},
            r"data\.resize: a batch of 1 images of 1000000 x 1000000 would take at least 4\.0 TB",
        ),
        (
            {"data": {"resize": 20_000}, "local": {"batch_size": 512}},
            r"local\.batch_size: a batch of \d+ images of 20000",
        ),
        (
            {"data": {"stored_size": 10**6}},
            r"data\.stored_size: an image of shape \(1000000, 1000000, 1\) would take at least 5\.0 TB .* lower",
        ),
        ({"model": {"name": f"{__name__}:net", "factor": 1e39}}, "returns non-finite logits"),
        ({"data": {"augment": {f"{__name__}:noisy": {"factor": 1e39}}}}, r"data\.augment: .*non-finite images"),
    ],
)
def test_what_no_memory_holds_and_what_is_never_finite_is_refused(groups, words, root):
    if "data" in groups:
        groups = {**groups, "data": {"root": str(root), **groups["data"]}}
    with pytest.raises(ConfigError, match=f"(?i){words}"):
        plan_of(root, **groups)


def test_own_code_that_divides_by_an_images_deviation_is_fine(root):
    plan_of(root, model={"name": f"{__name__}:net"}, data={"root": str(root), "augment": f"{__name__}:noisy"})
    assert torch.isnan(noisy(torch.zeros(2, 2))).all()
