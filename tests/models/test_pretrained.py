"""Pretrained weights: from files, from torchvision, from timm."""

from __future__ import annotations

import urllib.error

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from raysim.base.errors import ModelError
from raysim.models import ModelSpec, build_model, try_model
from tests.support.federations import plan_of, raw_config, run
from tests.support.models import faults_of, spec_of


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
    fitting = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "good.safetensors").write_bytes(b"damaged since")  # between two checks of the same model
    assert "not a readable file of weights" in fault(pretrained=path)
    (tmp_path / "good.safetensors").write_bytes(fitting)
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
        with pytest.raises(ModelError, match="the model needs different tensors"):
            try_model(spec_of("resnet18", 16, pretrained="default", **options))

    def no_network(*a, **k):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(hub, "load_state_dict_from_url", no_network)
    try_model(spec)  # without a download
    with pytest.raises(
        ModelError, match=r"cannot be fetched \(URLError.*no route.*Fetch the weights on a machine with a network"
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


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: tensor.long(), "holds torch.int64 instead of torch.float32"),
        (lambda tensor: tensor.bool(), "holds torch.bool instead of torch.float32"),
        (lambda tensor: tensor.to(torch.complex64), "holds torch.complex64 instead of torch.float32"),
    ],
)
def test_weights_of_another_kind_of_number_are_refused_by_the_check(change, words, suffix, tmp_path):
    state = {name: change(tensor) for name, tensor in build_model(spec_of("mlp", 8), seed=1).state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    with pytest.raises(ModelError, match=words):
        try_model(spec_of("mlp", 8, pretrained=str(path)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {index: tensor for index, tensor in enumerate(state.values())}, "a tensor is called 0"),
        (lambda state: {**state, None: torch.zeros(1)}, "a tensor is called None"),
        (
            lambda state: {name: tensor.to("meta") for name, tensor in state.items()},
            "a meta tensor, which has no values",
        ),
        (lambda state: {name: tensor.to_sparse() for name, tensor in state.items()}, "a sparse or quantised tensor"),
        (lambda state: {**state, "fc2.weight": torch.tensor(1.0)}, r"fc2\.weight is \(\) instead of"),
    ],
)
def test_a_file_that_is_no_state_dict_of_dense_tensors_is_refused_by_the_check(change, words, tmp_path):
    torch.save(change(build_model(spec_of("mlp", 8), seed=1).state_dict()), tmp_path / "weights.pt")
    with pytest.raises(ModelError, match=words):
        try_model(spec_of("mlp", 8, pretrained=str(tmp_path / "weights.pt")))


def test_weights_with_nan_are_refused_when_they_are_read(tmp_path):
    state = build_model(spec_of("mlp", 8), seed=1).state_dict()
    torch.save({**state, "fc2.bias": state["fc2.bias"] / 0 * 0}, tmp_path / "weights.pt")
    with pytest.raises(ModelError, match=r"fc2\.bias holds an infinity or NaN in .*weights\.pt"):
        build_model(spec_of("mlp", 8, pretrained=str(tmp_path / "weights.pt")), seed=0)
