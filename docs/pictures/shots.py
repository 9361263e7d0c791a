"""Pictures of the sweep in sweep.yaml: TensorBoard's pages, and the one at the top of README.

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

from browser import Page, opened_page
from markdown_it import MarkdownIt
from PIL import Image

import raysim

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

#: README's picture: 800 x 350 CSS pixels, each drawn as 2 x 2. Left the report's text, right the curves of one alpha.
FRONT = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; width: 800px; height: 350px; padding: 14px 16px; box-sizing: border-box; display: flex; gap: 16px;
  background: #fff; color: #1b1b1b; font: 12.5px/1.4 "DejaVu Sans", Verdana, sans-serif; overflow: hidden }}
.text {{ flex: 0 0 405px }} .curves {{ flex: 1 }} img {{ width: 100% }}
code {{ font: bold 12px "DejaVu Sans Mono", monospace; background: #eef1f4; padding: 3px 6px; border-radius: 4px }}
p {{ margin: 10px 0 0 }}
table {{ border-collapse: collapse; margin: 6px 0 10px; width: 100% }}
th, td {{ padding: 3.5px 6px; border-bottom: 1px solid #ccc; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
ul {{ margin: 0; padding-left: 16px }} li {{ margin-bottom: 4px }}
</style><div class="text"><code>raysim report runs/{name}</code><p>{what}</p>{table}<ul>{conclusions}</ul></div>
<div class="curves"><img src="{curves}"></div>"""


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
        write_small(DOCS / "pictures" / "front.png", await front(page, sweep))


async def front(page: Page, sweep: Path) -> bytes:
    """README's picture: the table of the sweep's report beside its curves at the smallest alpha."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"against": "FedVG", "metric": "mean_last_10pct_accuracy", "columns": ["alpha"]}
        report = raysim.report(sweep, out=Path(folder) / "all", **settings)
        skewed = [run for run in raysim.load(sweep) if run.config["partition"]["alpha"] == 0.1]
        curves = raysim.report(skewed, out=Path(folder) / "skewed", figures=["curves"]).figures["curves"]
        markdown = MarkdownIt("commonmark").enable("table")
        parts = report.text.split("\n\n")
        table = next(part for part in parts if part.startswith("| method"))
        what = next(part for part in parts if part.startswith("## ") and ", in %" in part)[3:].partition(":")[0]
        points = [markdown.renderInline(sentence) for sentence in report.conclusions]
        html = Path(folder) / "front.html"
        html.write_text(
            FRONT.format(
                name=sweep.name,
                what=what,
                table=markdown.render(table),
                conclusions="".join(f"<li>{point}</li>" for point in points),
                curves=curves.as_uri(),
            )
        )
        await page.show(html.as_uri(), 800, 350, scale=2)
        return await page.picture()


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
