"""Readers of text (`raysim prepare text`): characters are tokens, and each token's target is the next character."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from raysim.base.errors import DataError
from raysim.base.untrusted import regular_file, the_one_file
from raysim.data.reader_api import MOST_CLASSES, Contents, Request
from raysim.data.rows import damaged, in_batches

LENGTH = 80
#: Number of characters of tiny Shakespeare, and of different characters.
SHAKESPEARE = (1_115_394, 65)


def read_text(request: Request) -> Contents:
    """Read UTF-8 text as non-overlapping sequences of `--length` characters (default 80).

    The vocabulary is the sorted characters. Sequence k of a text t has inputs t[kL : kL + L] and targets
    t[kL + 1 : kL + L + 1] for length L; a shorter rest is left out. With `--domains speakers` the text is a play, and
    each speaker is a domain, see `speeches`. With `--domains files`, each .txt file below --root is a domain; with
    `--domains folders`, each folder in --root, such as an author. Sequences do not cross files.
    """
    length, domains = request.options.length or LENGTH, request.options.domains
    if domains not in (None, "speakers", "files", "folders"):
        raise DataError(f"--domains {domains}", request.name, "give --domains speakers, files or folders, or drop it")
    texts, files, characters = _texts(request.root, domains)
    path = files[0] if len(files) == 1 else request.root
    vocabulary = sorted(characters)
    if len(vocabulary) > MOST_CLASSES:
        what = f"{len(vocabulary):,} different characters, more than {MOST_CLASSES:,}"
        raise DataError(what, str(path), "give a text in fewer scripts")
    long = {name: [each for each in texts[name] if len(each) > length] for name in sorted(texts)}
    kept = {name: parts for name, parts in long.items() if parts}
    if not kept:
        longest = max(map(len, chain.from_iterable(texts.values())))
        what = f"no sequence of {length} characters and a next character; the longest text has {longest}"
        raise DataError(what, str(path), "lower --length")
    codes = {character: code for code, character in enumerate(vocabulary)}
    parts = [
        (owner, *_windows(np.array([codes[each] for each in text], np.int32), length))
        for owner, owned in enumerate(kept.values())
        for text in owned
    ]
    inputs, targets = (np.concatenate([part[side] for part in parts]) for side in (1, 2))
    owners = np.repeat([part[0] for part in parts], [len(part[1]) for part in parts])
    count = len(texts) - len(kept)
    kind = str(domains or "").removesuffix("s" if count == 1 else "")
    left_out = f"{count:,} {kind} with fewer than {length + 1} characters" if count else ""
    batches = in_batches(inputs, targets, domains=None if domains is None else owners)
    names = () if domains is None else tuple(kept)
    classes = tuple(vocabulary)
    return Contents(classes, batches, files, len(inputs), names, "tokens", len(classes), left_out=left_out)


def _texts(root: Path, domains: object) -> tuple[dict[str, list[str]], list[Path], set[str]]:
    """Return (domain -> texts, files read, characters); without domains, the only key is ""."""
    if domains in (None, "speakers"):
        try:
            path = the_one_file(root, ".txt")
        except DataError as error:
            raise DataError(
                error.what, error.where, "give one file as --root, or --domains files or folders"
            ) from error
        text = _read(path)
        texts = {"": [text]} if domains is None else {who: [said] for who, said in speeches(text, path).items()}
        return texts, [path], set(text)
    texts = {}
    files = sorted(root.rglob("*.txt")) if root.is_dir() else []
    for path in files:
        inner = path.relative_to(root)
        if domains == "folders" and len(inner.parts) == 1:
            raise DataError("a text beside the folders", str(path), "move it into a folder, or give --domains files")
        name = inner.parts[0] if domains == "folders" else inner.with_suffix("").as_posix()
        texts.setdefault(name, []).append(_read(path))
    if not texts:
        raise DataError(f"no .txt file for --domains {domains}", str(root), "give a folder with .txt files as --root")
    return texts, files, set().union(*map(set, chain.from_iterable(texts.values())))


def read_shakespeare(request: Request) -> Contents:
    """Read tiny Shakespeare (input.txt of char-rnn) with the speakers as domains."""
    text = _read(the_one_file(request.root, ".txt"))
    counts = len(text), len(set(text))
    if counts != SHAKESPEARE:
        what = "{:,} characters, {} different; {:,} and {} expected".format(*counts, *SHAKESPEARE)
        mend = "fetch the file again, or use `prepare text`"
        raise DataError(f"not the published tiny Shakespeare: {what}", str(request.root), mend)
    return read_text(replace(request, options=replace(request.options, domains="speakers")))


def speeches(text: str, path: Path) -> dict[str, str]:
    """Return speaker -> all lines of the speaker in a play, joined, without the speakers' names.

    A speaker's name is on a line of its own that ends with a colon, at the beginning or after an empty line.

    Raises:
      DataError: the text does not begin with a speaker, or has none.
    """
    lines: dict[str, list[str]] = {}
    speaker, before = None, ""
    for number, line in enumerate(text.split("\n"), 1):
        if not before and line.endswith(":") and line[:-1].strip():
            speaker = line[:-1].strip()
        elif line.strip():
            if speaker is None:
                mend = "begin with a line NAME:, or drop --domains speakers"
                raise DataError("words before the first speaker", f"{path}, line {number}", mend)
            lines.setdefault(speaker, []).append(line)
        before = line.strip()
    if not lines:
        raise DataError("no speaker says a word", str(path), "begin with a line NAME:, or drop --domains speakers")
    return {name: "\n".join(said) + "\n" for name, said in lines.items()}


def _windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets), (n, length) each, of (m,) tokens; n = (m - 1) // length."""
    size = (len(tokens) - 1) // length * length
    return tokens[:size].reshape(-1, length), tokens[1 : size + 1].reshape(-1, length)


def _read(path: Path) -> str:
    with damaged(path):
        data = regular_file(path).read_bytes()
    if not data:
        raise DataError("an empty file", str(path), "give a text")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text (byte {error.start})", str(path), "save the file as UTF-8") from error
