"""Images that are resized once, when shards are written."""

from __future__ import annotations

import numpy as np

from raysim.data.arrow import PreparedSet
from raysim.data.federation import Federation
from raysim.data.fitting import fit_to
from raysim.data.sources import set_path
from raysim.plan.check import check
from tests.support.federations import build_shards, raw_config, run


def plan_with(root, size, **groups):
    return check(raw_config(root, data={"root": str(root), "stored_size": size}, **groups), "a test")


def test_images_are_resized_once_and_the_model_sees_their_shape(root, tmp_path):
    plain, plan = check(raw_config(root), "a test"), plan_with(root, 12)
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
    plan = plan_with(root, 12, rounds=1)
    other = check(raw_config(root, rounds=1), "a test")
    assert run(plan, root).params_sha256() != run(other, root).params_sha256()


def test_the_size_of_the_set_is_the_partition_without_it(root):
    plain = check(raw_config(root), "a test").manifest.checksum
    assert plan_with(root, None).manifest.checksum == plan_with(root, 8).manifest.checksum == plain


def test_resized_images_do_not_depend_on_where_the_set_is_cut(root):
    images, _ = PreparedSet(set_path(root, "digits")).take(np.arange(600))
    whole = fit_to(images, (13, 13, 1))
    for cuts in ([1, 2, 300], [255, 256, 257]):
        assert (np.concatenate([fit_to(part, (13, 13, 1)) for part in np.split(images, cuts)]) == whole).all()
    assert fit_to(images[:0], (4, 4, 3)).shape == (0, 4, 4, 3)
