"""Options of readers, in Python and on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

#: A whole number of 1 or more.
POSITIVE = {"min": 1}


@dataclass(frozen=True)
class ReaderOptions:
    """Options that a user may give to a reader; None is the reader's default.

    Args:
      size: pixels of each side of an image: image files are resized, shapes are drawn
      download: fetch missing source files into --root
      count: shapes: number of images
      seed: shapes: seed of the drawings
      domains: table: the column with the domain of each row; text: speakers, files or folders; shapes: number of styles
      resize: with --size: cut the middle out of an image (crop, the default), or squash it to the square
      interpolation: with --size: bilinear is the default
      target: table: the column to be predicted; several, with commas between: labels or numbers
      task: table: where --target does not make it clear
      drop: table: columns that are not read, such as a number of rows, with commas between
      missing: table: drop rows with a missing value; or fill in the mean or median of a column of numbers and the most
        frequent word of a column of words; word: as median, and a missing word is a word of its own
      missing_target: table: drop rows without a target or a domain
      dates: table: read dates as days since 1970-01-01; the order of year, month and day in them
      codes: table: number words, instead of one column a word
      length: text: characters of a sequence; 80 if not given
    """

    size: int | None = field(default=None, metadata=POSITIVE)
    download: bool = False
    count: int | None = field(default=None, metadata=POSITIVE)
    seed: int | None = None
    domains: str | int | None = None
    resize: Literal["crop", "squash"] | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None
    target: str | None = None
    task: Literal["classes", "labels", "regression"] | None = None
    drop: str | Sequence[str] | None = None
    missing: Literal["drop", "mean", "median", "word"] | None = None
    missing_target: Literal["drop"] | None = None
    dates: Literal["ymd", "dmy", "mdy"] | None = None
    codes: bool = False
    length: int | None = field(default=None, metadata=POSITIVE)

    @property
    def resizing(self) -> str:
        """What is done to image files, in words; empty: they stay as they are."""
        way = "squashed" if self.resize == "squash" else "shorter side, the middle cut out"
        return "" if self.size is None else f"{self.size} x {self.size}, {way}, {self.interpolation or 'bilinear'}"

    def of_rows(self, known: Sequence[str]) -> str:
        """Return the options that decide the rows, as on the command line; empty for defaults.

        Args:
          known: the options that the reader heeds. Files of images have `resizing` for their size.
        """
        names = ["target", "task", "drop", "missing", "missing_target", "dates", "length", "count", "seed", "domains"]
        names += ["size"] * ("resize" not in known)
        words = [f"{option(name)} {value}" for name in names if (value := getattr(self, name)) is not None]
        return " ".join(words + ["--codes"] * self.codes)


def option(name: str) -> str:
    """A field of `ReaderOptions` as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


#: Options of a reader to which none was given.
DEFAULTS = ReaderOptions()
