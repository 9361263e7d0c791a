"""The folder of checkpoints: whole or not at all, and a damaged one put aside for the one before it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raysim.base.errors import RaysimError
from raysim.engine.checkpoint import CheckpointStore, _digest_of
from raysim.engine.messages import Snapshot


def test_checkpoint_is_whole_or_not_at_all(tmp_path):
    store = CheckpointStore(tmp_path)
    for number in range(1, 5):
        methods = {"m": {"n": number, "list": [np.eye(2), "x", None]}}
        snapshot = Snapshot(np.full(3, number, np.float32), {}, methods)
        store.save(number, snapshot, [(number % 2, {"m": {"v": np.full(2, number)}})])
    assert sorted(p.name for p in tmp_path.glob("round-*")) == ["round-000003", "round-000004"]
    assert not list(tmp_path.rglob("*.part"))
    (tmp_path / ".round-000009.1.part").mkdir()  # what a killed process leaves
    fresh = CheckpointStore(tmp_path)
    checkpoint = fresh.latest()
    assert checkpoint.next_round == 4
    assert checkpoint.snapshot.methods["m"]["n"] == 4
    assert (checkpoint.snapshot.methods["m"]["list"][0] == np.eye(2)).all()
    assert {c: fresh.read_memory(p)["m"]["v"].tolist() for c, p in checkpoint.memories.items()} == {
        1: [3, 3],
        0: [4, 4],
    }


def _stored(folder):
    """Three checkpoints, the last two kept; each with what two clients keep."""
    store = CheckpointStore(folder)
    for number in range(1, 4):
        snapshot = Snapshot(np.full(3, number, np.float32), {"n": number}, {"m": {"v": np.array(float(number))}})
        store.save(number, snapshot, [(client, {"m": {"v": np.full(2, number)}}) for client in (0, 1)])


def test_arrays_come_back_in_their_shape(tmp_path):
    _stored(tmp_path)
    value = CheckpointStore(tmp_path).latest().snapshot.methods["m"]["v"]
    assert (value.shape, float(value)) == ((), 3.0)


def test_memories_that_do_not_change_after_a_restart_stay(tmp_path):
    _stored(tmp_path)
    store = CheckpointStore(tmp_path)
    snapshot = store.latest().snapshot
    for number in range(4, 8):
        store.save(number, snapshot, [(1, {"m": {"v": np.full(2, number)}})])
    again = CheckpointStore(tmp_path)
    kept = {client: again.read_memory(path)["m"]["v"].tolist() for client, path in again.latest().memories.items()}
    assert kept == {0: [3, 3], 1: [7, 7]}


FILES = ["round-000003/server.safetensors", "round-000003/server.json", "round-000003/checkpoint.json"]
MEMORIES = ["memory/client-000001-000003.safetensors", "memory/client-000001-000003.json"]


DAMAGES = [(name, damage) for name in FILES + MEMORIES for damage in ("flip", "cut", "remove")]
DAMAGES.remove((FILES[2], "remove"))  # without it there is no checkpoint


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before_it(name, damage, tmp_path):
    _stored(tmp_path)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit of a number, or of a name
    path.unlink() if damage == "remove" else path.write_bytes(content[:-1] if damage == "cut" else content)
    said = []
    store = CheckpointStore(tmp_path)
    checkpoint = store.latest(said.append)
    assert checkpoint.next_round == 2
    assert checkpoint.snapshot.counters == {"n": 2}
    assert [store.read_memory(place)["m"]["v"].tolist() for place in checkpoint.memories.values()] == [[2, 2], [2, 2]]
    assert len(said) == 1
    assert said[0].startswith("checkpoint round-000003 is damaged")
    assert (tmp_path / "damaged-round-000003").is_dir()
    assert CheckpointStore(tmp_path).latest().next_round == 2


def test_an_edited_round_number_is_damage(tmp_path):
    _stored(tmp_path)
    path = tmp_path / "round-000003" / "checkpoint.json"
    path.write_text(path.read_text().replace('"next_round": 3', '"next_round": 9'))
    assert CheckpointStore(tmp_path).latest().next_round == 2


@pytest.mark.parametrize("name", ["../outside", "/{}/outside", "memory/../../outside", "round-000002/server"])
def test_a_memory_outside_of_its_folder_is_not_read(name, tmp_path):
    _stored(tmp_path / "checkpoints")
    file, name = tmp_path / "checkpoints" / "round-000003" / "checkpoint.json", name.format(tmp_path)
    fields = json.loads(file.read_text())
    del fields["self"]
    for suffix in (".json", ".safetensors"):  # sound files, by their checksums
        memory = tmp_path / "checkpoints" / f"memory/client-000001-000003{suffix}"
        (tmp_path / f"outside{suffix}").write_bytes(memory.read_bytes())
    fields["sha256"][name] = fields["sha256"][fields["memories"]["1"]]
    fields["memories"]["1"] = name
    file.write_text(json.dumps({**fields, "self": _digest_of(fields)}))
    said = []
    assert CheckpointStore(tmp_path / "checkpoints").latest(said.append).next_round == 2
    assert f"{name!r} is not a client memory" in said[0]


def test_without_a_sound_checkpoint_nothing_begins_anew_silently(tmp_path):
    _stored(tmp_path)
    for path in tmp_path.glob("round-*/server.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(RaysimError, match=r"no checkpoint is whole: round-000003 is damaged .*round-000002 is damaged"):
        CheckpointStore(tmp_path).latest()
    assert len(list(tmp_path.glob("round-*"))) == 2
