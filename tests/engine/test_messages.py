"""What crosses between server and trainers shares no memory with what was sent."""

from __future__ import annotations

import numpy as np
import torch

from raysim.core.weights import RightMap
from raysim.engine.messages import map_leaves, message_bytes, pack, unpack


def test_what_is_unpacked_may_be_written():
    sent = {"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64), (RightMap(torch.zeros(1, 2, 2)), "x", None)]}
    packed = pack(sent)
    got = unpack(packed)
    map_leaves(lambda leaf: leaf.add_(1) if isinstance(leaf, torch.Tensor) else leaf, got)
    assert got["b"][1][0].maps.sum() == 4
    assert got["b"][1][1:] == ("x", None)
    for value in (packed, sent):
        assert message_bytes(value) == 12 + 16 + 16
        map_leaves(lambda leaf: leaf.any() and _is_wrong(leaf) if hasattr(leaf, "any") else leaf, value)
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    assert unpack(frozen).add_(1).tolist() == [1, 1]


def _is_wrong(leaf):
    raise AssertionError(f"{leaf} was written")
