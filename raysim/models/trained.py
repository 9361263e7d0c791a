"""A trained model as a file that `model.pretrained` takes: the values of a run, back under the names of its module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.models.architecture import ModelSpec
from raysim.models.build import build_model, build_skeleton


def trained_tensors(
    spec: ModelSpec,
    layout: Layout,
    *,
    seed: int,
    state: Tensor,
    counters: Mapping[str, int],
) -> dict[str, Tensor]:
    """The whole state dict of the module at a state of the server: trained, frozen and counted, nothing left out.

    Everything, so that the file stands by itself wherever it is read. Trained leaves that are not shared are as they
    began: their values are at the clients. The module is built, and its pretrained weights read, only if it has frozen
    tensors, whose values no one else keeps.

    Args:
      seed: of the run; it gave the frozen tensors their values.
      state: [num_state], the server's; counters: name -> BatchNorm's num_batches_tracked and the like.
    """
    values = {name: value.contiguous().clone() for name, value in layout.views(state).items()}
    values |= {name: torch.tensor(count) for name, count in counters.items()}
    names = build_skeleton(spec).state_dict().keys()
    if not names <= values.keys():
        built = build_model(spec, seed=seed).state_dict()
        rest = {name: built[name].contiguous().clone() for name in names - values.keys()}
        values |= rest
    return {name: values[name] for name in names}
