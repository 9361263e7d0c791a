"""Construction of modules from a specification, checks of models, and state dicts of trained models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from raysim.base.errors import ConfigError, Fault, RaysimError
from raysim.base.ram import memory_fault
from raysim.base.user_places import user_errors
from raysim.core.layout import Layout
from raysim.core.seeding import derive_seed
from raysim.models.architecture import Architecture, ModelSpec
from raysim.models.lora import add_lora
from raysim.models.pretrained import load_weights, pretrained_weights
from raysim.models.registry import find_architecture, last_linear


def _construct(spec: ModelSpec) -> nn.Module:
    architecture = find_architecture(spec.name)
    _refuse_unfit_inputs(architecture, spec)
    given = {"vocabulary": spec.vocabulary} if architecture.inputs == "tokens" else {}
    module = architecture.build(spec.input_shape, spec.num_classes, **given, **spec.options)
    path = head_of(spec, module)
    head = module.get_submodule(path) if path in dict(module.named_modules()) else None
    if not isinstance(head, nn.Linear) or head.out_features != spec.num_classes:
        mend = f"use a linear layer with {spec.num_classes} outputs"
        text = f"the classifier {path} of {spec.name} is {head}; {mend}"
        raise ConfigError([Fault("model.head" if spec.head else "model", text)])
    return module


def _refuse_unfit_inputs(architecture: Architecture, spec: ModelSpec) -> None:
    """Raise ConfigError if the inputs are not of the kind (images, numbers, tokens) that the model reads."""
    shape, reads = spec.input_shape, architecture.inputs
    if reads == "tokens" and not spec.vocabulary:
        mend = "choose mlp, or a model for images"
        text = f"{spec.name} reads tokens, and the inputs are numbers of shape {shape}; {mend}"
    elif reads == "tokens" and len(shape) != 1:
        text = f"{spec.name} reads sequences of tokens, and the inputs have shape {shape}; give them one length"
    elif reads != "tokens" and spec.vocabulary:
        text = f"{spec.name} reads {reads}, and the inputs are tokens; choose gru, lstm, gpt or transformers:FOLDER"
    elif reads == "images" and len(shape) != 3:
        mend = "choose mlp, or module:function for your own"
        text = f"{spec.name} reads images of (height, width, channels), and the inputs have shape {shape}; {mend}"
    else:
        return
    raise ConfigError([Fault("model.name", text)])


def head_of(spec: ModelSpec, module: nn.Module | None = None) -> str:
    """Return the path of the classifier layer.

    Args:
      module: the built model, with or without adapters; None: a model is built if it is needed to find the path.
    """
    if path := find_architecture(spec.name).head or spec.head:
        return path
    if module is None:
        with torch.device("meta"):
            module = _construct(spec)
    return last_linear(module, spec.num_classes, spec.name)


def build_model(spec: ModelSpec, *, seed: int) -> nn.Module:
    """Return the module with initial values drawn from the seed, or with pretrained weights.

    The global random stream is restored.
    Raises:
      ModelError: the weights cannot be read or fetched, or do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return _loaded(_construct(spec), spec)


def build_skeleton(spec: ModelSpec) -> nn.Module:
    """Return the module on the meta device, without values, for checks."""
    with torch.device("meta"):
        return _adapted(_construct(spec), spec)


def _adapted(module: nn.Module, spec: ModelSpec) -> nn.Module:
    return module if spec.lora is None else add_lora(module, spec.lora, head=head_of(spec, module))


def _loaded(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """Return the module with pretrained weights and adapters, if any; adapters are new unless the weights hold them."""
    pretrained = pretrained_weights(find_architecture(spec.name), spec)
    if pretrained is None:
        return _adapted(module, spec)
    weights, source = pretrained
    head = head_of(spec, module)
    has_adapters = any(".lora_A." in name for name in weights)
    module = _adapted(module, spec) if has_adapters else module
    load_weights(module, weights, head=head, source=source)
    return module if has_adapters else _adapted(module, spec)


def try_model(spec: ModelSpec) -> None:
    """Check that a model can be built, run and loaded. Models of libraries stay on the meta device; nothing is fetched.

    Only models with `needs_trial` are run, since the first operation on the meta device costs 1.5 s of imports. A
    user's model is built and run with values, since its code may depend on values, which the meta device does not have.

    Raises:
      ValueError: the model cannot be built with these options, or cannot run on these inputs.
      ConfigError: the classifier, the kind of inputs or the outputs of the model do not fit.
      ModelError: the pretrained weights are missing or do not fit.
    """
    try:
        architecture = find_architecture(spec.name)
        with torch.device("meta"):
            skeleton = _construct(spec)
        if text := memory_fault(sum(4 * leaf.numel() for leaf in skeleton.parameters())):
            raise ValueError(f"its parameters {text}")
        if architecture.needs_trial:
            is_own = not architecture.head
            _run(build_model(replace(spec, pretrained=None, lora=None), seed=0) if is_own else skeleton, spec)
    except RaysimError:
        raise
    except Exception as error:  # whatever the libraries' own code raises
        raise ValueError(str(error) or type(error).__name__) from error
    with torch.device("meta"):
        _loaded(skeleton, spec)


def output_shape(spec: ModelSpec) -> tuple[int, ...]:
    """Return the shape of the outputs for one example: (num_classes,), or (length, num_classes) for outputs per token.

    A user's model for tokens is built and run to find the shape.
    """
    one = (spec.num_classes,)
    if not spec.vocabulary or spec.options.get("per") == "sequence":
        return one
    if not find_architecture(spec.name).needs_trial:
        return *spec.input_shape, *one
    with torch.no_grad(), torch.random.fork_rng(devices=[]), user_errors():
        return tuple(build_model(replace(spec, pretrained=None, lora=None), seed=0)(_two_inputs(spec)).shape[1:])


def _run(skeleton: nn.Module, spec: ModelSpec) -> None:
    device = next(skeleton.parameters()).device
    with device, torch.no_grad(), torch.random.fork_rng(devices=[]), user_errors():
        torch.manual_seed(0)
        logits = skeleton.train()(_two_inputs(spec))
    shapes: list[tuple[int, ...]] = [(2, spec.num_classes)]
    if spec.vocabulary:  # outputs for the sequence, or for each of its tokens
        shapes.append((2, *spec.input_shape, spec.num_classes))
    if not isinstance(logits, Tensor) or logits.shape not in shapes:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        wanted = " or ".join(map(str, shapes))
        text = f"{spec.name} gives {given} for 2 inputs and {spec.num_classes} outputs; expected {wanted}"
        raise ConfigError([Fault("model", text)])
    if not logits.is_meta and not bool(torch.isfinite(logits).all()):
        text = f"{spec.name} returns non-finite logits for random inputs, at the initial values"
        raise ConfigError([Fault("model", text)])


def _two_inputs(spec: ModelSpec) -> Tensor:
    """Return (2, ...) random inputs as in training. Not zeros: a model may divide by the deviation of an image."""
    shape = spec.input_shape
    if spec.vocabulary:
        return torch.randint(spec.vocabulary, (2, *shape))
    if len(shape) == 3:
        height, width, channels = shape
        return torch.rand(2, channels, height, width)
    return torch.rand(2, *shape)


def trained_tensors(
    spec: ModelSpec, layout: Layout, *, seed: int, state: Tensor, counters: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the complete state dict of the module at a state of the server: trained and frozen tensors, and counters.

    Trained tensors may share memory with `state`. Personal leaves have their initial values, since the trained values
    are at the clients. The module is built, and pretrained weights are read, only if the module has frozen tensors,
    which the server does not keep.

    Args:
      seed: seed of the run, from which frozen tensors were initialised.
      state: [num_state], state of the server.
      counters: name -> integer buffer, such as BatchNorm's num_batches_tracked.
    """
    values = {name: value.contiguous() for name, value in layout.views(state).items()}
    values |= {name: torch.tensor(count) for name, count in counters.items()}
    names = build_skeleton(spec).state_dict().keys()
    if not names <= values.keys():
        built = build_model(spec, seed=seed).state_dict()
        values |= {name: built[name].contiguous().clone() for name in names - values.keys()}
    return {name: values[name] for name in names}
