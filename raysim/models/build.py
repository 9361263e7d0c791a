"""From a specification to a module: with its initial values, or only its structure."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from raysim.core.errors import ConfigError, Fault, RaysimError
from raysim.core.own import own_errors
from raysim.core.seeding import derive_seed
from raysim.models.architecture import ModelSpec
from raysim.models.lora import add_lora
from raysim.models.own import last_linear
from raysim.models.pretrained import load_weights, pretrained_weights
from raysim.models.registry import find_architecture


def _construct(spec: ModelSpec) -> nn.Module:
    module = find_architecture(spec.name).build(spec.input_shape, spec.num_classes, **spec.options)
    path = _head_in(module, spec)
    head = module.get_submodule(path) if path in dict(module.named_modules()) else None
    if not isinstance(head, nn.Linear) or head.out_features != spec.num_classes:
        text = (
            f"the classifier {path} of {spec.name} is {head}; it must be a linear layer with {spec.num_classes} outputs"
        )
        raise ConfigError([Fault("model.head" if spec.head else "model", text)])
    return module


def _head_in(module: nn.Module, spec: ModelSpec) -> str:
    """Path of the classifier layer of a module built for this specification, with adapters or without."""
    known = find_architecture(spec.name).head or spec.head
    return known or last_linear(module, spec.num_classes, spec.name)


def head_of(spec: ModelSpec) -> str:
    """Path of the classifier layer."""
    known = find_architecture(spec.name).head or spec.head
    if known:
        return known
    with torch.device("meta"):
        return _head_in(_construct(spec), spec)


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
    return module if spec.lora is None else add_lora(module, spec.lora, head=_head_in(module, spec))


def _loaded(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module with its pretrained weights, and adapters: new ones, unless the weights hold some to go on from."""
    architecture = find_architecture(spec.name)
    pretrained = pretrained_weights(architecture, spec)
    if pretrained is None:
        return _adapted(module, spec)
    weights, source = pretrained
    head = _head_in(module, spec)
    has_adapters = any(".lora_A." in name for name in weights)
    module = _adapted(module, spec) if has_adapters else module
    load_weights(module, weights, head=head, source=source)
    return module if has_adapters else _adapted(module, spec)


def try_model(spec: ModelSpec) -> None:
    """Everything that can go wrong with a model, tried on the meta device: nothing is computed, loaded or fetched.

    Only some models are run: the first operation on the meta device costs PyTorch 1.5 s of imports. One of the user's own is
    run in earnest: what it does may depend on values, which the meta device does not have.

    Raises:
      ValueError: it cannot be built with these options, or cannot be trained on such inputs. ConfigError: its form is wrong,
      whatever the inputs. ModelError: the pretrained weights are not there or do not fit.
    """
    try:
        architecture = find_architecture(spec.name)
        with torch.device("meta"):
            skeleton = _construct(spec)
        if architecture.needs_trial:
            is_own = not architecture.head
            _run(build_model(replace(spec, pretrained=None, lora=None), seed=0) if is_own else skeleton, spec)
    except RaysimError:
        raise
    except Exception as error:  # whatever the libraries' own code raises
        raise ValueError(str(error) or type(error).__name__) from error
    with torch.device("meta"):
        _loaded(skeleton, spec)


def _run(skeleton: nn.Module, spec: ModelSpec) -> None:
    height, width, channels = spec.input_shape
    device = next(skeleton.parameters()).device
    with device, torch.no_grad(), torch.random.fork_rng(devices=[]), own_errors():
        logits = skeleton.train()(torch.zeros(2, channels, height, width))
    if not isinstance(logits, Tensor) or logits.shape != (2, spec.num_classes):
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        text = f"{spec.name} gives {given} for 2 images and {spec.num_classes} classes; it must give a logit for each class"
        raise ConfigError([Fault("model", text)])
