"""Pretrained weights as a file from where all nodes get them."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest
import torch
import torchvision
from torchvision.models import _api

from raysim.base.errors import ModelError
from raysim.engine.ray import shards
from raysim.models import ModelSpec, build_model
from raysim.plan.build import Made, Ready, with_weights
from raysim.plan.held_weights import HeldWeights, held_weights
from tests.support.federations import plan_of

SPEC = ModelSpec("resnet18", 10, (32, 32, 3), {}, "default")


def test_published_weights_are_fetched_once_and_a_model_from_the_file_is_the_librarys(tmp_path, monkeypatch):
    published, asked = torchvision.models.resnet18().state_dict(), []
    monkeypatch.setattr(_api, "load_state_dict_from_url", lambda *a, **k: asked.append(a) or published)
    expected = build_model(SPEC, seed=1).state_dict()
    assert len(asked) == 1
    held = [held_weights(SPEC, tmp_path / "new" / "cache") for _ in range(2)]
    assert held[0] == held[1]
    assert len(asked) == 2
    found = build_model(with_weights(SPEC, Made("", weights=held[0])), seed=1).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(asked) == 2
    other = held_weights(ModelSpec("resnet18", 7, (32, 32, 3), {}, "default"), tmp_path)
    assert other.path != held[0].path


def test_a_users_file_stays_where_it_is(tmp_path):
    path = tmp_path / "start.pt"
    torch.save({}, path)
    held = held_weights(ModelSpec("resnet18", 10, (32, 32, 3), {}, str(path)), tmp_path / "cache")
    assert (held.path, held.sha256) == (str(path), sha256(path.read_bytes()).hexdigest())
    assert not (tmp_path / "cache").exists()
    assert held_weights(ModelSpec("resnet18", 10, (32, 32, 3), {}, None), tmp_path) == HeldWeights()
    with pytest.raises(ModelError, match="cannot be read"):
        held_weights(ModelSpec("resnet18", 10, (32, 32, 3), {}, str(tmp_path / "gone.pt")), tmp_path)


def test_another_file_at_the_same_path_of_another_node_is_not_taken_for_the_drivers(tmp_path, monkeypatch):
    """Two nodes, played by one: the driver's file has other contents than the one that lies here."""
    here, content = tmp_path / "start.pt", b"what the driver has"
    here.write_bytes(b"something else")
    digest = sha256(content).hexdigest()
    monkeypatch.setattr(shards, "this_node", lambda: "worker")
    monkeypatch.setattr(shards, "_local_folder", lambda: tmp_path / "local")
    monkeypatch.setattr(shards, "_copy", lambda folder, node, file, target: target.write_bytes(content))
    assert shards.fetched_file(str(here), digest, "driver").read_bytes() == content
    assert shards.fetched_file(str(here), sha256(b"something else").hexdigest(), "driver") == here
    assert shards.fetched_file(str(here), digest, "worker") == here


def test_a_trial_keeps_the_checksum_of_the_file_that_was_held_for_it(root, tmp_path):
    path = tmp_path / "start.pt"
    torch.save({}, path)
    held = held_weights(replace(SPEC, pretrained=str(path)), tmp_path)
    path.unlink()
    plan = plan_of(root)
    config = plan.config.model_copy(update={"model": plan.config.model.model_copy(update={"pretrained": str(path)})})
    ready = Ready(plan.info, plan.manifest, Made("", weights=held))
    assert replace(plan, config=config, ready=ready).weights_sha256 == held.sha256


def test_a_folder_that_a_node_does_not_see_has_a_place_there(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_local_folder", lambda: tmp_path / "local")
    place, fetch = shards.shard_fetcher(str(tmp_path / "away" / "digest"), "driver")
    assert place == tmp_path / "local" / "digest"
    assert fetch is not None
