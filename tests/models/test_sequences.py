"""Models for tokens: what they compute, what they are made of, and that they train through the flat vector."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from typer.testing import CliRunner

import raysim
from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.core.method import Batch
from raysim.models import LoraSpec, ModelSpec, build_model, build_skeleton, head_of, output_shape, try_model
from raysim.plan.check import check
from tests.support.models import bound, faults_of, layout
from tests.twins.sequences import gpt_logits, recurrent_logits

LENGTH, TOKENS, CLASSES = 6, 11, 7
SMALL = {
    "gpt": {"dim": 8, "depth": 2, "heads": 2},
    "gru": {"embedding": 3, "hidden": 5, "layers": 2},
    "lstm": {"embedding": 3, "hidden": 5, "layers": 2},
}


def spec_of(name, *, classes=CLASSES, lora=None, **options):
    return ModelSpec(name, classes, (LENGTH,), SMALL[name] | options, lora=lora, vocabulary=TOKENS)


def module_of(name, **options):
    """The model with values large enough that each of its parts counts."""
    module = build_model(spec_of(name, **options), seed=3).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def tokens_of(count=4, seed=5):
    return torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def naive(name, state, tokens):
    if name == "gpt":
        return gpt_logits(state, tokens, depth=2, heads=2)
    return recurrent_logits(state, tokens, kind=name, layers=2)


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_logits_are_those_of_the_equations(name):
    module, tokens = module_of(name), tokens_of()
    wanted = torch.stack([naive(name, module.state_dict(), row) for row in tokens])
    assert wanted.std() > 0.1
    assert torch.allclose(module(tokens), wanted, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_logit(name):
    module, tokens = module_of(name), tokens_of()
    logits = module(tokens)
    for position in range(LENGTH):
        other = tokens.clone()
        other[:, position] = (other[:, position] + 1) % TOKENS
        moved = (module(other) - logits).abs().amax((0, 2))
        assert (moved[:position] == 0).all()
        assert (moved[position:] > 1e-4).all()  # it changes its own logit and all that follow


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_an_answer_for_the_sequence_is_that_of_its_last_token(name):
    each, last = module_of(name), module_of(name, per="sequence")
    tokens = tokens_of()
    assert last(tokens).shape == (4, CLASSES)
    assert torch.allclose(last(tokens), each(tokens)[:, -1], atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_sequences_may_be_shorter(name):
    module, tokens = module_of(name), tokens_of()
    assert torch.allclose(module(tokens[:, :3]), module(tokens)[:, :3], atol=1e-6)


def test_known_sizes():
    """By hand: an LSTM layer has 4 gates of hidden x (inputs + hidden) weights and, in PyTorch, two biases; a GRU layer 3."""

    def size(name, **options):
        return layout(ModelSpec(name, 90, (80,), options, vocabulary=90)).num_params

    ends = 90 * 8 + 257 * 90
    assert size("lstm") == ends + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) == 822_570
    assert size("gru") == ends + 3 * 256 * (8 + 256 + 2) + 3 * 256 * (256 + 256 + 2)
    block = 12 * 128**2 + (3 + 1 + 4 + 1 + 4) * 128  # weights of qkv, proj, fc1, fc2; their biases; two normalisations
    assert size("gpt") == 90 * 128 + 80 * 128 + 4 * block + 2 * 128 + 129 * 90


def test_names_and_order_of_the_leaves_are_frozen():
    recurrent = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    wanted = ["embedding.weight", *(f"layers.{i}.{leaf}" for i in (0, 1) for leaf in recurrent), "fc.weight", "fc.bias"]
    for name in ("gru", "lstm"):
        assert [leaf.name for leaf in layout(spec_of(name)).leaves] == wanted
    parts = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    layers = [*(f"blocks.{i}.{part}" for i in (0, 1) for part in parts), "norm", "head"]
    wanted = ["pos_embed", "embedding.weight", *(f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias"))]
    assert [leaf.name for leaf in layout(spec_of("gpt")).leaves] == wanted


def test_each_layer_is_a_layer_block():
    for name in ("gru", "lstm"):
        assert layout(spec_of(name)).blocks == ("stem", "layers.0", "layers.1", "fc")
        assert layout(spec_of(name, layers=1)).blocks == ("stem", "layers.0", "fc")
        assert layout(spec_of(name), "stage").blocks == ("stem", "layers.0", "layers.1", "fc")
    assert layout(spec_of("gpt")).blocks == ("stem", "blocks.0", "blocks.1", "head")
    for name, options in SMALL.items():
        assert {leaf.layer for leaf in layout(spec_of(name, **options)).params if leaf.is_head} == {
            head_of(spec_of(name))
        }


def next_token_loss(outputs, batch):
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch.targets.flatten())


@pytest.mark.parametrize("name", SMALL)
def test_training_through_the_flat_vector_is_torchs(name):
    """The layers see the parameters that are views into the vector: the outputs follow it, and the steps are SGD's."""
    spec = spec_of(name)
    plain, tokens = build_model(spec, seed=1), tokens_of()
    batch = Batch(tokens, torch.randint(CLASSES, tokens.shape, generator=torch.Generator().manual_seed(6)))
    model = bound(copy.deepcopy(plain), head_of(spec))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    begun, before = model.params.clone(), model.forward(tokens).logits.detach()
    for step in range(3):
        if step:  # both ways of a local step
            model.params.add_(model.gradient_function(next_token_loss)(model.params, batch), alpha=-0.5)
        else:
            model.descend(next_token_loss, batch, 0.5)
        optimizer.zero_grad()
        F.cross_entropy(plain(tokens).flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
    after = model.forward(tokens).logits.detach()
    assert torch.allclose(after, plain(tokens).detach(), atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-3)
    for leaf in model.layout.params:
        value = plain.get_parameter(leaf.name).detach()
        assert torch.allclose(model.layout.view(model.params, leaf), value, atol=1e-5), leaf.name
        assert not torch.equal(model.layout.view(begun, leaf), value), leaf.name
    # At another point, by functional_call; without gradients PyTorch may compute in another order.
    assert torch.allclose(model.apply(begun, tokens).logits, before, atol=1e-5)
    assert torch.allclose(model.forward(tokens).logits.detach(), after, atol=1e-6)
    model.load(begun)
    assert torch.allclose(model.forward(tokens).logits.detach(), before, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_initial_values_come_from_the_seed_alone(name):
    first, again, other = (build_model(spec_of(name), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_branches_of_gpt_begin_small_by_depth():
    module = build_model(ModelSpec("gpt", 9, (8,), {"dim": 64, "depth": 8, "heads": 4}, vocabulary=9), seed=0)
    for block in module.requires_grad_(False).blocks:
        assert float(block.attn.proj.weight.std()) == pytest.approx(0.02 / 4, rel=0.1)
        assert float(block.mlp.fc2.weight.std()) == pytest.approx(0.02 / 4, rel=0.1)
        assert float(block.attn.qkv.weight.std()) == pytest.approx(0.02, rel=0.1)
        assert not block.attn.qkv.bias.any()


def test_dropout_acts_in_training_alone():
    module, tokens = module_of("gpt", dropout=0.5), tokens_of()
    assert torch.equal(module(tokens), module_of("gpt")(tokens))
    module.train()
    assert not torch.equal(module(tokens), module(tokens))
    for layer in (module.drop, *(block.drop for block in module.blocks)):
        layer.p = 0.0
    assert not torch.equal(module(tokens), module(tokens))  # the attention weights


def test_adapters_find_the_layers_of_gpt_by_default():
    spec = spec_of("gpt", lora=LoraSpec(rank=2))
    trained = {name for name, p in build_skeleton(spec).named_parameters() if p.requires_grad}
    layers = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    adapters = {f"{layer}.lora_{factor}.default.weight" for layer in layers for factor in "AB"}
    assert trained == adapters | {"head.weight", "head.bias"}
    module = build_model(spec, seed=3).eval()
    assert torch.equal(module(tokens_of()), build_model(spec_of("gpt"), seed=3).eval()(tokens_of()))


def test_adapters_go_on_a_gpt_that_was_trained_before(tmp_path):
    trained, path = module_of("gpt"), tmp_path / "model.safetensors"
    save_file(trained.state_dict(), path)
    spec = replace(spec_of("gpt", lora=LoraSpec(rank=2)), pretrained=str(path))
    try_model(spec)
    assert torch.allclose(build_model(spec, seed=9).eval()(tokens_of()), trained(tokens_of()), atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------

ROWS, IMAGES = {"input_shape": (13,)}, {"input_shape": (8, 8, 3)}
TEXT = {"input_shape": (6,), "vocabulary": 11}


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        *((name, ROWS, f"{name} reads tokens, and the inputs are numbers of shape") for name in SMALL),
        ("gru", {"input_shape": (4, 6), "vocabulary": 11}, "the inputs have shape (4, 6)"),
        ("mlp", TEXT, "mlp reads numbers, and the inputs are tokens; choose gru, lstm, gpt"),
        ("cnn", TEXT, "cnn reads images, and the inputs are tokens"),
        ("cnn", ROWS, "cnn reads images of (height, width, channels), and the inputs have shape (13,); choose mlp"),
        ("resnet18", {"input_shape": (8, 8)}, "resnet18 reads images"),
        ("timm:test_vit", ROWS, "timm:test_vit reads images"),
        ("tests.models.test_sequences:own_for_tokens", IMAGES, "reads tokens"),
        ("tests.support.models:too_few_outputs", TEXT, "too_few_outputs reads numbers, and the inputs are tokens"),
    ],
)
def test_inputs_that_a_model_cannot_read_are_one_sentence(name, inputs, words):
    with pytest.raises(ConfigError) as caught:
        try_model(ModelSpec(name, 3, **inputs))
    (fault,) = caught.value.faults
    assert fault.key == "model.name"
    assert words in fault.message


@pytest.mark.parametrize(
    ("name", "options", "words"), [("gpt", {"dim": 9, "heads": 2}, "dim must be a multiple of heads")]
)
def test_options_that_fit_no_input_are_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        try_model(spec_of(name, **options))


# --- mlp, and models of the user's own --------------------------------------------------------------------------------


def test_mlp_reads_numbers_of_any_shape_through_several_layers():
    spec = ModelSpec("mlp", 3, (4, 6), {"hidden": [9, 8, 5]})
    assert [leaf.name.partition(".")[0] for leaf in layout(spec).params[::2]] == ["fc1", "hidden2", "hidden3", "fc2"]
    assert layout(spec).num_params == 25 * 9 + 10 * 8 + 9 * 5 + 6 * 3
    assert layout(spec).blocks == ("fc1", "hidden2", "hidden3", "fc2")
    module, rows = build_model(spec, seed=0), torch.rand(2, 4, 6)
    x = rows.flatten(1)
    for layer in (module.fc1, module.hidden2, module.hidden3):
        x = torch.relu(x @ layer.weight.T + layer.bias)
    assert torch.allclose(module(rows), x @ module.fc2.weight.T + module.fc2.bias, atol=1e-6)
    one, several = (build_model(ModelSpec("mlp", 3, (13,), {"hidden": h}), seed=0).state_dict() for h in (5, [5]))
    assert one.keys() == several.keys()
    assert all(torch.equal(one[key], several[key]) for key in one)


def own_for_tokens(num_classes, input_shape, vocabulary, *, width: int = 4, outputs: int = 0):
    return torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, outputs or num_classes))


def test_a_model_of_ones_own_that_names_vocabulary_gets_it():
    name = "tests.models.test_sequences:own_for_tokens"
    spec = ModelSpec(name, 5, **TEXT)
    try_model(spec)
    assert build_model(spec, seed=0)[0].num_embeddings == 11
    with pytest.raises(ConfigError, match=r"classifier"):
        try_model(ModelSpec(name, 5, options={"outputs": 4}, head="1", **TEXT))


def prepared(folder, per_token):
    rows = np.random.default_rng(0).integers(0, 5, (60, 7))
    raysim.arrays(rows[:, :-1], rows[:, 1:] if per_token else rows[:, 0], name="text", root=folder, vocabulary=5)
    return {"data": {"name": "text", "root": str(folder)}, "partition": {"scheme": "iid", "num_clients": 3}}


@pytest.mark.parametrize("per_token", [True, False])
def test_answers_that_the_task_cannot_score_are_one_sentence(per_token, tmp_path):
    raw = prepared(tmp_path, per_token)
    right, wrong = ("token", "sequence") if per_token else ("sequence", "token")
    plan = check(raw | {"model": {"name": "gru", "hidden": 4, "per": right}}, "a test")
    assert (plan.spec.vocabulary, output_shape(plan.spec)) == (5, (6, 5) if per_token else (5,))
    (fault,) = faults_of(raw | {"model": {"name": "gru", "hidden": 4, "per": wrong}}).items()
    assert fault[0] == "task"
    assert "choose another model.per" in fault[1]
    name = "tests.models.test_sequences:own_for_tokens"
    own = raw | {"model": {"name": name}}
    assert output_shape(ModelSpec(name, 5, (6,), vocabulary=5)) == (6, 5)
    assert list(faults_of(own)) == ["task"] if not per_token else check(own, "a test").spec.name == name
    assert list(faults_of(raw | {"model": {"name": "mlp"}})) == ["model.name"]


def test_methods_prints_their_blocks_and_options():
    def printed(*words):
        result = CliRunner().invoke(app, ["methods", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    text = printed("--model", "gru", "--size", "20", "--classes", "65")
    assert "sequences of 20 of 65 tokens: " in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["stem", "layers.0", "layers.1", "fc"]
    assert "sequences of 80 of 10 tokens" in printed("--model", "gpt", "per=sequence")
    assert "vocabulary" not in printed("gpt").partition("Options:")[2]
    assert "per = token   (token | sequence)" in printed("lstm")
    result = CliRunner().invoke(app, ["methods", "--model", "gru", "vocabulary=9"])
    assert "model.vocabulary: unknown key" in str(result.exception)
