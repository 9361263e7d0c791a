"""Pictures of the sweep in sweep.yaml on TensorBoard's pages.

raysim tune docs/pictures/sweep.yaml && python docs/pictures/shots.py runs/pictures
"""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from browser import opened_page
from PIL import Image

DOCS = Path(__file__).resolve().parent.parent

#: File in docs/tensorboard -> (TensorBoard's address after the port, what must be on the page before it is taken).
SHOTS = {
    "scalars": ("?darkMode=false#timeseries", "document.querySelectorAll('scalar-card').length >= 3"),
    "images": (
        f"?darkMode=false#images&tagFilter={quote('weights|classes|norms')}",
        "document.querySelector('tf-image-dashboard')",
    ),
    "hparams": ("?darkMode=false#hparams", "document.querySelector('tf-hparams-dashboard')"),
}


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard of a folder."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0", "--host", "127.0.0.1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"at (http://\S+?/)\s", line):
                yield found[1]
                return
        raise SystemExit(f"TensorBoard ended with status {process.wait()}")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def one_seed(sweep: Path) -> Iterator[Path]:
    """A folder with the sweep's runs of seed 0 alone."""
    with tempfile.TemporaryDirectory() as folder:
        for run in sorted(sweep.glob("*seed=0*")):
            (Path(folder) / run.name.replace("_seed=0", "")).symlink_to(run.resolve())
        yield Path(folder)


def write_small(file: Path, png: bytes) -> None:
    """A PNG of at most 256 colours, which is a third of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file.relative_to(DOCS.parent)}: {picture.width} x {picture.height}, {file.stat().st_size // 1024} KB")


async def take(sweep: Path) -> None:
    async with opened_page() as page:
        with one_seed(sweep) as runs, tensorboard(runs) as address:
            for name, (place, ready) in SHOTS.items():
                await page.show(address + place, 1400, 900)
                await page.wait_for(ready)
                await asyncio.sleep(6)  # the charts are drawn one after the other
                write_small(DOCS / "tensorboard" / f"{name}.png", await page.picture())


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
