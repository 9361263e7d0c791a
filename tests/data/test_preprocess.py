"""What is done to every image once, before it is held."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.base.errors import ConfigError
from raysim.data.arrow import PreparedSet
from raysim.data.federation import Federation, build_shards
from raysim.data.preprocess import fit_to, make_preprocess
from raysim.data.sources import set_path
from raysim.plan.check import check
from tests.support.federations import plan_of, raw_config, run

TOYS = "tests.support.toy_data"


def plan_with(root, preprocess, **groups):
    return check(raw_config(root, data={"root": str(root), "preprocess": preprocess}, **groups), "a test")


def test_images_are_resized_once_and_the_model_sees_their_shape(root, tmp_path):
    plain, plan = check(raw_config(root), "a test"), plan_with(root, {"resize": 12})
    assert (plain.spec.input_shape, plan.spec.input_shape) == ((8, 8, 1), (12, 12, 1))
    assert plan.manifest.checksum != plain.manifest.checksum
    assert all((a == b).all() for a, b in zip(plan.manifest.clients, plain.manifest.clients, strict=True))
    federation = Federation(build_shards(plan.manifest, tmp_path / "shards"))
    digits = PreparedSet(set_path(root, "digits"))
    for client in (0, 11):
        pixels, labels = federation.client(client)
        images, own = digits.take(plan.manifest.clients[client])
        alone = np.concatenate([fit_to(image[None], (12, 12, 1)) for image in images])
        assert (pixels == alone).all()
        assert (labels == own).all()


def test_a_run_on_images_resized_once_is_a_run(root):
    plan = plan_with(root, {"resize": 12}, rounds=1)
    other = check(raw_config(root, rounds=1), "a test")
    assert run(plan, root).params_sha256() != run(other, root).params_sha256()


def test_nothing_to_do_is_the_partition_without_it(root):
    plain = check(raw_config(root), "a test").manifest.checksum
    assert plan_with(root, {}).manifest.checksum == plan_with(root, {"resize": 8}).manifest.checksum == plain


def test_own_function_gets_fitted_images_and_its_options_and_source_count(root, tmp_path):
    own = {f"{TOYS}:brightens": {"by": 3}}
    plan = plan_with(root, {"own": own})
    federation = Federation(build_shards(plan.manifest, tmp_path / "shards"))
    images, _ = PreparedSet(set_path(root, "digits")).take(plan.manifest.test)
    assert (federation.held_out("test")[0] == images + np.uint8(3)).all()
    sums = {plan_with(root, {"own": {f"{TOYS}:brightens": {"by": by}}}).manifest.checksum for by in (3, 4)}
    assert len(sums) == 2
    assert plan.manifest.checksum in sums
    assert plan_with(root, {"own": f"{TOYS}:halves"}).spec.input_shape == (4, 4, 1)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            f"{TOYS}:as_features",
            r"data\.preprocess: got an array of shape \(3, 1\) and type float64.*or \(n, \.\.\.\) float32",
        ),
        (f"{TOYS}:centres", r"data\.preprocess: an image has another result alone than in a batch.*toy_data\.py"),
        (f"{TOYS}:writes_to_images", "toy_data.py.*in writes_to_images"),
        (f"{TOYS}:no_such", "data.preprocess.own: cannot import preprocess.*no_such"),
        ({f"{TOYS}:brightens": {"size": 3}}, r"data\.preprocess\.own.*unknown"),
        ("tests.support.toys:asks_twice", "takes no argument 'images'"),
    ],
)
def test_own_function_that_cannot_be_used_is_named(root, own, words):
    with pytest.raises(ConfigError, match=words):
        plan_with(root, {"own": own})


def test_work_does_not_depend_on_where_the_set_is_cut(root):
    digits = PreparedSet(set_path(root, "digits"))
    images, _ = digits.take(np.arange(600))
    work = make_preprocess(digits, 13)
    whole = work.work(images)
    for cuts in ([1, 2, 300], [255, 256, 257]):
        assert (np.concatenate([work.work(part) for part in np.split(images, cuts)]) == whole).all()


def test_float_features_of_an_own_function_are_the_inputs_of_the_run(root, tmp_path):
    groups = {"data": {"root": str(root), "preprocess": {"own": f"{TOYS}:as_float_features"}}, "model": {"name": "mlp"}}
    plan = plan_of(root, **groups)
    assert (plan.info.shape, plan.info.input_type, plan.spec.input_shape) == ((8,), "float32", (8,))
    inputs, _ = Federation(build_shards(plan.manifest, tmp_path)).client(0)
    pixels = PreparedSet(set_path(root, "digits")).take(plan.manifest.clients[0])[0]
    assert inputs.dtype == np.float32
    assert np.allclose(inputs, pixels.mean((2, 3)))
    assert run(plan, root).params.isfinite().all()
