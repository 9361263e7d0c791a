"""What the terminal says: a line for every part of the work, rounds from 1, commands that run, and short ends."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import raysim
from raysim.__main__ import _interrupt
from raysim.base import progress
from raysim.base.errors import ConfigError
from raysim.cli import terminal
from raysim.cli.main import app
from raysim.data.sources import set_path
from raysim.plan.check import check
from tests.support.federations import SMALL
from tests.support.output import in_order

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def run_file(root, tmp_path):
    """A file of a run of a second whose storage has a space in its name."""
    path = tmp_path / "small run.yaml"
    path.write_text(
        yaml.safe_dump({**SMALL, "name": "a", "data": {"root": str(root)}, "storage": str(tmp_path / "my runs")})
    )
    return path


def begun(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "raysim", *map(str, words)]
    return subprocess.Popen(command, env=environment, text=True, stdout=-1, stderr=-1, **options)


def test_control_characters_of_others_are_shown_and_not_sent(capsys):
    """As in a label, the name of a class or a folder, or the message of somebody's code."""
    table = terminal.Table("name \x1b[31m")
    table.add_row("\x1b]0;title\x07")
    terminal.out.print(table)
    terminal.err.print("a \x1b[2J b", markup=False)
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said
    assert said.count("\\x1b") == 3


def test_a_table_in_a_pipe_is_not_filled_up_with_spaces():
    output = CliRunner().invoke(app, ["recipes"]).output
    assert "paper:fedvg/table_A3" in output
    assert not [line for line in output.splitlines() if line != line.rstrip()]


# --- no silence ---------------------------------------------------------------------------------------------------------


def test_every_part_of_a_serial_run_has_its_line(run_file):
    output = CliRunner().invoke(app, ["run", str(run_file)]).output
    in_order(
        output,
        f"checking {run_file}",
        "looking for the shards",
        "building the model",
        "running 3 rounds in",
        "round 1/3",
        "round 3/3",
        "seconds",
        "drawing pictures",
        "run directory:",
    )


def failing():
    """A logger with an error in each round."""
    return SimpleNamespace(start=lambda *_: None, round=lambda _: 1 / 0, end=lambda _: None)


def test_a_quiet_run_says_nothing(settings, capsys):
    raysim.run(settings, name="a", rounds=1, loggers=[failing], quiet=True)
    assert capsys.readouterr() == ("", "")
    raysim.run(settings, name="b", rounds=1, loggers=[failing])
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.fixture
def screen(monkeypatch):
    """Standard output as a terminal, whose text is kept."""
    options = {"force_terminal": True, "force_jupyter": False, "width": 80, "soft_wrap": True, "highlight": False}
    console = Console(file=io.StringIO(), **options)
    monkeypatch.setattr(terminal, "out", console)
    return console


def test_a_terminal_has_one_line_that_is_replaced(screen, capsys):
    with terminal.LiveLine() as line:
        line.step("checking [a].yaml")
        line.step("starting Ray on this machine")
        time.sleep(0.6)  # two of its refreshes
        terminal.say("running 3 rounds")
        line.show("x" * 200)  # cut where the terminal ends
        time.sleep(0.6)
    shown = screen.file.getvalue()
    assert "starting Ray on this machine" in shown
    assert shown.count("running 3 rounds\n") == 1
    assert "x" * 70 in shown
    assert "x" * 80 not in shown
    assert shown.endswith("\x1b[2K")  # the line is gone
    assert capsys.readouterr().err == ""


def test_two_runs_in_two_threads_share_a_terminal(screen):
    faults = []

    def show():
        try:
            with terminal.LiveLine() as line:
                for number in range(5):
                    line.step(f"step {number}")
                    time.sleep(0.01)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=show) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_finished_run_shown_again_says_the_seconds_of_its_rounds_alone(run_file):
    first, again = (CliRunner().invoke(app, ["run", str(run_file)]).output for _ in range(2))
    spent = re.search(r"seconds │ +[\d.]+ │ ([\d.]+) in rounds", first)[1]
    assert re.search(rf"seconds in rounds │ +{spent} │ +│", again)


# --- rounds -------------------------------------------------------------------------------------------------------------


def test_rounds_count_from_1_in_the_table_of_a_run(run_file, tmp_path):
    output = CliRunner().invoke(app, ["run", str(run_file)]).output
    summary = raysim.load(tmp_path / "my runs" / "a").summary
    assert re.search(r"last │ +0\.\d{4} │ +round 3 │", output), output
    assert re.search(rf"best │ +0\.\d{{4}} │ +round {summary['best_round'] + 1} │", output), output


# --- printed commands ---------------------------------------------------------------------------------------------------


def printed_command(text: str) -> list[str]:
    words = shlex.split(text)
    program = words[0] if "/" in words[0] else Path(sys.executable).with_name(words[0])
    assert os.access(program, os.X_OK) or not Path(program).with_name("raysim").exists(), text
    return words


def test_the_command_for_tensorboard_takes_a_path_with_a_space(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = CliRunner().invoke(app, ["run", run_file.name]).output
    (line,) = re.findall(r"TensorBoard: +(.*)", output)
    *_, option, folder = printed_command(line)
    assert (option, folder) == ("--logdir", "my runs/a")
    assert list(Path(folder).glob("events.*"))


def test_a_sweep_is_no_run_and_the_command_that_runs_it_finds_its_file(run_file):
    run_file.write_text(run_file.read_text() + "tune: {param_space: {seed: {grid_search: [0]}}}\n")
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["run", str(run_file)], catch_exceptions=False)
    (command,) = re.findall(r"`([^`]*)`", str(caught.value))
    _, verb, file = printed_command(command)
    assert (verb, Path(file)) == ("tune", run_file)


def test_the_command_against_a_damaged_set_mends_it(tmp_path):
    folder = tmp_path / "my data"
    assert CliRunner().invoke(app, ["prepare", "digits", "--out", str(folder)]).exit_code == 0
    path = set_path(folder, "digits")
    with open(path, "r+b") as file:
        file.truncate(1000)
    raw = {**SMALL, "data": {"root": str(folder)}}
    with pytest.raises(ConfigError) as caught:
        check(raw, "a test")
    (command,) = re.findall(r"[Rr]un `(.*?)`", str(caught.value))
    result = CliRunner().invoke(app, printed_command(command)[1:])
    assert result.exit_code == 0, result.output
    check(raw, "a test")


def test_prepare_ends_with_the_lines_of_a_configuration(tmp_path):
    words = ["prepare", "shapes", "--out", str(tmp_path / "my data"), "--count", "200", "--size", "16"]
    output = CliRunner().invoke(app, words).output
    group = yaml.safe_load(output.partition("In a configuration:\n")[2])
    assert group == {"data": {"name": "shapes", "root": str(tmp_path / "my data")}}
    assert check({**SMALL, **group}, "a test").info.num_examples == 200


# --- ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.6])
def test_ctrl_c_in_the_first_second_is_one_line(seconds, run_file):
    code = f"import sys; from raysim.__main__ import main; sys.argv[1:] = ['run', {str(run_file)!r}]; print(flush=True); main()"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=-1, stderr=-1)
    process.stdout.readline()  # Python itself has started
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    # Python ends itself by the signal where it came inside of exec(); a shell shows 130 for both.
    assert process.returncode in (128 + signal.SIGINT, -signal.SIGINT), said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("stopped by ")


def test_ctrl_c_inside_of_an_import_is_raised_after_it():
    frame = SimpleNamespace(f_code=SimpleNamespace(co_filename="<frozen importlib._bootstrap>"))
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        _interrupt(signal.SIGINT, frame)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_long_work_without_a_known_end_counts(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = progress.Lines("preparing mine, images", said.append)
    now[0] = 3.0
    lines.progress(12_000, None)
    assert said == ["preparing mine, images: 12,000 so far"]


def test_long_work_is_told_after_3_seconds_and_then_less_often(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = progress.Lines("writing the shards of 2 partitions", said.append)
    for second, done in enumerate([0, 10, 20, 30, 40, 50, 60, 70, 80, 100]):
        now[0] = 100.0 + second
        lines.progress(done, 100)
    assert said == [
        "writing the shards of 2 partitions: 30 %, 0:07 left",  # after 3 s
        "writing the shards of 2 partitions: 50 %, 0:05 left",  # after 4.5 s
        "writing the shards of 2 partitions: 80 %, 0:02 left",  # after 7.5 s
    ]
