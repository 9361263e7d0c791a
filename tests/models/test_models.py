"""Models: what they are made of, that each trains through the flat vector, and pretrained weights."""

from __future__ import annotations

import csv
import subprocess
import sys
import urllib.error
from collections import Counter

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from raysim.__main__ import app
from raysim.check import check
from raysim.core.errors import ConfigError, ModelError
from raysim.core.layout import integer_buffers, layout_of
from raysim.core.method import Batch
from raysim.models import (
    MODELS,
    ModelSpec,
    build_model,
    build_skeleton,
    find_architecture,
    from_torchvision,
    head_of,
    try_model,
)
from raysim.models.from_torchvision import SMALL_STAGES
from raysim.models.registry import prefers_channels_last
from raysim.report.published import FOLDER as PUBLISHED
from raysim.training.model import BoundModel, cross_entropy
from tests.support.federations import plan_of, raw_config, run

#: Every name, at a size that trains in a moment: (height and width, options). ViT-B/16 is ViT-S/16 with other numbers.
TINY = {
    "cnn": (8, {"width": 4, "hidden": 8}),
    "lenet": (16, {}),
    "mlp": (8, {}),
    "univarfl_cnn": (21, {"norm": "group"}),  # biases in front of BatchNorm have no gradient
    "resnet18": (8, {}),
    "resnet34": (8, {"norm": "group"}),
    "resnet50": (8, {"stem": "small"}),
    "mobilenetv2": (8, {"stem": "small", "width": 0.25, "dropout": 0.0}),
    "vit": (8, {"dim": 16, "depth": 2}),
    "vit_s16": (32, {}),
    "timm:test_vit": (32, {}),
    "test_resnet": (32, {}),
}


def spec_of(name, size=None, channels=3, classes=10, pretrained=None, **options):
    return ModelSpec(name, classes, (size or find_architecture(name).size,) * 2 + (channels,), options, pretrained)


def layout(spec, blocks="residual"):
    return layout_of(build_skeleton(spec), head=head_of(spec), blocks=blocks)


def bound(module, head, *, channels_last=False):
    return BoundModel(module, layout_of(module, head=head, channels_last=channels_last), head=head)


def batch_of(spec, count=8, seed=0):
    height, width, channels = spec.input_shape
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, channels, height, width, generator=generator)
    return Batch(images, torch.randint(spec.num_classes, (count,), generator=generator))


def faults_of(raw):
    with pytest.raises(ConfigError) as caught:
        check(raw, "a test")
    return {fault.key: fault.message for fault in caught.value.faults}


# --- structure --------------------------------------------------------------------------------------------------------


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
    module.eval()(batch_of(spec, 2).images)
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
    images = batch_of(spec_of(name, size)).images
    assert torch.allclose(grouped(images)[:3], grouped(images[:3]), atol=1e-5)
    assert not torch.allclose(batched(images)[:3], batched(images[:3]), atol=1e-5)
    groups = {
        m.num_groups
        for m in build_model(spec_of(name, size, norm="group", groups=4), seed=0).modules()
        if isinstance(m, nn.GroupNorm)
    }
    assert groups == {4}


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_two_steps_change_every_leaf(name, channels):
    size, options = TINY[name]
    spec = spec_of(name, size, channels, **options)
    model = bound(build_model(spec, seed=1), head_of(spec), channels_last=prefers_channels_last(spec))
    model.module.train()
    before = model.params.clone()
    for _ in range(2):  # timm's ResNets begin with branches of factor 0, which hide what is inside from the first step
        model.descend(cross_entropy, batch_of(spec), 0.01)
    assert 0 < float(model.loss) < 20
    assert torch.isfinite(model.state).all()
    still = [
        leaf.name
        for leaf in model.layout.params
        if torch.equal(*(model.layout.view(v, leaf) for v in (before, model.params)))
    ]
    assert not still


def test_all_names_are_trained_above():
    assert set(MODELS) <= {*TINY, "vit_b16", "torchvision:vit_b_16"}  # the latter: see below


def test_torchvisions_vit_is_the_same_network_with_the_same_weights(monkeypatch):
    """Under its own names and ours one input gives one output; another number of classes keeps the classifier's draws."""
    torch.manual_seed(0)
    theirs = torchvision.models.vit_b_16(image_size=32, num_classes=5).eval()
    nn.init.normal_(theirs.heads.head.weight, std=0.1)  # torchvision begins with zeros
    monkeypatch.setattr(from_torchvision, "_published", lambda *_: theirs.state_dict())
    spec = spec_of("torchvision:vit_b_16", 32, classes=5, pretrained="default")
    ours = build_model(spec, seed=1).eval()
    images = batch_of(spec, 2).images
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images), atol=1e-5)
    assert float(ours(images).detach().std()) > 0
    with pytest.raises(ValueError, match="not divisible into 16 x 16 patches"):
        try_model(spec_of("torchvision:vit_b_16", 40))


def test_tables_of_integers_are_no_counters():
    arguments = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    spec = spec_of("timm:swin_tiny_patch4_window7_224", 32, arguments=arguments)
    module = build_model(spec, seed=0)
    tables = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_floating_point()}
    assert any(table.any() for table in tables.values())
    model = bound(module, head_of(spec))
    assert model.counters == {}
    model.load(model.state.clone())
    assert all(torch.equal(dict(module.named_buffers())[name], table) for name, table in tables.items())
    assert set(integer_buffers(torchvision.models.resnet18())) == {
        name for name, _ in torchvision.models.resnet18().named_buffers() if name.endswith("num_batches_tracked")
    }


class Odd(nn.Module):
    """A parameter without dimensions and two layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.scale * self.second(torch.tanh(self.first(x.flatten(1)))))


def test_shared_and_zero_dimensional_parameters_train_as_in_torch():
    torch.manual_seed(0)
    module = Odd()
    torch.manual_seed(0)
    plain = Odd()
    model = bound(module, "head")
    batch = Batch(torch.rand(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(3):
        model.descend(cross_entropy, batch, 0.3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(batch.images), batch.labels).backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        assert torch.equal(value, dict(module.named_parameters())[name]), name
    assert module.second.weight is module.first.weight


@pytest.mark.parametrize(
    "model",
    [
        {"name": "resnet18", "stem": "small", "norm": "group"},
        {"name": "vit", "dim": 16, "depth": 2, "patch": 4},
        {"name": "mobilenetv2", "stem": "small", "width": 0.25},
    ],
    ids=lambda model: model["name"],
)
def test_a_round_on_digits(model, root):
    groups = {"model": model, "cohort": {"size": 2}, "local": {"lr": 0.05, "epochs": 0.2, "batch_size": 8}}
    plan = plan_of(root, rounds=1, **groups, partition={"alpha": 10.0, "num_clients": 24})
    server = run(plan, root)
    assert torch.isfinite(server.state).all()
    assert server.params_sha256() != run(plan, root, rounds=0).params_sha256()


# --- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "vit", "timm:test_efficientnet", "univarfl_cnn"])
def test_initial_values_come_from_the_seed_alone(name):
    spec = spec_of(name, 32)
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    first = build_model(spec, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), stream)
    torch.rand(7)
    second, other = (build_model(spec, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_names_alone_import_neither_torchvision_nor_timm():
    code = "import sys, raysim.models as m; m.build_model(m.ModelSpec('cnn', 2, (8, 8, 1)), seed=0); "
    code += "m.try_model(m.ModelSpec('cnn', 2, (8, 8, 1))); print({'timm', 'torchvision', 'sympy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# --- pretrained weights -----------------------------------------------------------------------------------------------


def saved(path, module):
    state = module.state_dict()
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("name", ["cnn", "resnet18", "vit"])
def test_weights_of_a_file_are_the_models(name, suffix, tmp_path):
    options = {"norm": "batch"} if name != "vit" else {"dim": 16, "depth": 2}
    source = build_model(spec_of(name, 8, **options), seed=1)
    path = saved(tmp_path / f"weights{suffix}", source)
    spec = spec_of(name, 8, pretrained=path, **options)
    try_model(spec)
    made = build_model(spec, seed=2).state_dict()
    assert all(torch.equal(made[key], value) for key, value in source.state_dict().items())
    fresh = build_model(spec_of(name, 8, **options), seed=2).state_dict()
    assert not all(torch.equal(made[key], fresh[key]) for key in made)


def test_head_is_kept_when_classes_differ_and_grey_sums_the_colours(tmp_path):
    source = build_model(spec_of("resnet18", 8), seed=1)
    spec = spec_of("resnet18", 8, 1, classes=3, pretrained=saved(tmp_path / "w.pth", source))
    try_model(spec)
    made = build_model(spec, seed=2)
    fresh = build_model(spec_of("resnet18", 8, 1, classes=3), seed=2)
    assert torch.equal(made.fc.weight, fresh.fc.weight)
    assert torch.equal(made.fc.bias, fresh.fc.bias)
    grey = torch.rand(2, 1, 16, 16)
    mine, theirs = (
        nn.Sequential(*list(m.eval().children())[:-1])(x) for m, x in ((made, grey), (source, grey.repeat(1, 3, 1, 1)))
    )
    assert torch.allclose(mine, theirs, atol=1e-5)


def test_files_that_do_not_fit_are_faults_of_the_config(root, tmp_path):
    def fault(**model):
        return faults_of(raw_config(root, model={"name": "cnn", "width": 4, "hidden": 16, **model}))["model.pretrained"]

    good = build_model(ModelSpec("cnn", 10, (8, 8, 1), {"width": 4, "hidden": 16}), seed=0)
    path = saved(tmp_path / "good.safetensors", good)
    plan_of(root, model={"pretrained": path})
    assert "no such file" in fault(pretrained=str(tmp_path / "none.pth"))
    assert "conv1.weight is (4, 1, 5, 5) instead of (8, 1, 5, 5)" in fault(pretrained=path, width=8)
    assert "norm1.weight is missing" in fault(pretrained=path, norm="batch")
    batched = build_model(ModelSpec("cnn", 10, (8, 8, 1), {"width": 4, "hidden": 16, "norm": "batch"}), seed=0)
    assert "norm1.weight is not in the model" in fault(pretrained=saved(tmp_path / "b.pt", batched))
    for name, content in (("text.pth", b"hello"), ("text.safetensors", b"hello"), ("text.npz", b"hello")):
        (tmp_path / name).write_bytes(content)
        assert "not a readable file of weights" in fault(pretrained=str(tmp_path / name))
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    assert "not a dictionary of tensors" in fault(pretrained=str(tmp_path / "list.pth"))
    torch.save(good, tmp_path / "module.pth")  # a pickled module would run code
    assert "not a readable file" in fault(pretrained=str(tmp_path / "module.pth"))
    assert "no published weights" in fault(pretrained="default")


def test_nothing_is_copied_from_a_file_that_does_not_fit(tmp_path):
    path = saved(tmp_path / "w.pth", build_model(spec_of("mlp", 8, hidden=4), seed=1))
    with pytest.raises(ModelError, match=r"fc1\.weight is \(4, 192\) instead of \(5, 192\)"):
        build_model(spec_of("mlp", 8, hidden=5, pretrained=path), seed=1)


def test_a_run_begins_at_the_weights_of_the_file(root, tmp_path):
    source = build_model(ModelSpec("cnn", 10, (8, 8, 1), {"width": 4, "hidden": 16}), seed=77)
    plan = plan_of(root, model={"pretrained": saved(tmp_path / "w.safetensors", source)})
    server = run(plan, root, rounds=0)
    wanted = torch.cat(
        [plan.layout.pack(leaf, source.get_parameter(leaf.name).detach()) for leaf in plan.layout.params]
    )
    assert torch.equal(torch.as_tensor(server.state)[: plan.layout.num_params], wanted)


def test_torchvisions_published_weights(monkeypatch):
    published = torchvision.models.resnet18().state_dict()
    hub = torchvision.models._api
    monkeypatch.setattr(hub, "load_state_dict_from_url", lambda *a, **k: published)
    spec = spec_of("resnet18", 16, 1, pretrained="default")
    try_model(spec)
    module = build_model(spec, seed=0)
    assert torch.equal(module.layer3[0].conv1.weight, published["layer3.0.conv1.weight"])
    assert torch.equal(module.conv1.weight, published["conv1.weight"].sum(1, keepdim=True))
    assert module.fc.out_features == 10
    for options in ({"stem": "small"}, {"norm": "group"}, {"first_stride": 2}):
        with pytest.raises(ModelError, match="the model needs other tensors"):
            try_model(spec_of("resnet18", 16, pretrained="default", **options))

    def no_network(*a, **k):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(hub, "load_state_dict_from_url", no_network)
    try_model(spec)  # without a download
    with pytest.raises(
        ModelError, match=r"cannot be fetched \(URLError.*no route.*Fetch them where there is a network"
    ):
        build_model(spec, seed=0)


def test_timms_published_weights_are_fitted_by_timm(tmp_path):
    source = timm.create_model("test_vit")
    overlay = {"pretrained_cfg_overlay": {"file": saved(tmp_path / "w.safetensors", source)}}
    spec = spec_of("timm:test_vit", 32, 1, arguments=overlay, pretrained="default")
    try_model(spec)
    module = build_model(spec, seed=0)
    assert torch.equal(module.blocks[3].mlp.fc1.weight, source.blocks[3].mlp.fc1.weight)
    assert torch.allclose(module.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    assert module.pos_embed.shape[1] == 5
    with pytest.raises(ModelError, match="timm has no weights for efficientnet_b7"):
        try_model(spec_of("timm:efficientnet_b7", 64, pretrained="default"))


# --- faults and the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in TINY if name not in ("resnet34", "resnet50")])
def test_what_builds_can_be_trained_and_the_rest_is_refused(name):
    options = TINY[name][1]
    taken = []
    for size in (1, 2, 3, 4, 5, 8, 12, 15, 16, 20, 21):
        spec = spec_of(name, size, **options)
        try:
            try_model(spec)
        except ValueError:
            continue
        taken.append(size)
        if size <= 5 or len(taken) == 1:
            module = build_model(spec, seed=0).train()
            assert torch.isfinite(module(batch_of(spec, 2).images)).all(), size
    smallest = {"cnn": 4, "lenet": 16, "univarfl_cnn": 21, "vit": 4, "vit_s16": 16, "timm:test_vit": 16}
    assert min(taken) == smallest.get(name, 1)


@pytest.mark.parametrize(
    ("model", "key", "words"),
    [
        ({"name": "vit", "patch": 3}, "model", "8 x 8 images are not divisible into 3 x 3 patches"),
        ({"name": "vit_s16"}, "model", "8 x 8 images are not divisible into 16 x 16 patches"),
        ({"name": "vit", "dim": 10, "heads": 4}, "model", "dim must be a multiple of heads"),
        ({"name": "univarfl_cnn"}, "model", "smaller than 21 x 21"),
        ({"name": "lenet"}, "model", "smaller than 16 x 16"),
        ({"name": "resnet18", "norm": "group", "groups": 3}, "model", "divisible by num_groups"),
        ({"name": "resnet18", "norm": "layer"}, "model.norm", "must be batch or group, got 'layer'"),
        ({"name": "resnet18", "first_stride": 3}, "model.first_stride", "3"),
        ({"name": "mobilenetv2", "wdith": 0.5}, "model.wdith", "Did you mean 'width'?"),
        ({"name": "timm:test_vit", "arguments": {"no_such": 1}}, "model", "no_such"),
        ({"name": "resnet19"}, "model.name", "Did you mean 'resnet18'"),
        ({"name": "timm:vit_tiny_patch16_22"}, "model.name", "'vit_tiny_patch16_224'"),
        ({"name": "levit_128"}, "model.name", "2 classifiers"),
        ({"name": "dla34"}, "model", "raysim needs one linear layer with 10 outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_of_a_model(model, key, words, root):
    assert words in faults_of(raw_config(root, model=model))[key]


def test_methods_prints_the_blocks_of_any_model():
    def printed(*words):
        result = CliRunner().invoke(app, ["methods", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    text = printed("--model", "resnet18", "--size", "32", "--channels", "1", "--classes", "7", "stem=small")
    assert "32 x 32 x 1 images, 7 classes: 11171271 parameters, 62 layers, 10 layer blocks" in text
    assert [line.split()[0] for line in text.splitlines()[2:]][:3] == ["stem", "layer1.0", "layer1.1"]
    assert "6 layer blocks" in printed("--model", "resnet18", "blocks=stage")
    text = printed("--model", "vit_b16")
    assert "152 layers, 14 layer blocks" in text
    stem = next(line for line in text.splitlines() if line.startswith("stem"))
    assert stem.split("  ")[-1] == (
        "cls_token, pos_embed, patch_embed.proj.weight, patch_embed.proj.bias, norm.weight, norm.bias"
    )
    assert "8 layer blocks" in printed("--model", "timm:test_vit")
    assert "resnet50(*, stem: Literal['imagenet', 'small'] = 'imagenet'" in printed()
    for words in (["vit", "--size", "30"], ["resnet18", "stm=small"], ["cnn", "pretrained=/no/such.pth"], ["cmn"]):
        result = CliRunner().invoke(app, ["methods", "--model", *words])
        assert isinstance(result.exception, ConfigError), words
