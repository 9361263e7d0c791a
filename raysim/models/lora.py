"""LoRA: low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from raysim.base.errors import ConfigError, Fault
from raysim.base.ram import memory_fault
from raysim.models.parts import library

#: The adapted layers of a timm ViT: qkv, attention output projection and both MLP layers of every block.
VIT_TARGETS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class LoraSpec:
    """W x -> W x + (alpha / rank) B A x with W frozen, A [rank, d_in], B [d_out, rank].

    Attributes:
      alpha: see above; None: alpha = rank, so that B A has the factor 1 (LIVAR).
      targets: a layer is adapted if its path equals a target T or ends in ".T".
      dropout: dropout of the adapters' input in training.
    """

    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = VIT_TARGETS
    dropout: float = 0.0


def add_lora(module: nn.Module, spec: LoraSpec, *, head: str) -> nn.Module:
    """Return the module with adapters; only adapters and the head, which is trained completely, require gradients.

    A is Kaiming-uniform with a = sqrt(5) from the global random stream, and B is zero, so outputs do not change. The
    leaves of an adapted layer are <layer>.lora_A.default.weight and <layer>.lora_B.default.weight; the frozen matrix is
    <layer>.base_layer.weight.

    Raises:
      ConfigError: no layer matches the targets, the head or a layer inside PyTorch's attention matches, or the adapters
        need too much memory.
    """
    parts = dict(module.named_modules())
    adapted = [name for name in parts if any(f".{name}".endswith(f".{target}") for target in spec.targets)]
    attentions = {name for name, part in parts.items() if isinstance(part, nn.MultiheadAttention)}
    if unused := [name for name in adapted if name.rpartition(".")[0] in attentions]:
        text = f"PyTorch's attention reads {unused[0]} and never calls the layer; name {unused[0].rpartition('.')[0]} instead"
        raise ConfigError([Fault("model.lora.targets", text)])
    if not adapted:
        kinds = nn.Linear | nn.Conv2d | nn.MultiheadAttention
        layers = (name for name, part in parts.items() if isinstance(part, kinds))
        others = [name for name in layers if name != head and name.rpartition(".")[0] not in attentions]
        listed = f"{', '.join(others[:8])}{' ...' if len(others) > 8 else ''}"
        mend = f"name layers of the model: {listed}" if others else "only the head is left; remove model.lora"
        raise ConfigError([Fault("model.lora.targets", f"no layer is called {' or '.join(spec.targets)}; {mend}")])
    if head in adapted:
        text = f"{head} is the head, which is trained whole; remove the name"
        raise ConfigError([Fault("model.lora.targets", text)])
    entries = sum(sum(weight.shape) for name in adapted if (weight := getattr(parts[name], "weight", None)) is not None)
    if text := memory_fault(4 * spec.rank * entries):  # peft allocates them, wherever the module lies
        raise ConfigError([Fault("model.lora.rank", f"adapters of rank {spec.rank} {text}; lower the rank")])
    alpha = spec.rank if spec.alpha is None else spec.alpha
    peft = library("peft")  # 3 s
    # The annotation of lora_alpha says int; peft divides it by the rank, for which any number does.
    config = peft.LoraConfig(r=spec.rank, lora_alpha=alpha, target_modules=adapted, lora_dropout=spec.dropout)
    module = peft.inject_adapter_in_model(config, module)
    for parameter in module.get_submodule(head).parameters():
        parameter.requires_grad_(True)
    return module
