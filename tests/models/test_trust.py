"""Files of others are data: code that is pickled in them is not run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from raysim.base.errors import RaysimError
from raysim.data.sources import prepare
from raysim.folders.run_folder import RunFolder
from raysim.models.pretrained import read_weights


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def arrays_of_a_run(folder: Path, payload: Payload) -> None:
    (folder / "arrays").mkdir()
    np.savez(folder / "arrays" / "round_00000.npz", **{"m.a": np.array([payload], dtype=object)})
    for _, arrays in RunFolder(folder).logged_arrays():
        _ = arrays["m.a"]


def weights(folder: Path, payload: Payload) -> None:
    (folder / "weights.pth").write_bytes(pickle.dumps({"fc.weight": payload}))
    read_weights(folder / "weights.pth")


def images_of_a_set(folder: Path, payload: Payload) -> None:
    np.savez(folder / "set.npz", images=np.array([payload], dtype=object), labels=np.zeros(1, np.int64))
    prepare("npz", folder / "data", folder / "set.npz", save_as="mine")


@pytest.mark.parametrize("read", [arrays_of_a_run, weights, images_of_a_set])
def test_pickled_code_is_not_run(read, tmp_path):
    payload = Payload(tmp_path / "marker")
    pickle.loads(pickle.dumps(payload))
    payload.marker.rmdir()  # it would have been run
    with pytest.raises(RaysimError):
        read(tmp_path, payload)
    assert not payload.marker.exists()
