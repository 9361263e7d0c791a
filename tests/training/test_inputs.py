"""The input pipeline: each augmentation equals a loop over images, draws are the client's own, evaluation has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop

from raysim.base.errors import ConfigError
from raysim.config import Config
from raysim.core.seeding import torch_generator
from raysim.data.arrow import SetInfo
from raysim.plan.build import input_transform, make_trainer, model_spec
from raysim.plan.check import check
from raysim.training import local
from raysim.training.augment import AUGMENTATIONS, Augmentation, Draws, crop_and_flip, resized_crop
from raysim.training.inputs import NORMALISATIONS, Examples, InputTransform, passes, resized
from raysim.training.local import LocalSettings, training_batches
from tests.support.federations import plan_of, raw_config, recipe_of, run


def pixels(count=6, height=9, width=8, channels=3, seed=0):
    generator = torch_generator(seed)
    return torch.randint(0, 256, (count, height, width, channels), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_that_are_floats_already_are_left_as_they_are(channels_last):
    """As `data.shift` makes them; the pipeline works in place behind its copy."""
    mean, std = NORMALISATIONS["cifar10"]
    transform = InputTransform(mean=mean, std=std, channels_last=channels_last)
    images = pixels().float() + 0.5
    examples, before = Examples(images, torch.zeros(len(images), dtype=torch.int64)), images.clone()
    first, again = ([batch.inputs.clone() for batch in passes(examples, transform, 4)] for _ in range(2))
    assert torch.equal(images, before)
    assert all(map(torch.equal, first, again))


@settings(deadline=None, max_examples=40)
@given(
    padding=st.integers(0, 4),
    target=st.sampled_from([(9, 8), (5, 7), (1, 1)]),
    flip=st.booleans(),
    reflects=st.booleans(),
    seed=st.integers(0, 99),
)
def test_crop_and_flip_equals_a_loop(padding, target, flip, reflects, seed):
    images = pixels(seed=seed)
    draws = Augmentation(padding=padding, flip=flip).draw(len(images), (9, 8), target, torch_generator(seed))
    result = crop_and_flip(images, draws, target, padding=padding, reflects=reflects)
    for i, image in enumerate(images.numpy()):
        borders = ((padding, padding), (padding, padding), (0, 0))
        padded = np.pad(image, borders, mode="reflect" if reflects else "constant")
        top, left = draws.offsets[i].tolist()
        expected = padded[top : top + target[0], left : left + target[1]]
        expected = expected[:, ::-1] if draws.is_flipped[i] else expected
        assert expected.shape == (*target, 3)
        assert (result[i].numpy() == expected).all()
    assert flip or not draws.is_flipped.any()


@settings(deadline=None, max_examples=40)
@given(
    size=st.tuples(st.integers(2, 20), st.integers(2, 20)),
    target=st.sampled_from([(4, 4), (7, 5), (24, 24)]),
    seed=st.integers(0, 99),
    mode=st.sampled_from(["bilinear", "bicubic"]),
)
def test_resized_crop_equals_a_loop(size, target, seed, mode):
    images = pixels(5, *size, seed=seed)
    draws = Augmentation(flip=True, scale=(0.08, 1.0)).draw(len(images), size, target, torch_generator(seed))
    result = resized_crop(images, draws, target, mode)
    for i, image in enumerate(images):
        top, left, tall, wide = draws.boxes[i].tolist()
        assert 0 <= top <= top + tall <= size[0]
        assert 0 <= left <= left + wide <= size[1]
        part = image[top : top + tall, left : left + wide].permute(2, 0, 1)[None].float()
        expected = F.interpolate(part, size=target, mode=mode, antialias=True, align_corners=False)[0].clamp(0, 255)
        expected = expected.flip(2) if draws.is_flipped[i] else expected
        torch.testing.assert_close(result[i], expected.permute(1, 2, 0), rtol=1e-4, atol=1e-2)


#: Pillow rounds after each of its two passes, and clips between them: on `muted` images nothing is clipped.
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def muted(*shape):
    return pixels(1, *shape) // 2 + 64


@pytest.mark.parametrize("mode", PILLOW)
def test_resized_crop_is_pillows_resize_of_the_box(mode):
    image = muted(40, 50)
    draws = Draws(torch.tensor([False]), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[3, 7, 30, 21]]))
    box = Image.fromarray(image[0].numpy()).crop((7, 3, 28, 33))
    for side in (16, 48):  # shrunk and enlarged
        expected = np.asarray(box.resize((side, side), PILLOW[mode])).astype(float)
        assert np.abs(resized_crop(image, draws, (side, side), mode)[0].numpy() - expected).max() <= 1.5


def test_boxes_have_the_stated_areas_and_ratios():
    draws = Augmentation(scale=(0.08, 1.0)).draw(20_000, (224, 224), (224, 224), torch_generator(0))
    _, _, tall, wide = draws.boxes.double().unbind(1)
    share = tall * wide / 224**2
    assert 0.075 < share.min() < 0.1
    assert share.max() > 0.95
    torch.manual_seed(0)
    theirs = [RandomResizedCrop.get_params(torch.empty(1, 224, 224), [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(5000)]
    theirs = torch.tensor(theirs, dtype=torch.float64)
    for mine, other in ((share, theirs[:, 2] * theirs[:, 3] / 224**2), (draws.boxes[:, 1].double(), theirs[:, 1])):
        assert ks_2samp(mine.numpy(), other.numpy()).pvalue > 1e-3
    assert 0.73 < (wide / tall).min() < (wide / tall).max() < 1.37
    assert abs(torch.log(wide / tall).mean()) < 0.01
    # Where no box fits, the largest central one with an allowed ratio.
    draws = Augmentation(scale=(1.0, 1.0)).draw(50, (10, 100), (8, 8), torch_generator(0))
    assert draws.boxes.unique(dim=0).tolist() == [[0, 43, 10, 13]]


def test_draws_are_uniform_and_independent():
    draws = Augmentation(padding=4, flip=True).draw(40_000, (32, 32), (32, 32), torch_generator(0))
    for column in draws.offsets.T:
        counts = torch.bincount(column, minlength=9)
        assert len(counts) == 9
        assert (counts - 40_000 / 9).abs().max() < 300
    assert abs(draws.is_flipped.double().mean() - 0.5) < 0.01
    table = torch.stack([draws.offsets[:, 0], draws.offsets[:, 1], draws.is_flipped]).double()
    assert (torch.corrcoef(table) - torch.eye(3)).abs().max() < 0.02


def batches_of(transform, *, count=50, batch=8, steps=15, seed=5):
    examples = Examples(pixels(count, seed=1), torch.arange(count))
    chosen = LocalSettings(lr=0.1, batch_size=batch)
    return list(
        training_batches(
            examples, transform, chosen, num_steps=steps, generator=torch_generator(seed), skip_single=False
        )
    )


@pytest.mark.parametrize(
    "transform",
    [
        InputTransform(augmentation=AUGMENTATIONS["cifar"]),
        InputTransform(augmentation=AUGMENTATIONS["livar-vit"], crop=(6, 6)),
        InputTransform(augmentation=AUGMENTATIONS["livar-cub"], resize=(12, 12), crop=(6, 6), mean=(0.5,), std=(0.5,)),
        InputTransform(function=lambda images, generator: images + torch.rand(1, generator=generator)),
    ],
)
def test_augmented_batches_do_not_depend_on_grouping_and_are_the_same_again(transform, monkeypatch):
    results = []
    for entries in (1, 2000, 2**30):
        monkeypatch.setattr(local, "GATHER_ENTRIES", entries)
        results.append(batches_of(transform))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.targets == b.targets).all()
            torch.testing.assert_close(a.inputs, b.inputs, rtol=0, atol=1e-6)
    again = batches_of(transform)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(results[2], again, strict=True))
    assert not torch.equal(batches_of(transform, seed=6)[0].inputs, again[0].inputs)


def test_augmentation_is_drawn_from_the_clients_own_seed():
    """Of one picture over and over, so that the order of the batches shows nothing."""
    examples = Examples(pixels(1, seed=1).repeat(32, 1, 1, 1), torch.zeros(32, dtype=torch.int64))
    chosen = LocalSettings(lr=0.1, batch_size=32)

    def only_batch(transform, seed):
        generator = torch_generator(seed)
        (batch,) = training_batches(examples, transform, chosen, num_steps=1, generator=generator, skip_single=False)
        return batch.inputs

    by_name = InputTransform(augmentation=AUGMENTATIONS["cifar"])
    by_function = InputTransform(function=lambda images, generator: images + torch.rand(1, generator=generator))
    for transform in (by_name, by_function):
        assert torch.equal(only_batch(transform, 5), only_batch(transform, 5))
        assert not torch.equal(only_batch(transform, 5), only_batch(transform, 6))


def test_augmentation_leaves_the_batch_order_alone_and_acts_on_each_image():
    plain = batches_of(InputTransform())
    moved = batches_of(InputTransform(augmentation=AUGMENTATIONS["flip"]))
    outcomes = set()
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a.targets, b.targets)
        for x, y in zip(a.inputs, b.inputs, strict=True):
            is_same, is_flipped = torch.equal(x, y), torch.equal(x.flip(2), y)
            assert is_same or is_flipped
            outcomes.add(is_same)
    assert outcomes == {True, False}
    first_epoch = torch.cat([batch.inputs for batch in moved[:7]])[torch.cat([b.targets for b in moved[:7]]).argsort()]
    second_epoch = torch.cat([batch.inputs for batch in moved[7:14]])[
        torch.cat([b.targets for b in moved[7:14]]).argsort()
    ]
    assert not torch.equal(first_epoch, second_epoch)


def test_evaluation_never_augments():
    images = pixels(7)
    examples = Examples(images, torch.arange(7))
    augmenting = InputTransform(augmentation=AUGMENTATIONS["cifar"])
    (batch,) = passes(examples, augmenting, 10)
    assert torch.equal(batch.inputs, InputTransform()(images))
    assert torch.equal(batch.inputs, images.permute(0, 3, 1, 2).float() / 255)


def test_images_lie_in_memory_as_pytorch_has_them_unless_channels_last_is_asked_for():
    assert InputTransform()(pixels()).is_contiguous()
    assert InputTransform(channels_last=True)(pixels()).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_resize_crop_normalise_and_grey_to_colours(channels_last):
    images = pixels(3, 10, 10, 1)
    mean, std = NORMALISATIONS["imagenet"]
    transform = InputTransform(mean, std, channels_last, resize=(8, 8), crop=(6, 6), channels=3)
    x = F.interpolate(images.permute(0, 3, 1, 2).float() / 255, size=(8, 8), mode="bilinear", antialias=True)
    x = (x[:, :, 1:7, 1:7].expand(-1, 3, -1, -1) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    before = images.clone()
    result = transform(images)
    torch.testing.assert_close(result, x, rtol=1e-5, atol=1e-5)
    assert torch.equal(images, before)
    assert result.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert transform.output_size(10, 10) == (6, 6)


@pytest.mark.parametrize("mode", PILLOW)
@pytest.mark.parametrize("side", [24, 96])
def test_resize_is_pillows(mode, side):
    images = muted(64, 64)
    expected = np.asarray(Image.fromarray(images[0].numpy()).resize((side, side), PILLOW[mode])).astype(float)
    assert np.abs(resized(images, (side, side), mode)[0].numpy() - expected).max() <= 1.5


def test_bicubic_resizing_stays_within_what_bytes_can_be():
    images = torch.zeros(1, 8, 8, 1, dtype=torch.uint8)
    images[:, :, 4:] = 255  # an edge, beside which the cubic's lobes lie below 0 and above 255
    got = resized(images, (16, 16), "bicubic")
    assert (float(got.min()), float(got.max())) == (0.0, 255.0)
    bare = F.interpolate(images.permute(0, 3, 1, 2).float(), size=(16, 16), mode="bicubic", antialias=True)
    assert float(bare.min()) < -5
    assert float(bare.max()) > 260


def test_pixels_are_the_whole_image_without_statistics():
    """What released statistics of features are made of: no normalisation, no crop, at the input's size."""
    images = pixels(3, 10, 12)
    transform = InputTransform((0.5,), (0.5,), resize=(9, 9), crop=(6, 6), interpolation="bicubic")
    want = F.interpolate(images.permute(0, 3, 1, 2).float(), size=(6, 6), mode="bicubic", antialias=True)
    torch.testing.assert_close(transform.plain(images), want.clamp(0, 255) / 255, rtol=1e-5, atol=1e-5)
    assert torch.equal(InputTransform((0.5,), (0.5,)).plain(images), InputTransform()(images))


IMAGES = SetInfo("mine", ("a",), (300, 280, 3), 0, "")


def test_recipes_are_the_papers_settings():
    for name in ("cifar", "flfa", "univarfl-stl10"):
        assert AUGMENTATIONS[name] == Augmentation(padding=4, flip=True)
    assert AUGMENTATIONS["livar-vit"] == Augmentation(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=True)
    assert AUGMENTATIONS["none"] is None
    transform = input_transform(
        Config.model_validate({"data": {"resize": 256, "crop": 224, "augment": "livar-vit"}}), IMAGES
    )
    draws = transform.draw(4, 300, 280, torch_generator(0))
    assert (
        transform.augmented(pixels(4, 300, 280), draws).shape
        == transform(pixels(4, 300, 280)).shape
        == (4, 3, 224, 224)
    )
    cub = input_transform(Config.model_validate({"data": {"resize": 256, "crop": 224, "augment": "livar-cub"}}), IMAGES)
    draws = cub.draw(200, 300, 280, torch_generator(0))
    assert draws.offsets.min() == 0
    assert draws.offsets.max() == 32


def test_model_input_follows_the_pipeline(root):
    config = Config.model_validate({"data": {"resize": 12, "channels": 3}, "model": {"name": "mlp"}})
    assert model_spec(config, SetInfo("digits", tuple("0123456789"), (8, 8, 1), 0, "")).input_shape == (12, 12, 3)
    plan = plan_of(
        root, data={"root": str(root), "resize": 12, "channels": 3, "normalise": "cifar10", "augment": "cifar"}
    )
    trainer = make_trainer(recipe_of(plan, root))
    assert trainer.model.module.conv1.in_channels == 3
    assert trainer.transform.augmentation == AUGMENTATIONS["cifar"]
    results = [run(plan, root).params_sha256() for _ in range(2)]
    assert results[0] == results[1]


@pytest.mark.slow
def test_each_input_setting_changes_the_run(root):
    digests = []
    for data in ({}, {"augment": "flip"}, {"augment": "cifar"}, {"normalise": "half"}, {"resize": 10}, {"crop": 6},
                 {"resize": 10, "interpolation": "bicubic"}):  # fmt: skip
        server = run(plan_of(root, data={"root": str(root), **data}), root)
        assert math.isfinite(float(server.state.abs().sum()))
        digests.append(server.params_sha256())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("key", "words", "data"),
    [
        ("data.augment", "Did you mean 'cifar'", {"augment": "cifra"}),
        ("data.normalise", "Did you mean 'imagenet'", {"normalise": "imagnet"}),
        ("data.normalise", "set data.channels=3", {"normalise": "imagenet"}),
        ("data.crop", "larger than the 8 x 8 images", {"crop": 9}),
        ("data.channels", "3", {"channels": 2}),
        ("data.resize", "must be greater than or equal to 1", {"resize": 0}),
        ("data.interpolation", "must be 'bilinear' or 'bicubic'", {"interpolation": "nearest"}),
    ],
)
def test_faults_of_the_inputs(key, words, data, root):
    with pytest.raises(ConfigError) as caught:
        check(raw_config(root, data={"root": str(root), **data}), "a test")
    (fault,) = caught.value.faults
    assert fault.key == key
    assert words in fault.message
