"""Sets in the layout of LEAF: images, numbers, characters and words of users, by hand; other layouts are one sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest

import raysim
from raysim.base.errors import DataError
from raysim.data.readers import leaf
from raysim.data.sources import prepare
from tests.support.image_sets import prepared


def write(folder, **parts):
    """Files as LEAF's preprocessing writes them: part -> {user: (x, y)}; part "" is the folder itself."""
    for number, (part, users) in enumerate(parts.items()):
        path = folder / part.strip("_") / f"all_data_{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
        content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
        path.write_text(json.dumps(content))
    return folder


def test_femnist_becomes_images_of_its_writers(tmp_path):
    first, second = np.linspace(0, 1, 784), np.linspace(1, 0, 784)
    files = write(
        tmp_path / "files",
        train={"f01_23": ([first.tolist(), second.tolist()], [61, 3]), "f00_10": ([second.tolist()], [0])},
        test={"f01_23": ([first.tolist()], [61])},
    )
    source, images, labels = prepared("leaf", files, tmp_path / "out")
    assert (source.info.shape, len(source.info.classes), source.info.domains) == ((28, 28, 1), 62, ("f00_10", "f01_23"))
    assert (labels.tolist(), source.domains.tolist(), source.splits.tolist()) == (
        [61, 3, 0, 61],
        [1, 1, 0, 1],
        [0, 0, 0, 2],
    )
    np.testing.assert_array_equal(images[0].reshape(-1), np.rint(first * 255))
    data = {"name": "leaf", "root": str(tmp_path / "out"), "validation": 0.0}
    parts = {"scheme": "natural", "num_clients": 2, "min_samples": 1}
    run = raysim.run(
        {"data": data, "partition": parts, "model": {"name": "mlp"}, "rounds": 1, "resources": {"backend": "serial"}},
        {"storage": str(tmp_path / "runs"), "local.batch_size": 1},
        quiet=True,
    )
    assert run.history["server/accuracy"].tolist() in ([0.0], [1.0])  # of one test image


def test_numbers_stay_as_they_are(tmp_path):
    files = write(tmp_path / "files", _={"a": ([[0.5, -2], [3, 4]], [0, 1]), "b": ([[5, 6]], [1])})
    source, inputs, labels = prepared("leaf", files, tmp_path / "out")
    np.testing.assert_array_equal(inputs, [[0.5, -2], [3, 4], [5, 6]])
    assert (labels.tolist(), source.splits) == ([0, 1, 1], None)


def test_characters_and_words_are_tokens(tmp_path, monkeypatch):
    files = write(tmp_path / "chars", train={"ROMEO": (["abca", "bcab"], ["b", "c"])})
    source, inputs, targets = prepared("leaf", files, tmp_path / "out")
    assert (source.info.task, source.info.classes, source.info.domains) == ("tokens", ("a", "b", "c"), ("ROMEO",))
    np.testing.assert_array_equal(inputs, [[0, 1, 2, 0], [1, 2, 0, 1]])
    np.testing.assert_array_equal(targets, [[1, 2, 0, 1], [2, 0, 1, 2]])
    monkeypatch.setattr(leaf, "MOST_WORDS", 3)
    words = {"7": ([["how", "to", "sort", "to"]], [["to", "sort", "to", "merge"]])}
    source, inputs, targets = prepared("leaf", write(tmp_path / "words", train=words), tmp_path / "out2")
    assert source.info.classes == ("<other>", "how", "sort", "to")  # the three most frequent, of equal ones the first
    np.testing.assert_array_equal(inputs, [[1, 3, 2, 3]])
    np.testing.assert_array_equal(targets, [[3, 2, 3, 0]])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no `user_data` in .*a.json"),
        ('{"user_data": {"u": {"x": [[1]], "y": [0, 1]}}}', "user 'u' has no lists x and y of one length"),
        ('{"user_data": {"u": {"x": [[1]]}}}', "user 'u' has no lists"),
        ('{"user_data": {"u": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "rows of different lengths"),
        ('{"user_data": {"u": {"x": ["ab", "abc"], "y": ["c", "d"]}}}', "sequences of several lengths"),
        ('{"user_data": {"u": {"x": [], "y": []}}}', "no example"),
        ('{"user_data"', r"not readable \(JSONDecodeError"),
    ],
)
def test_another_layout_is_one_sentence(text, words, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(text)
    with pytest.raises(DataError, match=words):
        prepare("leaf", tmp_path / "out", tmp_path)


def test_a_folder_without_files_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"no \.json file in .*train/\*\.json and test"):
        prepare("leaf", tmp_path / "out", tmp_path)
