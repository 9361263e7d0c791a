"""The verbs. Exit status 0: done; 1: the run failed; 2: a fault in what the user gave; 128 + n: ended by signal n."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from raysim.base import __version__
from raysim.base.commands import command
from raysim.base.errors import ConfigError
from raysim.base.uri import is_uri
from raysim.base.user_code import refuse_shadows
from raysim.cli.arguments import GridOverrides, Overrides, Planned, Scaled, reader_options, report_options, with_options
from raysim.cli.listings import print_blocks, print_function, print_functions
from raysim.cli.printing import calibrate_and_print, show_report, show_sweep
from raysim.cli.recipes import show_recipes
from raysim.cli.terminal import LiveLine, Progress, command_began, err, out
from raysim.cli.unexpected import message_and_status, shown_once
from raysim.data.readers.reader_options import ReaderOptions

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"raysim {__version__}")
        raise typer.Exit


@app.callback(help=__doc__)
def common_options(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="print the version and stop")
    ] = False,
) -> None:
    """Declare the options before the verb, and install the display of warnings."""
    warnings.showwarning = shown_once()


@app.command()
def run(
    config: Annotated[str, Argument(help="a YAML file, or a recipe's name, as in paper:fedvg/table_A3")],
    overrides: Overrides = None,
    print_config: Annotated[bool, Option("--print-config", help="print the complete configuration and stop")] = False,
    is_scaled: Scaled = False,
    is_planned: Planned = False,
) -> None:
    """Run a federation and write its run directory."""
    import raysim.launch as launch
    from raysim.config import parse_overrides
    from raysim.config.reading import as_file
    from raysim.plan.names import parsed_run

    values = parse_overrides(overrides or [])
    raw, source = launch.settings_of(config, values, {}, scale=is_scaled, where="the command line")
    _note_before(is_scaled)
    parsed, faults = parsed_run(raw)
    if print_config:
        import yaml

        if parsed is None:
            raise ConfigError(faults, source)
        out.out(yaml.safe_dump(as_file(parsed), sort_keys=False), end="")
        return
    if is_planned:
        from raysim.cli.costs import print_run_cost

        print_run_cost(raw, source, LiveLine())
        return
    with ExitStack() as stack:
        if parsed is not None and not parsed.is_serial():
            from raysim.engine.ray.session import ray_ahead

            stack.enter_context(ray_ahead([parsed.model.kind]))  # Ray starts early: the checks from here on seldom fail
        progress = Progress(command_began())
        with progress.line as line:
            listener = line.listener()
            finished = launch.finished_run(
                raw, source, listener, on_start=progress.start, on_round=progress.round, on_summary=progress.summary
            )
    from raysim.folders.storage import address

    if at := address(finished.folder, str(finished.config["storage"])):
        out.print(f"stored at:     {at}", markup=False)
    out.print(f"run directory: {finished.folder}", markup=False)
    out.print(f"TensorBoard:   {command('tensorboard', '--logdir', finished.folder)}", markup=False)
    if parsed is not None and not parsed.is_serial():
        from raysim.engine.ray.session import wait_for_end

        with LiveLine() as line:
            wait_for_end(line.step)


@app.command()
def tune(
    config: Annotated[str, Argument(help="a YAML file with a `tune` group, or a recipe's name")],
    overrides: GridOverrides = None,
    is_scaled: Scaled = False,
    is_planned: Planned = False,
) -> None:
    """Run a sweep on Ray Tune; the same command again runs what is not finished."""
    import raysim.launch as launch
    from raysim.tuning.plan import read_sweep

    raw = read_sweep(Path(config), overrides or [], is_scaled=is_scaled)
    _note_before(is_scaled)
    if is_planned:
        from raysim.cli.costs import print_sweep_cost

        print_sweep_cost(raw, config, LiveLine())
        return
    with LiveLine() as line:
        ended = launch.finished_sweep(raw, config, line.listener())
    if status := show_sweep(*ended):
        raise typer.Exit(status)


@app.command()
def calibrate(
    config: Annotated[str, Argument(help="a YAML file with a `calibrate` group, or a recipe's name")],
    overrides: Overrides = None,
    is_scaled: Scaled = False,
    beside: Annotated[
        list[Path] | None, Option(help="folder of another calibration, drawn as well; several times")
    ] = None,
) -> None:
    """Recompute LIVAR's coefficient table from pairs of federated and joint runs; resumes unfinished runs."""
    import raysim.launch as launch
    from raysim.config import located_path, parse_overrides

    values = parse_overrides(overrides or [])
    raw, _ = launch.settings_of(config, values, {}, scale=is_scaled, where="the command line")
    _note_before(is_scaled)
    calibrate_and_print(raw, config, [located_path(folder) for folder in beside or []])


def _note_before(is_scaled: bool) -> None:
    if is_scaled:
        err.print("note: --scaled runs a smaller experiment: the numbers say nothing about the paper's results")


@app.command()
def partition(
    config: Annotated[str, Argument(help="a YAML file of a run or a sweep, or a recipe's name")],
    overrides: GridOverrides = None,
    is_scaled: Scaled = False,
    out_dir: Annotated[Path | None, Option("--out", help="folder; by default partitions/NAME")] = None,
) -> None:
    """Draw partitions and validation sets without training: numbers and pictures of each."""
    from raysim.cli.partitions import draw_and_print
    from raysim.config import path_to_write
    from raysim.tuning.plan import read_sweep

    raw = read_sweep(Path(config), overrides or [], is_scaled=is_scaled)
    folder = path_to_write(out_dir or Path("partitions") / str(raw.get("name") or Path(config).stem))
    draw_and_print(raw, config, folder)


@app.command()
@with_options(reader_options())
def prepare(
    name: Annotated[str | None, Argument(help="a data set; without a name, known sets are listed")] = None,
    root: Annotated[Path | None, Option(help="folder (or file) with the source files")] = None,
    out_dir: Annotated[Path, Option("--out", help="folder for prepared sets (data.root)")] = Path("data"),
    again: Annotated[bool, Option("--again", help="convert again, even if the prepared set exists")] = False,
    save_as: Annotated[str | None, Option("--as", help="name of the prepared set, if not NAME")] = None,
    **options: Any,
) -> None:
    """Convert a data set to Arrow."""
    from raysim.cli.preparation import prepare_and_print

    prepare_and_print(name, root, out_dir, ReaderOptions(**options), again=again, save_as=save_as)


@app.command()
def methods(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME | KEY=VALUE ...]",
            help="a method or a model; or with --model, settings of the model group, as in stem=small",
        ),
    ] = None,
    model: Annotated[str | None, Option(help="print the layer blocks of a model instead")] = None,
    size: Annotated[
        int | None, Option(min=1, help="with --model: height and width of the images, or length of the sequences")
    ] = None,
    channels: Annotated[int, Option(min=1, max=3, help="with --model: channels of the images")] = 3,
    classes: Annotated[int, Option(min=1, help="with --model: number of classes, or of tokens")] = 10,
) -> None:
    """List the methods and models, show a method with its options, or the layer blocks of a model."""
    with LiveLine() as line:
        line.show("loading PyTorch")
        from methods import GROUPS, METHODS
        from raysim.models import MODELS

    if model is not None:
        print_blocks(model, words or [], size, channels, classes)
    elif words:
        for name in words:
            print_function(name)
    else:
        out.print(
            "Methods combine in the order of their list; an empty list is fedavg. `raysim methods NAME` shows a method with its "
            "options."
        )
        print_functions({title: {name: METHODS[name] for name in group} for title, group in GROUPS.items()})
        out.print(
            "\nThe names of timm and transformers:FOLDER are further models. `raysim methods --model NAME` shows the layer "
            "blocks of any."
        )
        print_functions({"Models": {name: architecture.build for name, architecture in MODELS.items()}})


@app.command()
@with_options(report_options())
def report(
    paths: Annotated[
        list[str] | None, Argument(help="run directories, folders of run directories, or URIs", metavar="[PATH...]")
    ] = None,
    out_dir: Annotated[
        Path | None,
        Option("--out", help="folder; by default PATH/report, `report` beside several PATHs, of a URI reports/NAME"),
    ] = None,
    **settings: Any,
) -> None:
    """Tables, tests and figures of finished runs, with published numbers beside them."""
    from raysim.config import located_path, path_to_write
    from raysim.folders.storage import local_copy, report_folder

    folders = [local_copy(path) if is_uri(path) else located_path(Path(path)) for path in paths or []]
    folder = out_dir or report_folder(paths or [])
    show_report(folders, settings, path_to_write(folder) if folder else None)


@app.command()
def status(
    places: Annotated[
        list[str] | None,
        Argument(metavar="[PLACE...]", help="folders or URIs that hold runs and sweeps, by default runs"),
    ] = None,
) -> None:
    """Show how far runs and sweeps are, from their files; changes nothing."""
    from raysim.cli.overview import show_places

    show_places(places or ["runs"])


@app.command()
def recipes(
    name: Annotated[
        str | None,
        Argument(help="a file to print, or a kind to list: paper, study, example, mapping, published, cluster"),
    ] = None,
) -> None:
    """List the files that come with raysim, or print a file; `raysim run paper:fedvg/table_A3` needs no copy."""
    show_recipes(name)


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, by which editors complete and check YAML."""
    import json

    from raysim.cli.json_schema import json_schema

    out.out(json.dumps(json_schema(), indent=1))


@app.command()
def doctor(
    address: Annotated[str | None, Option(help="a running Ray: host:port or auto", envvar="RAY_ADDRESS")] = None,
) -> None:
    """Check this installation, the disks, and every node of a running cluster."""
    from raysim.cli.doctor import examine

    if not examine(address):
        raise typer.Exit(1)


def main() -> None:
    """Run the command; turn errors into a message and an exit status, without printing a traceback."""
    # Modules in the current folder can be imported, as with `python -m raysim`.
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        refuse_shadows()
        app()
    except SystemExit as ended:
        _end_process(ended.code)
        raise
    except Exception as error:
        line, status = message_and_status(error)
        err.print(line, markup=False)
        _end_process(status)
        sys.exit(status)


def _end_process(status: object) -> None:
    """Exit with a status at once if Ray was lost."""
    if (session := sys.modules.get("raysim.engine.ray.session")) is not None:
        session.end_process(status if isinstance(status, int) else int(status is not None))
