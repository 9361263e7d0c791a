"""Every recipe as it stands, at full size, up to its first round: planned, checked, partitioned, its models built."""

from __future__ import annotations

from pathlib import Path

import medmnist
import pytest
from safetensors.torch import save_file

import raysim.assemble
from raysim.assemble import check, model_spec
from raysim.calibrate import plan_calibration
from raysim.config import parse_config, read_config
from raysim.models import build_model
from raysim.tuning.plan import plan_sweep
from raysim.tuning.resources import draws
from tests.stub_sets import NUMBERS, StubSet, make_root, stub_columns, stub_info
from tests.test_recipes import CALIBRATIONS, RECIPES, STUDIES


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """A data root of stub sets, and `check` that reads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raysim.assemble, "ImageSet", StubSet)
        yield make_root(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def pretrained(stubs, tmp_path_factory):
    """The weights that configs/studies/livar_pretrain.yaml would leave."""
    config, _ = parse_config(read_config(STUDIES / "livar_pretrain.yaml"))
    info = stub_info(config.data.name)
    path = tmp_path_factory.mktemp("pretrained") / "model.safetensors"
    save_file(build_model(model_spec(config, len(info.classes), info.shape), seed=0).state_dict(), path)
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_unscaled_trial_can_start(path, stubs, pretrained):
    raw = read_config(path)
    raw["data"] = {**raw.get("data", {}), "root": str(stubs)}
    model = raw.get("model", {})
    if str(model.get("pretrained")).startswith("runs/"):
        raw["model"] = {**model, "pretrained": pretrained}
    if path in CALIBRATIONS:
        assert plan_calibration(raw, str(path))
    elif raw.get("tune", {}).get("param_space"):
        assert plan_sweep(raw, str(path), draws).trials
    else:
        assert check(raw, str(path)).num_rounds


def test_stub_sets_have_the_published_sizes():
    for name in NUMBERS:
        known = medmnist.INFO.get(name.removesuffix("_224"))
        if known is not None:
            labels, splits, _ = stub_columns(name)
            sizes = {part: int((splits == code).sum()) for code, part in enumerate(("train", "val", "test"))}
            assert sizes == known["n_samples"], name
            assert len(set(labels)) == len(known["label"])
    sizes = {
        name: stub_info(name).num_examples for name in ("covid19", "pacs", "ham10000", "eurosat", "cub200", "digits")
    }
    assert sizes == {
        "covid19": 9523,
        "pacs": 9991,
        "ham10000": 10015,
        "eurosat": 27000,
        "cub200": 11788,
        "digits": 1797,
    }
