"""Causal language models of Hugging Face's transformers, from a local folder or configuration file.

Nothing is downloaded, and code in a model's folder is not run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from raysim.base.errors import ConfigError, Fault
from raysim.models.architecture import Architecture, Shape
from raysim.models.parts import library, unfit_option

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

#: Prefix of the path in a model's name.
PREFIX = "transformers:"


def causal_architecture(name: str) -> Architecture:
    """Return the architecture of a model named `transformers:PATH`.

    Raises:
      LookupError: there is neither a folder with config.json and safetensors nor a configuration file.
    """
    path = _path_of(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LookupError(f"{path} has no config.json; name the folder that save_pretrained wrote")
        mend = "save the model with save_pretrained, or name a config.json for random weights"
        if not any(path.glob("*.safetensors")):
            raise LookupError(f"{path} has no weights as .safetensors; {mend}")
    elif not path.is_file():
        raise LookupError(f"{path} does not exist; name a folder written by save_pretrained, or a configuration file")
    return Architecture(partial(causal_lm, path), head="", size=80, inputs="tokens")


def with_whole_path(name: str) -> str:
    """Return a model's name with an absolute path, for processes in another working directory."""
    return f"{PREFIX}{_path_of(name).absolute()}" if name.startswith(PREFIX) else name


def model_files(name: str) -> list[Path]:
    """Return the configuration and weight files of a `transformers:` name; empty for other names."""
    if not name.startswith(PREFIX):
        return []
    path = _path_of(name)
    return [path / "config.json", *sorted(path.glob("*.safetensors"))] if path.is_dir() else [path]


def _path_of(name: str) -> Path:
    return Path(name.removeprefix(PREFIX)).expanduser()


def causal_lm(path: Path, shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    """A causal language model of transformers, with a folder's weights, or random weights for a configuration file.

    Inputs are tokens (B, length), outputs logits (B, length, vocabulary). Embedding and output layer have one row for
    each token of the data; with a folder, the first rows of its weights. Tied layers are untied: both begin with the
    folder's values and are trained separately. All tensors are float32. On the meta device no weights are read.
    """
    if classes != vocabulary:
        text = f"predicts the next token: as many outputs as tokens, got {classes} and {vocabulary}; choose gru, lstm or gpt"
        raise unfit_option(f"{PREFIX}{path} {text}")
    config = _config(path)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and shape[0] > longest:
        raise unfit_option(f"{path} reads {longest} tokens at most, the sequences have {shape[0]}; shorten them")
    if path.is_dir() and config.vocab_size < vocabulary:
        mend = "prepare the text with the tokens of the model"
        raise unfit_option(f"{path} knows {config.vocab_size} tokens, and the data have {vocabulary}; {mend}")
    is_read = path.is_dir() and not torch.empty(0).is_meta
    module = _read(path, config, vocabulary) if is_read else _made(config, vocabulary)
    module.config.use_cache = False
    _make_linear_(module)
    module.register_forward_hook(_logits)
    return module.float()


def _config(path: Path) -> PretrainedConfig:
    try:
        load = library("transformers").AutoConfig.from_pretrained
        config = load(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:  # no JSON, missing or unknown model_type, ...
        first, _, _ = str(error).partition("\n")
        text = f"{path} is not a configuration for transformers ({first}); give a configuration with a known model_type"
        raise ConfigError([Fault("model.name", text)]) from error
    config.is_decoder = True  # otherwise BERT and similar models attend to later tokens
    return config


def _made(config: PretrainedConfig, vocabulary: int) -> PreTrainedModel:
    """Return the model with values drawn from the global random stream."""
    config.vocab_size = vocabulary
    config.tie_word_embeddings = False
    # No special tokens: the embedding of a padding token would not be trained, and here every token is text.
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return library("transformers").AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _read(path: Path, config: PretrainedConfig, vocabulary: int) -> PreTrainedModel:
    """Return the model with the weights of its folder."""
    library("transformers.utils.logging").disable_progress_bar()
    load = library("transformers").AutoModelForCausalLM.from_pretrained
    safely = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    module, report = load(path, config=config, **safely, output_loading_info=True)
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:8])
        raise unfit_option(f"the weights in {path} lack {names}; save the whole model with the output layer")
    if len(module.get_input_embeddings().weight) != vocabulary:
        module.resize_token_embeddings(vocabulary)
    _untie_(module)
    module.config.tie_word_embeddings = False
    return module


def _untie_(module: nn.Module) -> None:
    """Replace parameters shared by several layers by separate copies."""
    seen: set[int] = set()
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            layer, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(layer), leaf, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))


def _make_linear_(module: nn.Module) -> None:
    """Replace GPT-2's linear layers, with weights [in, out], by nn.Linear, for methods and adapters."""
    conv1d = library("transformers.pytorch_utils").Conv1D
    for name, layer in list(module.named_modules()):
        if isinstance(layer, conv1d):
            inputs, outputs = layer.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.weight, linear.bias = nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias
            module.set_submodule(name, linear)


def _logits(module: nn.Module, inputs: tuple[Tensor, ...], output: CausalLMOutput) -> Tensor | None:
    return output.logits
