"""Facts about published sets, and the comparison of a reader's result with the facts.

A mirror's folder tree, the parent of the right folder, or half a download are read without an error, as a different
set. A set with a published name is therefore compared with its publisher's numbers, even if the reader is `folder` or
`npz`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raysim.base.errors import DataError
from raysim.data.reader_api import Contents
from raysim.data.rows import SPLITS, SetRows

#: What to do about a set that differs from the facts.
REMEDY = (
    "give the folder that the publisher's archive holds (a mirror may have another layout), fetch the set again if the "
    "download is not complete, or keep another version of the set apart with --as NAME"
)


@dataclass(frozen=True)
class Facts:
    """Published facts of a set, see sets.yaml.

    examples: split or domain -> number of examples; "" for all. classes: names, or only their number.
    """

    examples: Mapping[str, int]
    classes: tuple[str, ...] | int
    shape: tuple[int, int, int] | None = None
    domains: tuple[str, ...] = ()
    source: str = ""


def checked(contents: Contents, facts: Facts, name: str, root: Path | None, *, is_resized: bool) -> Contents:
    """Return contents that are compared with the facts.

    Names are compared at once, image shapes with each batch, and counts after the last batch.

    Raises:
      DataError: a difference; the message has the expected and the found value. Differences of shapes and counts are
        raised while the batches are read.
    """
    where = str(root) if root is not None else name
    if fault := _name_fault(contents, facts):
        difference, mend = fault
        raise DataError(f"not the published {name}: {difference}", where, mend)

    def batches() -> Iterator[SetRows]:
        counts: Counter[str] = Counter()
        for batch in contents.batches:
            batch = SetRows(*batch)
            counts.update(_counts(batch, contents.domains, facts))
            shape = batch.inputs.shape[1:]
            if facts.shape and not is_resized and shape != facts.shape:
                what = f"not the published {name}: images of {_by(shape)}, {_by(facts.shape)} expected"
                raise DataError(what, where, "another release; keep the release apart with --as NAME")
            yield batch
        if dict(counts) != dict(facts.examples):
            what = f"{_numbers(counts)}; {_numbers(facts.examples)} expected"
            raise DataError(f"not the published {name}: {what}", where, REMEDY)

    return replace(contents, batches=batches())


def _counts(batch: SetRows, domains: Sequence[str], facts: Facts) -> dict[str, int]:
    """Return the number of examples in a batch under each key of `facts.examples`."""
    if set(facts.examples) & set(SPLITS) and batch.splits is not None:
        return {SPLITS[code]: int((batch.splits == code).sum()) for code in np.unique(batch.splits)}
    if set(facts.examples) & set(domains) and batch.domains is not None:
        return {domains[code]: int((batch.domains == code).sum()) for code in np.unique(batch.domains)}
    return {"": len(batch.targets)}


def _name_fault(contents: Contents, facts: Facts) -> tuple[str, str] | None:
    """Return (difference in classes or domains, remedy); None without a difference."""
    classes, expected = contents.classes, facts.classes
    if set(classes) & set(facts.domains):
        what = f"the domains, {_some(classes)}, were read as classes"
        return what, "`prepare domains` reads a tree DOMAIN/CLASS/image"
    if isinstance(expected, int):
        if len(classes) != expected:
            return f"{len(classes)} classes, {expected} expected", REMEDY
    elif tuple(classes) != expected:
        missing, more = (
            [name for name in one if name not in other] for one, other in ((expected, classes), (classes, expected))
        )
        counts = f"{len(classes)} classes, {_some(classes)}; {len(expected)} expected"
        if missing or more:
            lacking = (
                f", and {_some(missing)} is missing" if missing else f", and {_some(more)} is not a class of the set"
            )
            return f"{counts}{lacking}", REMEDY
        what = f"classes in the order {_some(classes)}, {_some(expected)} expected"
        return what, "the labels have another order; sort the labels"
    if facts.domains and contents.domains and contents.domains != facts.domains:
        return f"domains {_some(contents.domains)}, {_some(facts.domains)} expected", REMEDY
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}".rstrip() for name, count in counts.items()) + " examples"


def _facts(stated: dict[str, Any]) -> Facts:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()
    }
    return Facts(**fields)


#: Content of sets.yaml.
SETS: dict[str, dict[str, Any]] = yaml.load(Path(__file__).with_name("sets.yaml").read_text(), yaml.CSafeLoader)

#: Set -> published facts, for sets with facts in sets.yaml.
FACTS = {name: _facts(about["facts"]) for name, about in SETS["sets"].items() if "facts" in about}
