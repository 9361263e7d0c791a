"""Pictures of a run: weights and logged arrays by client, partitions, the confusion matrix.

Drawn with Pillow in a few milliseconds each. A figure of matplotlib takes 0.1 to 0.2 s and its first one 0.5 s more, which in
a short run was up to half of the time; reports, which are made once, use matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

#: Colour maps by ColorBrewer (Blues) and matplotlib (viridis), at equal distances from 0 to 1; straight lines between them.
BLUES = "f7fbff deebf7 c6dbef 9dcae1 6aaed6 4191c6 2070b4 08509b 08306b"
VIRIDIS = (
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)
BLUE = "#1f77b4"
#: Heights of letters in pixels: names beside a row or column, titles of axes, the title.
NAME, LABEL, TITLE = 10, 13, 16
#: Names along one axis, at most.
MOST_NAMES = 40


class Tick(NamedTuple):
    """A name at a place on an axis, in pixels from the left or the top."""

    at: float
    name: str


def png(picture: Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


# --- the pictures ---------------------------------------------------------------------------------------------------------


def confusion_picture(matrix: np.ndarray, classes: Sequence[str], title: str) -> Image:
    """Shares of each true class, with the counts where there is room."""
    count = len(classes)
    side = min(max(40 * count, 240), 1200)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    names = [_centres(classes, side)] * 2
    sheet = _Sheet((side, side), title, names[0], names[1], xlabel="predicted class", ylabel="true class")
    sheet.paste(_coloured(shares, BLUES))
    if count <= 20:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            place = ((column + 0.5) * side / count, (row + 0.5) * side / count)
            sheet.write(place, str(matrix[row, column]), "white" if shares[row, column] > 0.5 else "black")
    return sheet.framed()


def bars(values: np.ndarray, columns: Sequence[str], title: str) -> Image:
    """One bar for each number; as many names are written as fit."""
    width, height = min(max(30 * len(values), 200), 1200), 170
    known = np.nan_to_num(values.astype(float), posinf=0.0, neginf=0.0).clip(-1e300, 1e300)
    low, high = min(0.0, known.min(initial=0.0)), max(0.0, known.max(initial=0.0))
    span = (high - low) or 1.0
    top, bottom = high + 0.05 * span, low - 0.05 * span * (low < 0)

    def y(value: float) -> float:
        return (top - value) / (top - bottom) * height

    ticks = [Tick(y(value), f"{value:g}") for value in _round_numbers(low, high)]
    sheet = _Sheet((width, height), title, _centres(columns, width), ticks)
    step = width / max(1, len(known))
    for index, value in enumerate(known.tolist()):
        left, right = (index + 0.1) * step, (index + 0.9) * step
        sheet.fill((left, y(max(value, 0.0)), right, y(min(value, 0.0))), BLUE)
    return sheet.framed()


def heat_map(
    values: np.ndarray,
    rows: Sequence[object],
    columns: Sequence[str],
    *,
    title: str,
    xlabel: str = "layer",
    is_log: bool = False,
) -> Image:
    """A (clients, columns) array in colours, white where it is not finite; as many names are written as fit.

    Args:
      is_log: colour by the logarithm where all finite values are above 0.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    is_log = is_log and low > 0
    if not is_log:
        low = min(0.0, low)
    width, height = min(max(45 * len(columns), 180), 1800), min(max(16 * len(rows), 128), 1000)
    sheet = _Sheet(
        (width, height), title, _centres(columns, width), _centres(rows, height), xlabel, "client", right=100
    )
    with np.errstate(all="ignore"):
        scaled, ends = (np.log(values), (math.log(low), math.log(high))) if is_log else (values, (low, high))
        shares = (scaled - ends[0]) / (ends[1] - ends[0] or 1.0)
    sheet.paste(_coloured(shares, VIRIDIS))
    bar = (width + 20, width + 40)
    sheet.paste(_coloured(np.linspace(1, 0, 256)[:, None], VIRIDIS), bar)
    for number in _powers(low, high) if is_log else _round_numbers(low, high):
        place = math.log(number) if is_log else number
        share = (place - ends[0]) / (ends[1] - ends[0] or 1.0)
        sheet.tick_right(bar[1], (1 - share) * (height - 1), f"{number:g}")
    return sheet.framed()


def partition_pictures(
    class_counts: np.ndarray, validation_counts: np.ndarray | None, classes: Sequence[str]
) -> dict[str, Callable[[], Image]]:
    """File name -> what draws it: `partition`, and `validation` where the server holds a validation set (FedVG, figure A.6).

    Args:
      class_counts: (clients, classes); validation_counts: (classes,).
    """
    pictures: dict[str, Callable[[], Image]] = {"partition": partial(class_picture, class_counts, classes)}
    if validation_counts is not None and validation_counts.sum():
        title = f"validation set: {validation_counts.sum()} examples"
        pictures["validation"] = partial(bars, validation_counts, classes, title)
    return pictures


def class_picture(class_counts: np.ndarray, classes: Sequence[str]) -> Image:
    """One dot per client and class, its area the number of examples (FedVG, figures A.2, A.3); the first class is below.

    The largest dot fills its cell, and only as many names are written as fit, so that 100 clients or 200 classes read.
    More clients than there are pixels share them: what they have together is a shade.
    """
    num_clients, num_classes = class_counts.shape
    width, height = min(max(24 * num_clients, 330), 1800), min(max(26 * num_classes, 165), 1700)
    largest = int(class_counts.max(initial=0))
    clients = [
        Tick((number + 0.5) * width / num_clients, f"{number:g}")
        for number in _round_numbers(0, num_clients - 1)
        if number == int(number)
    ]
    names = [Tick(height - at, name) for at, name in _centres(classes, height)]
    title = f"examples per client and class (largest: {largest})"
    sheet = _Sheet((width, height), title, clients, names, "client", "class", is_upright=False)
    sheet.paste(_dots(class_counts.T[::-1] / max(1, largest), width, height))
    return sheet.framed()


# --- how they are drawn ---------------------------------------------------------------------------------------------------


class _Sheet:
    """A white picture: an area of (width, height) pixels, where places are counted from, in a frame of names.

    Args:
      columns, rows: names below and to the left of the area; right: pixels to leave on its other side.
      is_upright: write the names below upright.
    """

    def __init__(
        self,
        area: tuple[int, int],
        title: str,
        columns: Sequence[Tick],
        rows: Sequence[Tick],
        xlabel: str = "",
        ylabel: str = "",
        *,
        right: int = 12,
        is_upright: bool = True,
    ):
        from PIL import Image, ImageDraw

        small, title = _font(NAME), _one_line(title)
        below = max((small.getlength(tick.name) for tick in columns), default=0) if is_upright else NAME + 2
        beside = max((small.getlength(tick.name) for tick in rows), default=0)
        self._area = area
        self._left, self._top = int(beside) + 14 + (LABEL + 8 if ylabel else 0), TITLE + 14
        # A long title is never cut off: it is centred over the whole picture.
        width = max(self._left + area[0] + right, int(_font(TITLE).getlength(title)) + 20)
        height = self._top + area[1] + int(below) + 14 + (LABEL + 8 if xlabel else 0)
        self.image = Image.new("RGB", (width, height), "white")
        self._draw = ImageDraw.Draw(self.image)
        self._draw.text((width / 2, 6), title, "black", _font(TITLE), "mt")
        x, y = self._left + area[0] / 2, self._top + area[1] / 2
        self._draw.text((x, height - 6), xlabel, "black", _font(LABEL), "ms")
        self._upright((6 + LABEL / 2, y), ylabel, LABEL, "mm")
        for at, name in rows:
            self._draw.line((self._left - 4, self._top + at, self._left, self._top + at), "black")
            self._draw.text((self._left - 7, self._top + at), name, "black", small, "rm")
        bottom = self._top + area[1]
        for at, name in columns:
            self._draw.line((self._left + at, bottom, self._left + at, bottom + 4), "black")
            if is_upright:
                self._upright((self._left + at, bottom + 8), name, NAME, "mt")
            else:
                self._draw.text((self._left + at, bottom + 8), name, "black", small, "mt")

    def paste(self, pixels: np.ndarray, between: tuple[int, int] | None = None) -> None:
        """Fill the area, or what lies between two places from its left, with an array (h, w, 3) of any size."""
        from PIL import Image

        left, right = between or (0, self._area[0])
        part = Image.fromarray(pixels).resize((right - left, self._area[1]), Image.Resampling.NEAREST)
        self.image.paste(part, (self._left + left, self._top))
        if between:
            self._frame(left, right)

    def fill(self, box: tuple[float, float, float, float], color: str) -> None:
        """Fill a box (left, top, right, bottom)."""
        left, top, right, bottom = box
        shifted = (self._left + left, self._top + top, self._left + right, self._top + bottom)
        self._draw.rectangle(shifted, color)

    def write(self, place: tuple[float, float], text: str, color: str) -> None:
        """A small text around a place."""
        self._draw.text((self._left + place[0], self._top + place[1]), text, color, _font(NAME), "mm")

    def tick_right(self, x: float, y: float, name: str) -> None:
        """A name to the right of a place."""
        x, y = self._left + x, self._top + y
        self._draw.line((x, y, x + 4, y), "black")
        self._draw.text((x + 7, y), name, "black", _font(NAME), "lm")

    def framed(self) -> Image:
        """The finished picture."""
        self._frame(0, self._area[0])
        return self.image

    def _frame(self, left: int, right: int) -> None:
        box = (self._left + left - 1, self._top - 1, self._left + right, self._top + self._area[1])
        self._draw.rectangle(box, outline="black")

    def _upright(self, place: tuple[float, float], text: str, size: int, anchor: str) -> None:
        """A text that reads from below, its middle (mm) or its end (mt) at a place."""
        if not text:
            return
        from PIL import Image, ImageDraw

        length = math.ceil(_font(size).getlength(text))
        strip = Image.new("L", (length, size + 6))
        ImageDraw.Draw(strip).text((length / 2, size / 2 + 3), text, 255, _font(size), "mm")
        strip = strip.transpose(Image.Transpose.ROTATE_90)
        x, y = place[0] - strip.width / 2, place[1] - (strip.height / 2 if anchor == "mm" else 0)
        self.image.paste("black", (round(x), round(y)), strip)


def _coloured(shares: np.ndarray, colors: str) -> np.ndarray:
    """(h, w, 3) uint8 of shares (h, w); white where they are not finite."""
    table = np.array([list(bytes.fromhex(color)) for color in colors.split()], float)
    places = np.linspace(0, 1, len(table))
    is_known = np.isfinite(shares)
    known = np.where(is_known, shares, 0.0)
    pixels = np.stack([np.interp(known, places, table[:, channel]) for channel in range(3)], axis=-1)
    return np.where(is_known[..., None], pixels.round(), 255).astype(np.uint8)


def _dots(shares: np.ndarray, width: int, height: int) -> np.ndarray:
    """(h, w, 3) uint8: a dot in each cell of (rows, columns), its area a share of the largest that has room."""
    from PIL import Image, ImageColor, ImageDraw

    num_rows, num_columns = shares.shape
    cell = min(26.0, width / num_columns, height / num_rows)
    if cell < 2:  # dots would be smaller than a pixel: the ink is spread over the cells
        size = (width, height)
        ink = Image.fromarray(shares.astype(np.float32)).resize(size, Image.Resampling.BOX)
        cover = np.asarray(ink) ** 0.5
    else:
        fine = 4  # Pillow's circles have no soft edges: they are drawn larger, and made small
        mask = Image.new("L", (fine * width, fine * height))
        draw = ImageDraw.Draw(mask)
        rows, columns = np.nonzero(shares)
        radii = np.maximum(0.3, cell / 2 * np.sqrt(shares[rows, columns])) * fine
        x, y = (columns + 0.5) * width / num_columns * fine, (rows + 0.5) * height / num_rows * fine
        for box in np.stack([x - radii, y - radii, x + radii, y + radii], 1).tolist():
            draw.ellipse(box, 255)
        cover = np.asarray(mask.reduce(fine), np.float32) / 255
    ink_color = np.array(ImageColor.getrgb(BLUE), np.float32)
    return (255 - cover[..., None] * (255 - ink_color)).round().astype(np.uint8)


def _centres(names: Sequence[object], length: int) -> list[Tick]:
    """Names at the middle of equal cells along an axis: as many as fit."""
    count = len(names)
    step = max(1, -(-count // min(MOST_NAMES, max(1, length // (NAME + 2)))))
    return [Tick((index + 0.5) * length / count, _one_line(names[index])) for index in range(0, count, step)]


def _one_line(name: object) -> str:
    return " ".join(str(name).split())


def _round_numbers(low: float, high: float) -> list[float]:
    """Up to seven numbers between two, that are easy to read: steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    if not 1e-300 < span < 1e300:
        return []
    power = 10.0 ** math.floor(math.log10(span / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.6g}") for index in range(first, last + 1)]


def _powers(low: float, high: float) -> Iterable[float]:
    """Powers of ten between two numbers above 0; where there are less than two, round numbers."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, (last - first) // 6)
    powers = [10.0**power for power in range(first, last + 1, step)]
    return powers if len(powers) > 1 else [number for number in _round_numbers(low, high) if number > 0] or [low]


@lru_cache
def _font(size: int) -> FreeTypeFont:
    """DejaVu Sans, as in all our figures: it has more letters than Pillow's own font. Found without importing matplotlib."""
    from PIL import ImageFont

    home = find_spec("matplotlib")
    assert home is not None
    assert home.origin is not None
    path = Path(home.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
