"""Faults of a model, and the command that prints its layer blocks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.models import build_model, try_model
from tests.support.federations import raw_config
from tests.support.models import TINY, batch_of, faults_of, spec_of

LOOK_AT_IMPORTS = """
import sys
import torch
from raysim.models import ModelSpec, build_skeleton
from raysim.models.lora import LoraSpec

class Finder:
    def find_spec(self, name, *rest):
        if name in ("timm", "torchvision", "peft"):
            print(name, torch.get_default_device())

sys.meta_path.insert(0, Finder())
build_skeleton(ModelSpec({name!r}, 3, (32, 32, 3), lora=LoraSpec(2) if {name!r} == "vit" else None))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "libraries"),
    [("resnet18", {"torchvision"}), ("resnet20", {"torchvision"}), ("vit", {"timm", "torchvision", "peft"})],
)
def test_libraries_are_imported_on_the_cpu_though_models_are_tried_on_meta(name, libraries):
    """PyTorch 2.6 computes with tensors when torchvision imports its compiler."""
    command = [sys.executable, "-c", LOOK_AT_IMPORTS.replace("{name!r}", repr(name))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {*said.splitlines()} == {f"{library} cpu" for library in libraries}


@pytest.mark.slow
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
            assert torch.isfinite(module(batch_of(spec, 2).inputs)).all(), size
    smallest = {"cnn": 4, "lenet": 16, "univarfl_cnn": 21, "vit": 4, "vit_s16": 16, "timm:test_vit": 16}
    assert min(taken) == smallest.get(name, 1)


@pytest.mark.parametrize(
    ("model", "key", "words"),
    [
        ({"name": "vit", "patch": 3}, "model", "8 x 8 images are not divisible into 3 x 3 patches"),
        ({"name": "vit_s16"}, "model", "8 x 8 images are not divisible into 16 x 16 patches"),
        ({"name": "vit", "dim": 10, "heads": 4}, "model", "dim should be divisible by num_heads"),
        (
            {"name": "cnn", "lora": {}},
            "model.lora.targets",
            "no layer is called attn.qkv or attn.proj or mlp.fc1 or mlp.fc2",
        ),
        ({"name": "cnn", "lora": {}}, "model.lora.targets", "name layers of the model: conv1, conv2, fc1"),
        ({"name": "univarfl_cnn"}, "model", "smaller than 21 x 21"),
        ({"name": "lenet"}, "model", "smaller than 16 x 16"),
        ({"name": "resnet18", "norm": "group", "groups": 3}, "model", "divisible by num_groups"),
        ({"name": "resnet18", "norm": "layer"}, "model.norm", "must be 'batch' or 'group', got 'layer'"),
        ({"name": "resnet18", "first_stride": 3}, "model.first_stride", "3"),
        ({"name": "mobilenetv2", "wdith": 0.5}, "model.wdith", "Did you mean 'width'?"),
        ({"name": "timm:test_vit", "arguments": {"no_such": 1}}, "model", "no_such"),
        ({"name": "resnet19"}, "model.name", "Did you mean 'resnet18'"),
        ({"name": "timm:vit_tiny_patch16_22"}, "model.name", "'vit_tiny_patch16_224'"),
        ({"name": "levit_128"}, "model.name", "2 classifiers"),
        ({"name": "dla34"}, "model", "use a linear layer with 10 outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_of_a_model(model, key, words, root):
    assert words in faults_of(raw_config(root, model=model))[key]


@pytest.mark.parametrize(
    ("model", "is_about_size"),
    [
        ({"name": "lenet"}, True),
        ({"name": "vit", "patch": 3}, True),
        ({"name": "tests.support.models:first_size_only"}, True),
        ({"name": "tests.support.models:too_few_outputs"}, False),
        ({"name": "tests.support.models:no_module"}, False),
        ({"name": "dla34"}, False),
        ({"name": "cnn", "width": 0}, False),
        ({"name": "cnn", "norm": "group", "groups": 0}, False),
        ({"name": "cnn", "lora": {}}, False),
    ],
    ids=str,
)
def test_the_size_of_images_is_named_only_where_it_can_be_at_fault(model, is_about_size, root):
    (text,) = faults_of(raw_config(root, model=model)).values()
    assert ("data.resize" in text) is is_about_size


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
    assert "stem = imagenet   (imagenet | small)" in printed("resnet50")
    for words in (["vit", "--size", "30"], ["resnet18", "stm=small"], ["cnn", "pretrained=/no/such.pth"], ["cmn"]):
        result = CliRunner().invoke(app, ["methods", "--model", *words])
        assert isinstance(result.exception, ConfigError), words
