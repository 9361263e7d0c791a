"""Models for tests: every name at a small size, their layouts, and batches that fit them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.models import ModelSpec, build_skeleton, find_architecture, head_of
from raysim.plan.check import check
from raysim.training.model import BoundModel

#: Every name, at a size that trains in a moment: (height and width, or length; options). ViT-B/16 is ViT-S/16 with other numbers.
TINY = {
    "cnn": (8, {"width": 4, "hidden": 8}),
    "lenet": (16, {}),
    "mlp": (8, {}),
    "univarfl_cnn": (21, {"norm": "group"}),  # biases in front of BatchNorm have no gradient
    "resnet18": (8, {}),
    "resnet20": (8, {"width": 4}),
    "resnet34": (8, {"norm": "group"}),
    "resnet50": (8, {"stem": "small"}),
    "mobilenetv2": (8, {"stem": "small", "width": 0.25, "dropout": 0.0}),
    "vit": (8, {"dim": 16, "depth": 2}),
    "vit_s16": (32, {}),
    "timm:test_vit": (32, {}),
    "test_resnet": (32, {}),
    "gru": (6, {"embedding": 4, "hidden": 8, "per": "sequence"}),
    "lstm": (6, {"embedding": 4, "hidden": 8, "per": "sequence"}),
    "gpt": (6, {"dim": 8, "depth": 2, "heads": 2, "per": "sequence"}),
}


def spec_of(name, size=None, channels=3, classes=10, pretrained=None, **options):
    architecture = find_architecture(name)
    side = size or architecture.size
    if architecture.inputs == "tokens":
        return ModelSpec(name, classes, (side,), options, pretrained, vocabulary=classes)
    return ModelSpec(name, classes, (side, side, channels), options, pretrained)


def layout(spec, blocks="residual"):
    return layout_of(build_skeleton(spec), head=head_of(spec), blocks=blocks)


def bound(module, head, *, channels_last=False, trained=None):
    return BoundModel(module, layout_of(module, head=head, channels_last=channels_last, trained=trained), head=head)


def batch_of(spec, count=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if spec.vocabulary:
        inputs = torch.randint(spec.vocabulary, (count, *spec.input_shape), generator=generator)
    else:
        height, width, channels = spec.input_shape
        inputs = torch.rand(count, channels, height, width, generator=generator)
    return Batch(inputs, torch.randint(spec.num_classes, (count,), generator=generator))


def faults_of(raw):
    with pytest.raises(ConfigError) as caught:
        check(raw, "a test")
    return {fault.key: fault.message for fault in caught.value.faults}


# --- models as a user might write them, each with a fault -------------------------------------------------------------


def first_size_only(num_classes, input_shape):
    """For images with 100 numbers, whatever they have."""
    return nn.Sequential(nn.Flatten(), nn.Linear(100, num_classes))


def too_few_outputs(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes - 1))


def no_module(num_classes, input_shape):
    return "net"
