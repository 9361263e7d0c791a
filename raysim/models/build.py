"""From a specification to a module: with its initial values, or only its structure."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raysim.core.seeding import derive_seed
from raysim.models.architecture import ModelSpec
from raysim.models.lora import add_lora
from raysim.models.pretrained import load_weights, pretrained_weights
from raysim.models.registry import find_architecture


def _construct(spec: ModelSpec) -> nn.Module:
    architecture = find_architecture(spec.name)
    module = architecture.build(spec.input_shape, spec.num_classes, **spec.options)
    head = module.get_submodule(architecture.head)
    if not isinstance(head, nn.Linear) or head.out_features != spec.num_classes:
        raise ValueError(
            f"the classifier {architecture.head} of {spec.name} is {head}; "
            f"raysim needs one linear layer with {spec.num_classes} outputs"
        )
    return module


def build_model(spec: ModelSpec, *, seed: int) -> nn.Module:
    """The module with its initial values: drawn from the seed, then overlaid with the pretrained weights if any.

    The global random stream is left alone.
    Raises:
      ModelError: weights that cannot be had or do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return _loaded(_construct(spec), spec)


def build_skeleton(spec: ModelSpec) -> nn.Module:
    """The module's structure without memory (meta device), for checks."""
    with torch.device("meta"):
        return _adapted(_construct(spec), spec)


def _adapted(module: nn.Module, spec: ModelSpec) -> nn.Module:
    return module if spec.lora is None else add_lora(module, spec.lora, head=find_architecture(spec.name).head)


def _loaded(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module with its pretrained weights, and adapters: new ones, unless the weights hold some to go on from."""
    architecture = find_architecture(spec.name)
    pretrained = pretrained_weights(architecture, spec)
    if pretrained is None:
        return _adapted(module, spec)
    weights, source = pretrained
    has_adapters = any(".lora_A." in name for name in weights)
    module = _adapted(module, spec) if has_adapters else module
    load_weights(module, weights, head=architecture.head, source=source)
    return module if has_adapters else _adapted(module, spec)


def try_model(spec: ModelSpec) -> None:
    """Everything that can go wrong with a model, tried on the meta device: nothing is computed, loaded or fetched.

    Only some models are run: the first operation on the meta device costs PyTorch 1.5 s of imports.

    Raises:
      ValueError: it cannot be built, or cannot be trained on such inputs. ModelError: the pretrained weights are not
      there or do not fit.
    """
    try:
        architecture = find_architecture(spec.name)
        with torch.device("meta"):
            skeleton = _construct(spec)
        if architecture.needs_trial:
            _run(skeleton, spec)
    except Exception as error:  # whatever the libraries' own code raises
        raise ValueError(str(error) or type(error).__name__) from error
    with torch.device("meta"):
        _loaded(skeleton, spec)


def _run(skeleton: nn.Module, spec: ModelSpec) -> None:
    height, width, channels = spec.input_shape
    with torch.device("meta"), torch.no_grad():
        logits = skeleton.train()(torch.zeros(2, channels, height, width))
    if not isinstance(logits, Tensor) or logits.shape != (2, spec.num_classes):
        raise ValueError(f"{spec.name} does not give one logit for each class")
