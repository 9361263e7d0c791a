"""Models by name: raysim's, all of timm's, causal language models of transformers, and the user's.

The name of a user's model is `module:function`, for a function my_net(num_classes, input_shape, *, options) ->
nn.Module. A function of a model for tokens also takes `vocabulary`.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from raysim.base.errors import ConfigError, Fault, UserCodeError, did_you_mean
from raysim.base.user_code import user_function, with_given
from raysim.base.user_places import place_of
from raysim.models.architecture import Architecture, ModelSpec, Shape
from raysim.models.from_timm import TRANSFORMERS, knows, timm_architecture
from raysim.models.from_torchvision import TORCHVISION
from raysim.models.from_transformers import PREFIX, causal_architecture
from raysim.models.parts import library
from raysim.models.sequences import SEQUENCES
from raysim.models.small import SMALL

MODELS: dict[str, Architecture] = {**SMALL, **SEQUENCES, **TORCHVISION, **TRANSFORMERS}


def find_architecture(name: str) -> Architecture:
    """Return the architecture of a model by name.

    Names are raysim's, timm's (with or without `timm:`), `transformers:PATH`, or `module:function`.

    Raises:
      LookupError: the name is unknown (the error lists similar names), the model has not exactly one classifier, or the
        function cannot be used.
    """
    if name in MODELS:
        return MODELS[name]
    if name.startswith(PREFIX):
        return causal_architecture(name)
    prefix, _, network = name.rpartition(":")
    if prefix in ("", "timm") and knows(network):
        return timm_architecture(network)
    if prefix not in ("", "timm", "torchvision"):
        return user_architecture(name)
    hint = did_you_mean(network, [*MODELS, *library("timm").list_models()], most=3)
    others = "every model of timm, transformers:FOLDER; or module:function for your own"
    names = f"{', '.join(sorted(MODELS))}, {others}"
    raise LookupError(f"unknown model {name!r}. {hint}Known: {names}")


def import_libraries(name: str, *, has_lora: bool) -> None:
    """Import torchvision, timm or peft for a model, to share the library among forked processes. Ignores unknown names."""
    if has_lora:
        library("peft")
    if name in TORCHVISION or name == "resnet20":  # resnet20 has torchvision's blocks
        library("torchvision.models")
    elif name in TRANSFORMERS or (name not in MODELS and name.rpartition(":")[0] in ("", "timm")):
        library("timm")


def prefers_channels_last(spec: ModelSpec, module: nn.Module) -> bool:
    """Return whether the model was measured to train faster with channels-last convolutions, and is safe with them.

    For channels-last images, oneDNN's gradient of a narrow 1x1 convolution with a stride is wrong and writes outside
    its memory (uxlfoundation/oneDNN#6035): below 8 input channels with AVX2, below 16 with AVX-512.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    is_unsafe = any(c.kernel_size == (1, 1) != c.stride and c.in_channels < 16 for c in convolutions)
    return find_architecture(spec.name).prefers_channels_last and not is_unsafe


def user_architecture(name: str) -> Architecture:
    """Return the architecture of a user's model `module:function`.

    Raises:
      LookupError: the function does not exist, or does not take num_classes and input_shape.
    """
    function = user_function(name, "model")
    make = with_given(function, ("num_classes", "input_shape"), offered=("vocabulary",))
    reads_tokens = "vocabulary" in inspect.signature(function).parameters

    def build(shape: Shape, classes: int, /, **options: object) -> nn.Module:
        given = {"num_classes": classes, "input_shape": shape, **options}
        try:
            module = make(**given)
        except Exception as error:
            # Code that reads values while it builds, as `x.item() for x in torch.linspace(...)` does, fails on meta.
            if "meta" not in str(error) or torch.empty(0).device.type != "meta":
                raise
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                module = make(**given)
            module = module.to("meta") if isinstance(module, nn.Module) else module
        if not isinstance(module, nn.Module):
            what = f"a model's function returned {type(module).__name__}"
            raise UserCodeError(what, place_of(function), "return an nn.Module")
        return module

    build.__doc__ = function.__doc__
    build.__dict__.update(__signature__=inspect.signature(make), __wrapped__=function)  # options are checked by these
    return Architecture(build, head="", needs_trial=True, inputs="tokens" if reads_tokens else "numbers")


def last_linear(module: nn.Module, num_classes: int, name: str) -> str:
    """Return the path of an undeclared classifier: the last nn.Linear with an output for each class.

    Raises:
      ConfigError: no nn.Linear has this number of outputs.
    """
    layers = {path: layer for path, layer in module.named_modules() if path and isinstance(layer, nn.Linear)}
    heads = [path for path, layer in layers.items() if layer.out_features == num_classes]
    if not heads:
        text = f"{name} has no nn.Linear with {num_classes} outputs, one per class; add a linear classifier"
        raise ConfigError([Fault("model", text)])
    return heads[-1]
