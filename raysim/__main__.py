"""The verbs: `raysim VERB`, or `python -m raysim VERB`. Exit status 0: done; 1: the run failed; 2: a fault in what the
user gave; 128 + n: ended by signal n after a checkpoint."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from raysim.core.errors import ConfigError, DataError, MethodError, RaysimError, RunExists

if TYPE_CHECKING:
    from raysim.engine.server import RoundRecord

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="settings as key=value, for example local.lr=0.1", metavar="[a.b=c ...]")
]


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="a YAML file")],
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the complete configuration and stop")
    ] = False,
    is_scaled: Annotated[bool, typer.Option("--scaled", help="lay the file's `scale` settings over it")] = False,
) -> None:
    """Run a federation and write its run directory."""
    from raysim.config import JOB_VARIABLE, Config, home_folder, parse_config, read_config
    from raysim.sweep import scaled

    raw = read_config(Path(config), overrides or [])
    if is_scaled:
        raw = scaled(raw, config)
    if raw.get("tune"):
        err.print(
            f"note: the `tune` group of {config} is left out; `raysim tune {config}` runs its sweep", markup=False
        )
    if JOB_VARIABLE in os.environ and not os.environ.get("RAYSIM_HOME"):
        err.print(f"note: RAYSIM_HOME is not set on this cluster; relative paths begin at {home_folder()} of this node")
    if print_config:
        import yaml

        parsed, faults = parse_config(raw)
        if not isinstance(parsed, Config):
            raise ConfigError(faults, config)
        sys.stdout.write(yaml.safe_dump(parsed.model_dump(mode="json"), sort_keys=False))
        return
    from raysim.assemble import check
    from raysim.run import execute

    began = _command_began()
    progress = Progress(began)
    summary = execute(check(raw, config), on_start=progress.start, on_round=progress.round)
    table = Table(title=f"{progress.folder.name if progress.folder else ''}: {_names(summary['methods'])}")
    for column in ("round", "accuracy", ""):
        table.add_column(column, justify="right")
    if summary["accuracy"] is not None:
        table.add_row("last", f"{summary['accuracy']:.4f}", f"round {summary['rounds'] - 1}")
        table.add_row("best", f"{summary['best_accuracy']:.4f}", f"round {summary['best_round']}")
        table.add_row("mean of the last 10 %", f"{summary['mean_last_10pct_accuracy']:.4f}", "")
    table.add_row("seconds", f"{time.monotonic() - began:.1f}", f"{summary['seconds_per_round']:.2f} a round")
    out.print(table)
    out.print(f"run directory: {progress.folder}")
    out.print(f"TensorBoard:   tensorboard --logdir {progress.folder}")


@app.command()
def prepare(
    name: Annotated[str | None, typer.Argument(help="a data set; without it, the known ones are listed")] = None,
    root: Annotated[Path | None, typer.Option(help="folder (or file) with the source files")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder for prepared sets (data.root)")] = Path("data"),
    again: Annotated[bool, typer.Option("--again", help="convert even if it is there")] = False,
    save_as: Annotated[str | None, typer.Option("--as", help="name of the prepared set, if not NAME")] = None,
    download: Annotated[bool, typer.Option("--download", help="fetch missing source files into --root")] = False,
    size: Annotated[int | None, typer.Option(min=1, help="pixels: resize image files, or size of shapes")] = None,
    count: Annotated[int | None, typer.Option(help="shapes: number of images")] = None,
    seed: Annotated[int | None, typer.Option(help="shapes: seed")] = None,
    domains: Annotated[int | None, typer.Option(help="shapes: number of styles")] = None,
    use_ray: Annotated[bool, typer.Option("--ray", help="decode image files on Ray Data")] = False,
) -> None:
    """Convert a data set to Arrow."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from raysim.config import home_folder
    from raysim.data.reading import Options, map_in_threads
    from raysim.data.sources import SOURCES, set_path
    from raysim.data.sources import prepare as convert

    if name is None:
        width = max(map(len, SOURCES))
        for known, source in SOURCES.items():
            out.print(f"{known:{width}}  {source.description}")
        return
    out_dir = home_folder() / out_dir
    parallel_map = map_in_threads
    if use_ray:
        from raysim.data.pipeline import map_with_ray_data

        parallel_map = map_with_ray_data
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=out, disable=not out.is_terminal, transient=True) as bar:
        task = bar.add_task(f"preparing {name}", total=None)
        info = convert(
            name,
            out_dir,
            root,
            again=again,
            save_as=save_as,
            options=Options(size, download, count, seed, domains),
            parallel_map=parallel_map,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    in_domains = f", {len(info.domains)} domains" if info.domains else ""
    out.print(
        f"{info.name}: {info.num_examples} images {info.shape}, {len(info.classes)} classes{in_domains}, "
        f"sha256 {info.checksum[:16]}"
    )
    if info.source_checksum:
        out.print(f"source files: sha256 {info.source_checksum[:16]}")
    out.print(f"file: {set_path(out_dir, info.name)}")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="a method; without it, all are listed")] = None,
    model: Annotated[str | None, typer.Option(help="print the layer blocks of this model instead")] = None,
) -> None:
    """List the methods, show one with its options, or the layer blocks of a model."""
    from raysim.assemble import describe_method, find_method
    from raysim.config import nearest

    if model is not None:
        _print_blocks(model)
        return
    if name is None:
        from methods import METHODS

        out.print("[] is FedAvg. Listed in order, methods combine.")
        for known in sorted(METHODS):
            signature, line = describe_method(known)
            out.print(f"[bold]{known}[/bold]{signature}\n    {line}", markup=True)
        return
    import inspect

    try:
        make = find_method(name)
    except LookupError as error:
        from methods import METHODS

        raise MethodError(f"unknown method {name!r}", "", nearest(name, list(METHODS))) from error
    out.print(f"{name}{inspect.signature(make)}\n\n{inspect.getdoc(make)}", markup=False)


def _print_blocks(model: str) -> None:
    from raysim.config import nearest
    from raysim.core.layout import layout_of
    from raysim.models import MODELS, ModelSpec, build_skeleton, head_of

    if model not in MODELS:
        raise MethodError(f"unknown model {model!r}", "", nearest(model, list(MODELS)))
    spec = ModelSpec(model, 10, (32, 32, 3))
    layout = layout_of(build_skeleton(spec), head=head_of(spec))
    out.print(f"{model} on 32 x 32 x 3 images, 10 classes: {layout.num_params} parameters, {len(layout.params)} layers")
    for block in layout.blocks:
        leaves = [leaf for leaf in layout.leaves if leaf.block == block]
        out.print(
            f"{block:20} {sum(leaf.size for leaf in leaves if not leaf.is_buffer):>10}  {', '.join(leaf.name for leaf in leaves)}"
        )


@app.command()
def doctor(
    address: Annotated[
        str | None,
        typer.Option(help="a running Ray: host:port, auto, or http://... of its dashboard", envvar="RAY_ADDRESS"),
    ] = None,
    storage: Annotated[Path, typer.Option(help="folder for run directories")] = Path("runs"),
    working_dir: Annotated[Path, typer.Option(help="folder that a job would upload")] = Path("."),
) -> None:
    """Check this installation, what a job would upload, and every node of a running cluster."""
    from raysim.config import home_folder
    from raysim.doctor import findings

    is_good = True
    for is_ok, line in findings(address, home_folder() / storage, working_dir):
        out.print(f"{'ok  ' if is_ok else 'FAIL'} {line}", markup=False)
        is_good = is_good and is_ok
    if not is_good:
        raise typer.Exit(1)


class Progress:
    """A live line on a terminal; elsewhere a plain line a round, at most a hundred in all."""

    def __init__(self, began: float):
        self._began, self._rounds_began = began, began
        self.folder: Path | None = None
        self._first, self._total = 0, 0
        self._accuracy = ""

    def start(self, folder: Path, first_round: int, num_rounds: int) -> None:
        self.folder, self._first, self._total = folder, first_round, num_rounds
        self._rounds_began = time.monotonic()
        where = f"resuming at round {first_round} of" if first_round else "running"
        out.print(f"{where} {num_rounds} rounds in {folder} ({self._rounds_began - self._began:.1f} s to start)")

    def round(self, record: RoundRecord) -> None:
        number = record.round_index + 1
        if "server/accuracy" in record.metrics:
            self._accuracy = f"accuracy {record.metrics['server/accuracy']:.4f}  "
        spent = time.monotonic() - self._rounds_began
        left = spent / (number - self._first) * (self._total - number)
        loss = f"loss {record.metrics['train/loss']:.4f}"
        count = f"{number:>{len(str(self._total))}}/{self._total}"
        line = f"round {count}  {self._accuracy}{loss}  {_clock(left)} left"
        is_last = number == self._total
        if out.is_terminal:
            out.print(line, end="\n" if is_last else "\r")
        elif is_last or number % max(1, self._total // 100) == 0:
            out.print(line)
            out.file.flush()


def _command_began() -> float:
    """When this process started, on the clock of time.monotonic: the user waits for Python and PyTorch as well."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _names(specs: list[str | dict[str, object]]) -> str:
    return " + ".join(next(iter(item)) if isinstance(item, dict) else item for item in specs) or "fedavg"


def main() -> None:
    """Entry point: one message and a status instead of a traceback for everything a user can mend."""
    try:
        app()
    except (ConfigError, DataError, MethodError, RunExists) as error:
        err.print(f"{type(error).__name__}: {error}", markup=False)
        sys.exit(2)
    except RaysimError as error:
        err.print(f"{type(error).__name__}: {error}", markup=False)
        sys.exit(1)
    except Exception as error:
        from raysim.engine.simulation import Interrupted

        if not isinstance(error, Interrupted):
            raise
        if error.next_round is None:
            err.print("stopped by a signal; the same command goes on from the last checkpoint")
        else:
            err.print(f"stopped by a signal after a checkpoint; the same command goes on at round {error.next_round}")
        sys.exit(128 + error.signal_number)


if __name__ == "__main__":
    main()
