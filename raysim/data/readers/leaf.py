"""Reader of sets in the JSON layout of LEAF (Caldas et al. 2018, arXiv:1812.01097): `raysim prepare leaf --root FOLDER`.

Each file of train/ and test/ (or of a single folder without an official split) is
{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}; the users are the domains. `x` and `y` may hold:

- lists of 784 numbers in [0, 1], as in FEMNIST: 28 x 28 grey images, with whole numbers in `y` as classes;
- other lists of numbers: float32 inputs, with classes in `y`;
- strings, as in LEAF's Shakespeare: characters are tokens, and `y` is the character after `x`;
- lists of words, as in Reddit and StackOverflow: words are tokens, and `y` holds the word after each word of `x`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.base.errors import DataError
from raysim.base.untrusted import read_json
from raysim.data.reader_api import PARTS, Contents, Request, array_contents, split_codes
from raysim.data.rows import damaged

#: Number of most frequent words with a token of their own; if there are more words, token 0 stands for all others.
MOST_WORDS, OTHER = 10_000, "<other>"


def read_leaf(request: Request) -> Contents:
    """Return contents of files in LEAF's layout. Raises DataError: another layout, or rows of several kinds."""
    root = request.root / "data" if (request.root / "data").is_dir() else request.root
    parts = [part for part in PARTS if (root / part).is_dir()]
    files = [(part, path) for part in parts or [""] for path in sorted((root / part).glob("*.json"))]
    if not files:
        raise DataError("no .json file", str(root), "give the folder that holds train/*.json and test/*.json")
    rows, owners, codes = [], [], []
    splits_of_files = split_codes([part for part, _ in files]) if parts else np.zeros(len(files), np.int8)
    for (_, path), split in zip(files, splits_of_files, strict=True):
        for user, x, y in _examples(path):
            rows.append((x, y))
            owners.append(user)
            codes.append(split)
    if not rows:
        raise DataError("no example", str(root), "check user_data")
    names, domains = np.unique(np.array(owners, object), return_inverse=True)
    splits = np.array(codes, np.int8) if parts else None
    given: dict[str, Any] = {"domains": domains.astype(np.int64), "splits": splits, "where": str(root)}
    xs, ys = (list(each) for each in zip(*rows, strict=True))
    if isinstance(xs[0], str):
        contents = _of_tokens(xs, [x[1:] + y for x, y in zip(xs, ys, strict=True)], given)
    elif isinstance(xs[0][0], str):
        contents = _of_tokens(xs, ys, given)
    else:
        contents = array_contents(*_arrays(xs, ys, str(root)), **given)
    return replace(contents, files=[path for _, path in files], domains=tuple(map(str, names)))


def _examples(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield (user, x, y) of each example of a file."""
    with damaged(path):
        content = read_json(path)
    data = content.get("user_data") if isinstance(content, Mapping) else None
    if not isinstance(data, Mapping):
        raise DataError("no `user_data`", str(path), "give files in the layout of LEAF")
    for user, user_data in data.items():
        x, y = (user_data.get(name) if isinstance(user_data, Mapping) else None for name in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not all(x):
            raise DataError(f"user {user!r} has no lists x and y of one length", str(path), "give one y for each x")
        yield from ((str(user), *example) for example in zip(x, y, strict=True))


def _arrays(xs: Sequence[Any], ys: Sequence[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets) of lists of numbers; 784 numbers in [0, 1] become uint8 images."""
    try:
        inputs, targets = np.array(xs, np.float32), np.array(ys)
    except (ValueError, TypeError) as error:
        raise DataError("rows of different lengths or kinds", where, "give each x as many numbers") from error
    if inputs.shape[1:] == (784,) and inputs.min() >= 0 and inputs.max() <= 1:
        return np.rint(inputs * 255).astype(np.uint8).reshape(-1, 28, 28, 1), targets
    return inputs, targets


def _of_tokens(inputs: Sequence[Any], targets: Sequence[Any], given: Mapping[str, Any]) -> Contents:
    """Return contents of token sequences. targets: the next token at each position."""
    if len({len(each) for each in (*inputs, *targets)}) != 1:
        raise DataError("sequences of several lengths", given["where"], "give each x and y as many characters or words")
    counts = Counter(word for each in (*inputs, *targets) for word in each)
    frequent = sorted(word for word, _ in counts.most_common(MOST_WORDS))
    vocabulary = [OTHER] * (len(counts) > MOST_WORDS) + frequent
    codes = {word: code for code, word in enumerate(vocabulary)}
    x, y = (np.array([[codes.get(word, 0) for word in each] for each in side], np.int32) for side in (inputs, targets))
    return array_contents(x, y, classes=vocabulary, vocabulary=len(vocabulary), task="tokens", **given)
