"""What models are made of: leaves, layer blocks, sizes, stems and normalisation."""

from __future__ import annotations

import csv
from collections import Counter

import pytest
import torch
import torchvision
from torch import nn

from raysim.base.errors import ConfigError
from raysim.models import build_model, head_of
from raysim.models.from_torchvision import SMALL_STAGES
from raysim.reporting.published import FOLDER as PUBLISHED
from tests.support.models import batch_of, layout, spec_of


@pytest.mark.parametrize(
    ("name", "leaves", "blocks", "stages"),
    [
        ("resnet18", 62, 10, 6),
        ("resnet50", 161, 18, 6),
        ("vit_s16", 152, 14, 14),
        ("vit_b16", 152, 14, 14),
        ("torchvision:vit_b_16", 152, 14, 14),
    ],
)
def test_fedvgs_networks_have_its_layers_and_blocks(name, leaves, blocks, stages):
    spec = spec_of(name, 224, classes=7)
    assert len(layout(spec).params) == leaves
    assert len(layout(spec).blocks) == blocks
    assert len(layout(spec, "stage").blocks) == stages
    assert layout(spec).blocks[0] == "stem"
    assert layout(spec).blocks[-1] == head_of(spec)
    assert {leaf.name for leaf in layout(spec).params if leaf.is_head} == {
        f"{head_of(spec)}.{k}" for k in ("weight", "bias")
    }


def test_vit_b16_has_livars_dimensions():
    views = {leaf.name: leaf.shape for leaf in layout(spec_of("vit_b16", 224, classes=100)).params}
    assert views["head.weight"] == (100, 768)
    assert views["pos_embed"] == (1, 197, 768)
    assert layout(spec_of("vit_b16", 32, 1)).by_name["patch_embed.proj.weight"].shape == (768, 1, 16, 16)
    adapted = [n for n in views if n.endswith(("qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight"))]
    assert sum(16 * sum(views[name]) for name in adapted) == 2_359_296  # LoRA of rank 16, section 3.2
    assert len(adapted) == 48


def test_resnet20_is_the_one_for_cifar():
    """He et al. 2016: 20 weighted layers, and with option B 272,474 parameters; a layer block for each residual block."""
    network = layout(spec_of("resnet20"))
    assert network.num_params == 272_474
    assert sum(leaf.size for leaf in layout(spec_of("resnet20", width=8, depth=8)).params) < 30_000
    blocks = [f"layer{stage}.{number}" for stage in (1, 2, 3) for number in range(3)]
    assert network.blocks == ("stem", *blocks, "fc")
    assert layout(spec_of("resnet20"), "stage").blocks == ("stem", "layer1", "layer2", "layer3", "fc")
    module = build_model(spec_of("resnet20", 16, 1), seed=0)
    weighted = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert sum(getattr(part, "kernel_size", None) != (1, 1) for part in weighted) == 20
    grown = module.layer3(module.layer2(module.layer1(torch.zeros(2, 16, 16, 16))))
    assert grown.shape == (2, 64, 4, 4)
    for depth in (9, 2):
        with pytest.raises(ConfigError, match="depth must be 6 n"):
            build_model(spec_of("resnet20", depth=depth), seed=0)


def test_mobilenetv2_blocks_are_stem_residuals_last_convolution_and_head():
    counts = Counter(leaf.block for leaf in layout(spec_of("mobilenetv2")).params)
    residuals = {f"features.{i}": 6 if i == 1 else 9 for i in range(1, 18)}
    assert counts == {"stem": 3, **residuals, "features.18": 3, "classifier.1": 2}


def test_blocks_of_one_width_are_the_ten_stages_of_flfas_table_13():
    with open(PUBLISHED / "flfa_table_13.csv", newline="") as file:
        rows = {row["setting"].rpartition(";")[0] for row in csv.DictReader(file)}
    blocks = layout(spec_of("mobilenetv2", stem="small", size=32), "width").blocks
    ends = [sum(count for _, _, count, _ in SMALL_STAGES[: stage + 1]) for stage in range(7)]
    assert blocks == ("stem", *(f"features.{end}" for end in ends), "features.18", "classifier.1")
    assert len(blocks) == len(rows)
    # A classifier that happens to be as wide as the block before it stays apart.
    assert layout(spec_of("mobilenetv2", classes=1280), "width").blocks == blocks
    assert layout(spec_of("resnet18"), "width").blocks == ("stem", *(f"layer{i}.1" for i in range(1, 5)), "fc")
    assert layout(spec_of("cnn"), "width").blocks == layout(spec_of("cnn")).blocks


def test_blocks_of_nested_stages():
    spec = spec_of("timm:test_convnext", 64)
    counts = Counter(leaf.block for leaf in layout(spec).params)
    assert counts["stages.1"] == 4  # down-sampling: of the stage, in none of its blocks
    assert counts["stages.2.blocks.3"] == 9
    assert Counter(leaf.block for leaf in layout(spec, "stage").params) == {
        "stem": 6,
        "stages.0": 9,
        "stages.1": 22,
        "stages.2": 40,
        "stages.3": 22,
        "head.fc": 2,
    }
    stages = layout(spec_of("timm:mobilenetv2_100"), "stage").blocks
    assert stages == ("stem", *(f"blocks.{i}" for i in range(7)), "classifier")


def test_the_cnn_can_be_smooth():
    """A step of h in any direction changes the gradient by O(h), everywhere: no ReLU, no choice among pixels."""
    options = {"width": 4, "hidden": 8}
    plain, smooth = (
        build_model(spec_of("cnn", 8, 1, **options, **more), seed=0)
        for more in ({}, {"activation": "tanh", "pool": "average"})
    )
    assert list(plain.state_dict()) == list(smooth.state_dict())
    kinds = {type(module) for module in smooth.modules()}
    assert kinds >= {nn.Tanh, nn.AvgPool2d}
    assert not kinds & {nn.ReLU, nn.MaxPool2d}
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    x[0] = 0.5  # equal pixels: where a maximum has no gradient of its own
    assert torch.autograd.gradgradcheck(smooth.double(), x.requires_grad_(), fast_mode=True)


def test_known_sizes():
    assert layout(spec_of("cnn")).num_params == 2_156_490
    assert layout(spec_of("lenet", 32, 1)).num_params == 61_706
    assert layout(spec_of("lenet", 28, 1, padding=2)).num_params == 61_706
    convs = 3 * 16 * 9 + 16 * 16 + 16 * 32 * 9 + 32 * 32 * 10 + 32 * 64 * 9 + 64 * 64 * 10
    norms = 2 * (2 * 16 + 3 * 32 + 3 * 64 + 2 * 256)
    assert layout(spec_of("univarfl_cnn")).num_params == convs + norms + 65 * 256 + 257 * 256 + 257 * 10
    reference = torchvision.models.resnet18(num_classes=10)
    assert layout(spec_of("resnet18")).num_params == sum(p.numel() for p in reference.parameters())


def test_univarfls_resnet18():
    spec = spec_of("resnet18", 32, classes=100, stem="small", first_stride=2, projector_width=512)
    made = layout(spec)
    assert len(made.params) == 62 + 3 + 8
    assert len([leaf for leaf in made.params if leaf.block == "avgpool.2"]) == 8
    assert made.blocks[-2:] == ("avgpool.2", "fc")
    assert made.by_name["fc.weight"].shape == (100, 512)
    module = build_model(spec, seed=0)
    sizes = shapes_in(module, spec, "conv1", "layer1", "layer2", "layer4")
    assert sizes == [32, 16, 8, 2]
    assert isinstance(module.avgpool[2][1], nn.BatchNorm1d)
    plain = layout(spec_of("resnet50", 32, first_stride=2))
    assert len(plain.params) == 161  # its first stage has a down-sampling convolution anyway
    assert shapes_in(build_model(spec_of("resnet50", 32, first_stride=2), seed=0), spec, "layer1", "layer2") == [4, 2]


def shapes_in(module, spec, *paths):
    """Heights of the outputs of some layers."""
    seen = []
    for path in paths:
        module.get_submodule(path).register_forward_hook(lambda m, i, out: seen.append(out.shape[-1]))
    module.eval()(batch_of(spec, 2).inputs)
    return seen


def test_small_stems_keep_resolution():
    for name, paths, small, imagenet in (
        ("resnet18", ("conv1", "maxpool", "layer4"), [32, 32, 4], [16, 8, 1]),
        ("mobilenetv2", ("features.0", "features.3", "features.18"), [32, 32, 8], [16, 8, 1]),
    ):
        for stem, want in (("small", small), ("imagenet", imagenet)):
            spec = spec_of(name, 32, stem=stem)
            assert shapes_in(build_model(spec, seed=0), spec, *paths) == want


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "cnn", "univarfl_cnn"])
def test_group_norm_has_no_buffers_and_ignores_the_batch(name):
    size = {"univarfl_cnn": 21}.get(name, 16)
    grouped, batched = (build_model(spec_of(name, size, norm=norm), seed=0).train() for norm in ("group", "batch"))
    assert not list(grouped.buffers())
    assert list(batched.buffers())
    for module in (grouped, batched):
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
    images = batch_of(spec_of(name, size)).inputs
    assert torch.allclose(grouped(images)[:3], grouped(images[:3]), atol=1e-5)
    assert not torch.allclose(batched(images)[:3], batched(images[:3]), atol=1e-5)
    groups = {
        m.num_groups
        for m in build_model(spec_of(name, size, norm="group", groups=4), seed=0).modules()
        if isinstance(m, nn.GroupNorm)
    }
    assert groups == {4}
