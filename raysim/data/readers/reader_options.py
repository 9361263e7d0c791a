"""Options of readers, in Python and on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

#: A whole number of 1 or more.
POSITIVE = {"min": 1}


@dataclass(frozen=True)
class ReaderOptions:
    """Options of a reader; None stands for the reader's default.

    Args:
      size: side length of images in pixels: image files are resized to it, shapes are drawn in it
      download: fetch missing source files into --root
      count: shapes: number of images
      seed: shapes: seed of the drawings
      domains: table: the column with the domain of each row; text: speakers, files or folders; shapes: number of styles
      resize: with --size: crop the middle of an image (crop, the default), or squash the image to the square
      interpolation: with --size: bilinear is the default
      target: table: the column to be predicted, or several columns of labels or numbers, separated by commas
      task: table: the task, if --target leaves it open
      drop: table: columns that are not read, such as row numbers, separated by commas
      missing: table: drop rows with a missing value; or fill in the mean or median of a column of numbers and the most
        frequent word of a column of words; word: as median, but a missing word becomes the word "missing"
      missing_target: table: drop rows without a target or a domain
      dates: table: read dates as days since 1970-01-01; the value is the order of year, month and day
      codes: table: replace words by numbers, instead of one column a word
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
        """Resizing of image files, in words; empty without --size."""
        way = "squashed" if self.resize == "squash" else "shorter side, the middle cut out"
        return "" if self.size is None else f"{self.size} x {self.size}, {way}, {self.interpolation or 'bilinear'}"

    def of_rows(self, options: Sequence[str]) -> str:
        """Return the options that decide the rows, as on the command line; empty for defaults.

        Args:
          options: options of the reader. Readers with the option `resize` report their size in `resizing` instead.
        """
        names = ["target", "task", "drop", "missing", "missing_target", "dates", "length", "count", "seed", "domains"]
        names += ["size"] * ("resize" not in options)
        words = [f"{option(name)} {value}" for name in names if (value := getattr(self, name)) is not None]
        return " ".join(words + ["--codes"] * self.codes)


def option(name: str) -> str:
    """Return the command-line spelling of a field of `ReaderOptions`."""
    return f"--{name.replace('_', '-')}"


#: Default options.
DEFAULTS = ReaderOptions()
