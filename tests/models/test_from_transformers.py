"""Causal language models of transformers: their own numbers, offline, with a head and blocks that methods know."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from raysim.base.errors import ConfigError
from raysim.core.method import Batch
from raysim.models import LoraSpec, ModelSpec, build_model, build_skeleton, find_architecture, head_of, try_model
from raysim.models.from_transformers import with_whole_path
from raysim.models.pretrained import weights_sha256
from raysim.plan.check import inspect_model
from tests.support.models import bound, layout

TOKENS, LENGTH = 23, 6
SMALL = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 12}
TINY = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}

#: Family -> (configuration, path of its output layer, prefix of its layer blocks, layers for adapters).
FAMILIES = {
    "gpt2": (
        {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12},
        "lm_head",
        "transformer.h",
        ("c_attn", "c_fc"),
    ),
    "llama": (TINY, "lm_head", "model.layers", ("q_proj", "v_proj")),
    "qwen2": ({**TINY, "num_key_value_heads": 1, "tie_word_embeddings": True}, "lm_head", "model.layers", ("q_proj",)),
    "gpt_neox": (TINY, "lm_head", "gpt_neox.layers", ("query_key_value",)),
    "bert": (TINY, "cls.predictions.decoder", "bert.encoder.layer", ("query",)),
}
family = pytest.mark.parametrize(
    "family", [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refused(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


def saved(family, folder, *, dtype=torch.float32):
    """A model of this family with large random weights, and the folder that it is saved in."""
    common = {key: value for key, value in SMALL.items() if family != "gpt2" or key != "max_position_embeddings"}
    config = transformers.AutoConfig.for_model(family, **common, **FAMILIES[family][0], is_decoder=True)
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter += 0.2 * torch.randn(parameter.shape)
    module.save_pretrained(folder)
    return module.float()


def spec_of(path, tokens=TOKENS, **more):
    return ModelSpec(f"transformers:{path}", tokens, (LENGTH,), vocabulary=tokens, **more)


def tokens_of(tokens=TOKENS):
    return torch.randint(tokens, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def shapes(module):
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


@family
def test_a_folder_is_the_model_that_was_saved(family, tmp_path):
    theirs, spec, tokens = saved(family, tmp_path), spec_of(tmp_path), tokens_of()
    try_model(spec)
    ours = build_model(spec, seed=0).eval()
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
    assert shapes(ours) == shapes(build_skeleton(spec))
    _, head, prefix, _ = FAMILIES[family]
    assert head_of(spec) == head
    assert layout(spec).blocks == ("stem", f"{prefix}.0", f"{prefix}.1", head)


@family
def test_a_later_token_changes_no_earlier_logit(family, tmp_path):
    saved(family, tmp_path)
    module, tokens = build_model(spec_of(tmp_path), seed=0).eval().requires_grad_(False), tokens_of()
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % TOKENS
    moved = (module(other) - module(tokens)).abs().amax((0, 2))
    assert (moved[:3] == 0).all()
    assert (moved[3:] > 1e-4).all()


@family
def test_a_configuration_file_gives_random_weights_for_the_tokens_of_the_data(family, tmp_path):
    saved(family, tmp_path)
    spec = spec_of(tmp_path / "config.json", tokens=40)
    try_model(spec)
    first, again, other = (build_model(spec, seed=seed) for seed in (1, 1, 2))
    assert first(tokens_of(40)).shape == (3, LENGTH, 40)
    weight = f"{head_of(spec)}.weight"
    assert torch.equal(first.get_parameter(weight), again.get_parameter(weight))
    assert not torch.equal(first.get_parameter(weight), other.get_parameter(weight))
    assert not torch.equal(first.get_parameter(weight), first.get_input_embeddings().weight)
    assert shapes(first) == shapes(build_skeleton(spec))


def test_tied_weights_are_trained_apart_from_one_value(tmp_path):
    theirs = saved("gpt2", tmp_path)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    ours = build_model(spec_of(tmp_path), seed=0)
    assert torch.equal(ours.lm_head.weight, ours.transformer.wte.weight)
    assert ours.lm_head.weight is not ours.transformer.wte.weight
    assert {"lm_head.weight", "transformer.wte.weight"} <= {leaf.name for leaf in layout(spec_of(tmp_path)).params}


def test_fewer_tokens_keep_the_first_rows(tmp_path):
    theirs, tokens = saved("gpt2", tmp_path), tokens_of(15)
    ours = build_model(spec_of(tmp_path, 15), seed=0).eval()
    assert torch.allclose(ours(tokens), theirs(tokens).logits[..., :15], atol=1e-5)
    assert shapes(ours) == shapes(build_skeleton(spec_of(tmp_path, 15)))


def test_half_precision_is_read_as_float32(tmp_path):
    theirs, tokens = saved("gpt2", tmp_path, dtype=torch.bfloat16), tokens_of()
    ours = build_model(spec_of(tmp_path), seed=0).eval()
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)


def next_token_loss(outputs, batch):
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch.targets.flatten())


@family
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_step_moves_everything_that_is_trained(family, has_adapters, tmp_path):
    saved(family, tmp_path)
    lora = LoraSpec(2, targets=FAMILIES[family][3]) if has_adapters else None
    spec, tokens = replace(spec_of(tmp_path), lora=lora), tokens_of()
    module, head = build_model(spec, seed=0), head_of(spec)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if has_adapters:
        adapters = [name for name in names if ".lora_" in name]
        assert len(adapters) == 2 * 2 * len(lora.targets)
        assert {name.rpartition(".")[0] for name in set(names) - set(adapters)} == {head}
        assert torch.allclose(module.eval()(tokens), build_model(replace(spec, lora=None), seed=0).eval()(tokens))
    model = bound(module, head, trained=names)
    model.module.eval()  # without dropout
    begun, before = model.params.clone(), model.forward(tokens).logits.detach()
    for _ in range(2):  # in the first, B is zero and A has no gradient
        model.descend(next_token_loss, Batch(tokens[:, :-1], tokens[:, 1:]), 0.5)
    still = [
        leaf.name
        for leaf in model.layout.params
        if torch.equal(*(model.layout.view(v, leaf) for v in (begun, model.params)))
    ]
    # A key's bias adds the same to all scores of a position; BERT's other bias was that of its output layer under a second name.
    assert [name for name in still if not name.endswith(("key.bias", "predictions.bias"))] == []
    assert not torch.allclose(model.forward(tokens).logits.detach(), before, atol=1e-3)
    assert torch.allclose(model.apply(begun, tokens).logits, before, atol=1e-5)


def test_paths_become_whole_and_the_command_line_knows_them(tmp_path, monkeypatch):
    saved("gpt2", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert with_whole_path("transformers:mine") == f"transformers:{tmp_path / 'mine'}"
    assert with_whole_path("gpt") == "gpt"
    spec, made, text = inspect_model("transformers:mine/config.json", {}, 8, 3, 40)
    assert (spec.input_shape, spec.vocabulary) == ((8,), 40)
    assert made.blocks[-1] == "lm_head"
    assert text.startswith("A causal language model of transformers")


def test_a_resumed_run_would_see_that_the_folder_changed(tmp_path):
    saved("gpt2", tmp_path)
    name = f"transformers:{tmp_path}"
    assert weights_sha256(None, "gpt") == ""
    digests = [weights_sha256(None, name), weights_sha256(None, f"{name}/config.json")]
    for file in ("model.safetensors", "config.json"):
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes() + b" ")
        digests.append(weights_sha256(None, name))
    assert len(set(digests)) == 4
    assert weights_sha256(str(tmp_path / "config.json"), "gpt") + digests[-1] == weights_sha256(
        str(tmp_path / "config.json"), name
    )


def test_what_lies_at_the_path_is_looked_at(tmp_path):
    for path, words in (("nothing", "does not exist"), (".", "has no config.json")):
        with pytest.raises(LookupError, match=words):
            find_architecture(f"transformers:{tmp_path / path}")
    saved("gpt2", tmp_path)
    weights = tmp_path / "model.safetensors"
    kept = weights.read_bytes()
    weights.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LookupError, match=r"no weights as \.safetensors"):
        find_architecture(f"transformers:{tmp_path}")
    weights.write_bytes(kept)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"model_type": "no_such"}, "is not a configuration for transformers"),
        (
            {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "no_such"},
            "is not a configuration for transformers",
        ),
        ({"n_layer": 3}, r"lack .*transformer\.h\.2"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=words):
            build_model(spec_of(tmp_path), seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocabulary": 24, "num_classes": 24}, "knows 23 tokens, and the data have 24"),
        ({"num_classes": 2}, "predicts the next token: as many outputs as tokens, got 2 and 23"),
        ({"input_shape": (13,)}, "reads 12 tokens at most, the sequences have 13"),
        ({"vocabulary": 0}, "reads tokens, and the inputs are numbers"),
        ({"lora": LoraSpec(2)}, "name layers of the model: transformer.h.0.attn.c_attn"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_weights_are_read(change, words, tmp_path):
    saved("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=words):
        try_model(replace(spec_of(tmp_path), **change))
