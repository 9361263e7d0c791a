"""Each model trains through the flat vector, from initial values of the seed alone."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torchvision
from torch import nn

from raysim.core.layout import integer_buffers
from raysim.core.method import Batch
from raysim.models import MODELS, build_model, from_torchvision, head_of, try_model
from raysim.models.registry import prefers_channels_last
from raysim.training.tasks import cross_entropy
from tests.support.federations import plan_of, run
from tests.support.models import TINY, batch_of, bound, spec_of


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_two_steps_change_every_leaf(name, channels):
    size, options = TINY[name]
    spec = spec_of(name, size, channels, **options)
    module = build_model(spec, seed=1)
    model = bound(module, head_of(spec), channels_last=prefers_channels_last(spec, module))
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


@pytest.mark.parametrize("width", [4, 12, 16])
def test_narrow_strided_shortcuts_have_the_gradients_of_contiguous_images(width):
    """oneDNN computes a wrong gradient of channels-last 1x1 convolutions with a stride (uxlfoundation/oneDNN#6035)."""
    spec = spec_of("resnet20", 8, width=width, depth=8)
    module = build_model(spec, seed=1)
    is_chosen = prefers_channels_last(spec, module)
    assert is_chosen == (width == 16)
    after = {}
    for is_channels_last in (False, is_chosen):
        model = bound(copy.deepcopy(module), head_of(spec), channels_last=is_channels_last)
        model.module.train()
        model.descend(cross_entropy, batch_of(spec), 0.01)
        after[is_channels_last] = {leaf.name: model.layout.view(model.params, leaf) for leaf in model.layout.params}
    assert all(torch.allclose(after[is_chosen][name], value, atol=1e-5) for name, value in after[False].items())


def test_all_names_are_trained_above():
    assert set(MODELS) <= {*TINY, "vit_b16", "torchvision:vit_b_16"}  # the latter: see below


@pytest.mark.slow
def test_torchvisions_vit_is_the_same_network_with_the_same_weights(monkeypatch):
    """Under its own names and ours one input gives one output; another number of classes keeps the classifier's draws."""
    torch.manual_seed(0)
    theirs = torchvision.models.vit_b_16(image_size=32, num_classes=5).eval()
    nn.init.normal_(theirs.heads.head.weight, std=0.1)  # torchvision begins with zeros
    monkeypatch.setattr(from_torchvision, "_published", lambda *_: theirs.state_dict())
    spec = spec_of("torchvision:vit_b_16", 32, classes=5, pretrained="default")
    ours = build_model(spec, seed=1).eval()
    images = batch_of(spec, 2).inputs
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
        nn.functional.cross_entropy(plain(batch.inputs), batch.targets).backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        assert torch.equal(value, dict(module.named_parameters())[name]), name
    assert module.second.weight is module.first.weight


@pytest.mark.slow
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


@pytest.mark.slow
def test_names_alone_import_neither_torchvision_nor_timm():
    code = "import sys, torch; torch.nn.Linear(1, 1, device='meta'); own = set(sys.modules); "  # sympy, for old PyTorch
    code += "import raysim.models as m; m.build_model(m.ModelSpec('cnn', 2, (8, 8, 1)), seed=0); "
    code += "m.try_model(m.ModelSpec('cnn', 2, (8, 8, 1))); print({'timm', 'torchvision', 'sympy'} & set(sys.modules) - own)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_pooling_before_relu_has_the_bits_of_relu_before_pooling(name):
    fast = build_model(spec_of(name, 32, 3), seed=0)
    slow = nn.Sequential()
    for key, layer in fast.named_children():
        if key.startswith("relu") and slow and isinstance(slow[-1], nn.MaxPool2d):
            pool = slow.pop(-1)
            slow.extend([nn.ReLU(), pool])
        else:
            slow.append(copy.deepcopy(layer))
    assert [type(layer) for layer in slow] != [type(layer) for layer in fast.children()]
    x, y = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 10
    for model in (fast, slow):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(fast.parameters(), slow.parameters(), strict=True))
