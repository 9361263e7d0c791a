"""Synthetic set for benchmarks and feature shift: drawings of ten shapes (classes) in up to six styles (domains)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from raysim.base.errors import DataError
from raysim.base.ram import memory_fault
from raysim.data.reader_api import Contents, Request
from raysim.data.rows import SetRows, batch_rows

Plane = np.ndarray  # (n, size, size) float32

#: Minimum bytes of memory per pixel in drawing, mostly for the noise of the three channels, in 8-byte integers.
PIXEL_BYTES = 107

STYLES = ("plain", "texture", "colour", "noise", "outline", "gradient")


def read_shapes(request: Request) -> Contents:
    """Draw `--count` images (default 60,000) of `--size` pixels (32) in `--domains` styles (4) from `--seed` (0)."""
    options = request.options
    domains = "4" if options.domains is None else str(options.domains)
    if not (domains.isdecimal() and 1 <= int(domains) <= len(STYLES)):
        raise DataError(f"--domains must be 1..{len(STYLES)}, got {domains}", request.name, "change the option")
    count, size = options.count or 60_000, options.size or 32
    if size < 8:
        raise DataError(f"--size must be >= 8, got {size}", request.name, "change the option")
    if text := memory_fault(size * size * PIXEL_BYTES):
        raise DataError(f"an image of {size} x {size} pixels {text}", request.name, "choose a smaller --size")
    batches = shape_batches(count, size=size, seed=options.seed or 0, num_domains=int(domains))
    return Contents(tuple(SHAPES), batches, (), count, STYLES[: int(domains)])


def shape_batches(count: int, *, size: int, seed: int, num_domains: int, rows: int | None = None) -> Iterator[SetRows]:
    """Yield examples 0 .. count-1 in batches of `rows`, which do not affect the images."""
    rows = rows or min(512, batch_rows((size, size, 3)))  # small enough for the processor's cache
    for start in range(0, count, rows):
        yield draw(np.arange(start, min(start + rows, count)), size=size, seed=seed, num_domains=num_domains)


def draw(index: np.ndarray, *, size: int, seed: int, num_domains: int) -> SetRows:
    """Draw the examples of the given indices; each example depends only on seed, index, size and num_domains.

    Labels and domains alternate, so that 10 * num_domains consecutive examples have each pair of label and domain once.
    Position, scale, rotation and colours are random, so that no single pixel identifies a class; all styles have all
    shapes.
    """
    labels, domains = index % len(SHAPES), index // len(SHAPES) % num_domains
    draws = uniform_floats(seed, index, 24).astype(np.float32)
    distance = np.empty((len(index), size, size), np.float32)
    u, v, pixel = _coordinates(draws, size)
    for label, shape in enumerate(SHAPES.values()):
        rows = np.flatnonzero(labels == label)
        distance[rows] = shape(u[rows], v[rows])
    images = np.empty((len(index), size, size, 3), np.uint8)
    for domain, style in enumerate(STYLES[:num_domains]):
        rows = np.flatnonzero(domains == domain)
        # The edge is one pixel wide: partly covered pixels are blended, as in a photograph.
        outline = np.abs(distance[rows]) - 0.12 if style == "outline" else distance[rows]
        cover = np.clip(0.5 - outline / pixel[rows], 0, 1)[..., None]
        front, back = _colours(style, draws[rows], size)
        canvas = back + cover * (front - back)
        noise = 0.25 if style == "noise" else 0.02
        canvas += (2 * noise) * (
            uniform_floats(seed ^ 0x5EED, index[rows], size * size * 3).reshape(canvas.shape) - 0.5
        )
        images[rows] = np.rint(255 * np.clip(canvas, 0, 1)).astype(np.uint8)
    return SetRows(images, labels.astype(np.int64), domains.astype(np.int64))


def uniform_floats(seed: int, index: np.ndarray, slots: int) -> np.ndarray:
    """Return (n, slots) float32 in [0, 1): SplitMix64 of (seed, index, slot), so that draws are independent."""
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.array([seed % 2**64], np.uint64) + _GOLDEN) + index.astype(np.uint64) * _GOLDEN)
        state = key[:, None] + np.arange(1, slots + 1, dtype=np.uint64) * _GOLDEN
        return (_mix(state) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _coordinates(draws: np.ndarray, size: int) -> tuple[Plane, Plane, np.ndarray]:
    """Return coordinates in each shape's frame, spanning about -1..1, and the width of a pixel in the frame."""
    grid = ((np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1)[None]
    scale = (0.5 + 0.25 * draws[:, 0])[:, None, None]
    room = 0.9 - scale[:, 0]
    x = (grid - (2 * draws[:, 1:2] - 1) * room)[:, None, :]
    y = -(grid - (2 * draws[:, 2:3] - 1) * room)[:, :, None]  # upwards
    angle = ((draws[:, 3] - 0.5) * np.float32(np.pi / 4))[:, None, None]
    cos, sin = np.cos(angle), np.sin(angle)
    return (cos * x + sin * y) / scale, (cos * y - sin * x) / scale, 2 / size / scale


def _colours(style: str, draws: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (foreground, background) of a style, broadcastable to (n, size, size, 3), in 0..1."""
    tint = draws[:, 4:10].reshape(-1, 2, 3)[:, :, None, None, :]
    front, back = 0.65 + 0.3 * tint[:, 0], 0.05 + 0.3 * tint[:, 1]
    if style == "colour":  # strong hues; foreground or background may be lighter
        front, back = _hue(draws[:, 10]), _hue(draws[:, 10] + 0.25 + 0.5 * draws[:, 11])
    elif style == "texture":
        front = front * (0.85 + 0.15 * _stripes(draws[:, 12:15], size))
        back = back + 0.3 * (0.5 + 0.5 * _stripes(draws[:, 15:18], size))
    elif style == "gradient":
        ramp = np.linspace(0, 1, size, dtype=np.float32)[None, :, None, None]
        front, back = 1 - back + 0 * ramp, back + 0.45 * np.where(draws[:, 18, None, None, None] < 0.5, ramp, 1 - ramp)
    return front, back


def _hue(turn: np.ndarray) -> np.ndarray:
    phase = (turn[:, None] + np.arange(3, dtype=np.float32) / 3) * np.float32(2 * np.pi)
    return (0.5 + 0.5 * np.cos(phase))[:, None, None, :]


def _stripes(draws: np.ndarray, size: int) -> np.ndarray:
    """Return (n, size, size, 1) waves in -1..1 of random direction, width and phase."""
    grid = np.linspace(-1, 1, size, dtype=np.float32)
    angle, waves = draws[:, 0] * np.float32(np.pi), 6 + 8 * draws[:, 1]
    along = (np.cos(angle) * waves)[:, None, None] * grid + (np.sin(angle) * waves)[:, None, None] * grid[:, None]
    return np.sin(along + 6.28 * draws[:, 2, None, None])[..., None]


def _box(u: Plane, v: Plane, width: float, height: float) -> Plane:
    return np.maximum(np.abs(u) - width, np.abs(v) - height)


def _star(u: Plane, v: Plane) -> Plane:
    """Return distances to a star with five tips at radius 1: the second largest distance to the sides of a pentagon.

    The star is the set of points outside at most one side.
    """
    angles = np.pi / 2 + np.pi + 2 * np.pi * np.arange(5) / 5
    sides = np.stack([np.float32(np.cos(a)) * u + np.float32(np.sin(a)) * v - np.float32(0.38) for a in angles])
    return np.partition(sides, 3, axis=0)[3]


SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {  # signed distances: negative inside
    "disc": lambda u, v: np.hypot(u, v) - 0.9,
    "square": lambda u, v: _box(u, v, 0.8, 0.8),
    "triangle": lambda u, v: np.maximum(0.866 * np.abs(u) + 0.5 * v, -v) - 0.5,
    "cross": lambda u, v: np.minimum(_box(u, v, 0.28, 0.95), _box(u, v, 0.95, 0.28)),
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.72) - 0.2,
    "star": _star,
    "crescent": lambda u, v: np.maximum(np.hypot(u, v) - 0.95, 0.75 - np.hypot(u - 0.45, v)),
    "bar": lambda u, v: _box(u, v, 0.98, 0.3),
    "frame": lambda u, v: np.abs(_box(u, v, 0.65, 0.65)) - 0.18,
    "hourglass": lambda u, v: np.maximum(np.abs(v) - 0.9, 0.75 * (np.abs(u) - np.abs(v))),
}
