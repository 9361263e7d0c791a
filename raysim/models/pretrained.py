"""Pretrained weights from a file or a library."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from raysim.base.errors import ModelError, explained
from raysim.folders.files import file_digest, seal_of
from raysim.models.architecture import Architecture, ModelSpec
from raysim.models.from_transformers import model_files


def pretrained_weights(architecture: Architecture, spec: ModelSpec) -> tuple[Mapping[str, Tensor], str] | None:
    """Return (pretrained weights of the specification, description of their source), or None without weights.

    On the meta device, tensors have names and shapes only: nothing is fetched, and no values are read.
    Raises:
      ModelError: the weights cannot be read or fetched.
    """
    if spec.pretrained is None:
        return None
    if spec.pretrained == "default":
        return _published(architecture, spec), f"the published weights of {spec.name}"
    path = Path(spec.pretrained).expanduser()
    return read_weights(path), str(path)


def weights_sha256(pretrained: str | None, name: str = "") -> str:
    """Return the SHA-256 of the file of weights; "" without weights, or for weights of a library.

    Args:
      name: name of the model; for a `transformers:` name, a seal of its files is appended, see `model_files`.
    Raises:
      ModelError: a file cannot be read.
    """
    path, files = Path(pretrained or "").expanduser(), model_files(name)
    with explained("cannot be read", path, "correct model.pretrained", OSError, to=ModelError):
        given = "" if pretrained in (None, "default") else file_digest(path)
        return given + (seal_of(files[0].parent, files) if files else "")


def _published(architecture: Architecture, spec: ModelSpec) -> Mapping[str, Tensor]:
    if architecture.published is None:
        raise ModelError(f"{spec.name} has no published weights", mend="give the path of a file, or drop pretrained")
    try:
        return architecture.published(spec.input_shape, spec.num_classes, **spec.options)
    except LookupError as error:
        raise ModelError(str(error), mend="give the path of a file, or drop pretrained") from error
    except Exception as error:  # errors of network, hub or disk: each library has its own classes
        what = f"the published weights of {spec.name} cannot be fetched ({type(error).__name__}: {error})"
        mend = "fetch the weights on a machine with a network, and set model.pretrained to the file"
        raise ModelError(what, mend=mend) from error


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the state dict in a .safetensors, .pth or .pt file; nothing but tensors is unpickled.

    Raises:
      ModelError: the file does not exist, is of another kind, or holds no dictionary of dense tensors.
    """
    from safetensors.torch import load_file  # maps the file: values are read on first use

    on_meta = torch.empty(0).is_meta  # torch.get_default_device of PyTorch 2.6 returns cpu here
    if not path.is_file():
        raise ModelError("no such file of weights", str(path), "correct model.pretrained, or use default")
    mend = "save a state dict as .safetensors, .pth or .pt"
    readable = explained("not a readable file of weights", path, mend, Exception, to=ModelError)  # two formats' parsers
    with readable, torch.device("cpu"):  # mapped tensors cost no memory; on the meta device their kind would be hidden
        weights: object = load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ModelError("not a dictionary of tensors", str(path), "save module.state_dict() alone")
    for name, value in weights.items():
        if not isinstance(name, str):
            mend = "save module.state_dict() alone: its names are texts"
            raise ModelError(f"a tensor is called {name!r}", str(path), mend)
        if value.is_meta or value.layout != torch.strided or value.is_quantized:
            kind = "a meta tensor, which has no values" if value.is_meta else "a sparse or quantised tensor"
            raise ModelError(f"{name} is {kind}", str(path), "save dense tensors with their values")
    return {name: value.to("meta") for name, value in weights.items()} if on_meta else weights


def _read_torch(path: Path) -> object:
    if path.suffix not in (".pth", ".pt"):
        raise ValueError(f"unknown suffix {path.suffix!r}")
    # A mapped file is read on first use of its values; files of PyTorch before 1.6 cannot be mapped.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], *, head: str, source: str) -> None:
    """Copy weights into a module, tensor by tensor.

    Names and shapes must be equal to the module's, with three exceptions:
      - The module's classifier keeps its values if the weights have another number of classes.
      - For a module with one input channel, a first convolution over three channels is summed over the channels, which
        gives the same features as repeating the grey image.
      - Counters such as BatchNorm's may be missing.
    Raises:
      ModelError: tensors do not fit, or a tensor holds an infinity or NaN; the module is then unchanged.
    """
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    loaded = dict(weights)
    first, row = next((name for name, value in state.items() if value.dim() == 4), ""), f"{head}.weight"
    if first in loaded and loaded[first].dim() == 4 and (state[first].shape[1], loaded[first].shape[1]) == (1, 3):
        loaded[first] = loaded[first].sum(1, keepdim=True)
    rows, own_rows = (list(leaves[row].shape) if row in leaves else [] for leaves in (loaded, state))
    if rows[1:] == own_rows[1:] and rows[:1] != own_rows[:1]:
        for name in [name for name in state if name.startswith(f"{head}.")]:
            del state[name]
            loaded.pop(name, None)
    counters = {name for name, value in state.items() if not value.is_floating_point() and value.dim() == 0}
    common = [(name, value, loaded[name]) for name, value in state.items() if name in loaded]
    faults = [f"{name} is missing" for name in state if name not in loaded and name not in counters]
    faults += [f"{name} is not in the model" for name in loaded if name not in state]
    faults += [f"{name} is {tuple(b.shape)} instead of {tuple(a.shape)}" for name, a, b in common if a.shape != b.shape]
    faults += [
        f"{name} holds {b.dtype} instead of {a.dtype}"
        for name, a, b in common
        if a.is_floating_point() != b.is_floating_point()
    ]
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        mend = "choose the model, the model's options, model.lora and data.resize to match the weights"
        raise ModelError(f"the model needs different tensors: {'; '.join(faults[:8])}{more},", source, mend)
    for name, _, value in common:
        if not (value.is_meta or bool(torch.isfinite(value).all())):
            mend = "choose weights of a training without divergence"
            raise ModelError(f"{name} holds an infinity or NaN", source, mend)
    with torch.no_grad():
        for _, leaf, value in common:
            leaf.copy_(value)
