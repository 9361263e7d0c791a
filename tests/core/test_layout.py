"""Layout: where leaves lie, what layer blocks are, and that views are views."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torchvision
from torch import nn

from raysim.core.layout import layout_of
from raysim.training.model import BoundModel


def meta(make):
    with torch.device("meta"):
        return make()


def test_resnet18_has_the_papers_layers_and_blocks():
    layout = layout_of(meta(lambda: torchvision.models.resnet18(num_classes=10)), head="fc")
    assert len(layout.params) == 62  # FedVG's layers: parameter tensors
    assert layout.blocks == ("stem", *(f"layer{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)), "fc")
    down = layout.by_name["layer2.0.downsample.0.weight"]
    assert down.block == "layer2.0"
    assert [leaf.name for leaf in layout.params if leaf.is_head] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 6), ("resnet50", 6)])
def test_resnet_stages_are_the_released_codes_blocks(name, blocks):
    module = meta(lambda: getattr(torchvision.models, name)(num_classes=10))
    layout = layout_of(module, head="fc", blocks="stage")
    assert layout.blocks == ("stem", "layer1", "layer2", "layer3", "layer4", "fc")
    counts = {b: sum(leaf.block == b for leaf in layout.params) for b in layout.blocks}
    assert list(counts.values()) == ([3, 12, 15, 15, 15, 2] if name == "resnet18" else [3, 30, 39, 57, 30, 2])


def test_resnet50_has_18_residual_blocks():
    layout = layout_of(meta(lambda: torchvision.models.resnet50(num_classes=10)), head="fc")
    assert len(layout.params) == 161
    assert len(layout.blocks) == 18


@pytest.mark.parametrize("blocks", ["residual", "stage"])
def test_vit_has_14_blocks_of_the_papers_sizes(blocks):
    module = meta(lambda: timm.create_model("vit_small_patch16_224", num_classes=7))
    layout = layout_of(module, head="head", blocks=blocks)
    assert len(layout.params) == 152
    counts = {b: sum(leaf.block == b for leaf in layout.params) for b in layout.blocks}
    assert counts == {"stem": 6, **{f"blocks.{i}": 12 for i in range(12)}, "head": 2}


def test_views_share_memory_and_cover_the_vector():
    torch.manual_seed(0)
    module = torchvision.models.resnet18(num_classes=4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for channels_last in (False, True):
        layout = layout_of(module, head="fc", channels_last=channels_last)
        model = BoundModel(module, layout, head="fc")
        assert layout.num_state == layout.num_params + sum(leaf.size for leaf in layout.buffers)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), name
        model.state.fill_(2.0)
        assert all(bool((p == 2).all()) for p in module.parameters())
        assert bool((module.bn1.running_var == 2).all())
        module.fc.weight.data[1, 2] = 7.0
        assert float((model.state == 7).sum()) == 1
        model.load(torch.cat([layout.pack(leaf, before[leaf.name]) for leaf in layout.leaves]))
    weight = module.conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_changes_only_the_order():
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 2))
    values = dict(module.named_parameters())
    plain, last = (layout_of(module, head="2", channels_last=flag) for flag in (False, True))
    vectors = [torch.cat([layout.pack(leaf, values[leaf.name]) for leaf in layout.params]) for layout in (plain, last)]
    assert not torch.equal(*vectors)
    for name, value in values.items():
        assert torch.equal(plain.view(vectors[0], name), value)
        assert torch.equal(last.view(vectors[1], name), value)


def test_norms_equal_the_tensors_norms():
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 2))
    layout = layout_of(module, head="2", channels_last=True)
    vector = torch.randn(layout.num_params)
    for order in (1, 2, math.inf):
        want = [torch.linalg.vector_norm(v.double(), order) for v in layout.views(vector).values()]
        assert torch.allclose(layout.norms(vector, order), torch.stack(want))


def test_frozen_leaves():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layout = layout_of(module, head="1", trained={"1.weight", "1.bias"})
    assert [leaf.name for leaf in layout.params] == ["1.weight", "1.bias"]
    model = BoundModel(module, layout, head="1")
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]
    assert model.params.numel() == 10


def test_buffers_are_shared_unless_left_out():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    names = {name for name, _ in module.named_parameters()}
    whole = layout_of(module, head="2")
    assert whole.shared == whole.leaves
    assert whole.personal == ()
    layout = layout_of(module, head="2", shared=names - {"0.bias"} | {"1.running_var"})
    assert [leaf.name for leaf in layout.personal] == ["0.bias", "1.running_mean"]
    assert layout.shared_bytes == 4 * (layout.num_state - 4)
    vector = layout.zero_personal_(torch.ones(layout.num_params))
    assert float(vector.sum()) == layout.num_params - 2
