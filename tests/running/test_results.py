"""Results in Python: what a damaged file of a run says when it is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import save_file

import raysim
from raysim.base.errors import DataError
from raysim.config import Config
from raysim.data.arrow import SetInfo
from raysim.engine.simulation import Stopped
from raysim.folders.run_folder import RunFolder, Status
from raysim.models import build_model
from raysim.plan.build import model_spec
from raysim.reporting.runs import find_runs
from tests.support.report_runs import fabricate

SUMMARY = {"rounds": 1, "input_shape": [8, 8, 1], "input_type": "uint8", "vocabulary": 0, "num_classes": 10}
#: What each file of a run is read by.
READ_BY = {
    "config.yaml": lambda run: run.config,
    "summary.json": lambda run: run.summary,
    "clients.parquet": lambda run: run.clients,
    "arrays/round_00000.npz": lambda run: run.arrays("a.b"),
    "model.safetensors": lambda run: run.model(),
}


@pytest.fixture
def folder(tmp_path):
    """A run directory of which two files are whole."""
    (tmp_path / "arrays").mkdir()
    model = {"name": "mlp", "hidden": 4}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(Config.model_validate({"model": model}).model_dump(mode="json"))
    )
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"null", b'{"rounds": 1}'])
def test_a_damaged_summary_is_one_sentence_for_whoever_reads_it(content, folder):
    (folder / "summary.json").write_bytes(content)
    (folder / "model.safetensors").write_bytes(b"")
    run = raysim.load(folder)
    words = r"^summary\.json is damaged \([^\n]*\) in [^\n]*\. Delete the folder and repeat the run$"
    if content != b'{"rounds": 1}':  # whole, but not of a run
        with pytest.raises(DataError, match=words):
            dict(run.summary)
    with pytest.raises(DataError, match=words):
        run.model()


@pytest.mark.parametrize("file", READ_BY)
@pytest.mark.parametrize("content", [b"", b"{\x00", b"PK\x03\x04 no zip"])
def test_other_damaged_files_are_named(content, file, folder):
    path = folder / (f"{file}/rounds-000000-000000.parquet" if file == "clients.parquet" else file)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{file.rpartition('/')[2]} is damaged \([^\n]*\) in {folder}[^\n]*$"):
        READ_BY[file](raysim.load(folder))


def test_a_damaged_array_is_named(folder):
    files = RunFolder(folder)
    files.write_arrays(0, {"a.b": np.arange(400.0).reshape(20, 20), "a.c": np.zeros(3)})
    assert raysim.load(folder).arrays("a.b")[0].shape == (20, 20)
    path = files.arrays / "round_00000.npz"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"^round_00000\.npz is damaged \([^\n]*\) in [^\n]*$"):
        raysim.load(folder).arrays("a.b")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        *((name, name) for name in READ_BY if name != "clients.parquet"),
        ("clients.parquet", "clients.parquet/rounds-000000-000000.parquet"),
        ("progress.csv", "progress.csv"),
    ],
)
def test_a_changed_file_of_a_finished_run_is_named_when_it_is_read(file, words, folder):
    files, read = RunFolder(folder), {**READ_BY, "progress.csv": lambda run: run.history}[file]
    files.write_arrays(0, {"a.b": np.zeros(3)})
    files.append_clients(files.client_table(0, {"client": np.arange(3)}))
    files.write_progress([{"round": "0", "system/round_s": "0.25"}], ["round", "system/round_s"])
    spec = model_spec(Config.model_validate(files.read_config()), SetInfo("", tuple("0123456789"), (8, 8, 1), 0, ""))
    save_file(build_model(spec, seed=0).state_dict(), files.model)
    files.mark("COMPLETED", "test accuracy 0.9")
    assert raysim.load(folder).status == Status("completed", "test accuracy 0.9")
    read(raysim.load(folder))
    path = folder / words
    path.write_bytes(path.read_bytes() + b"\n")  # the parsers of most formats do not mind
    remedy = r"Restore the file, or delete the folder and repeat the run"
    with pytest.raises(DataError, match=rf"^{words} has changed since the run wrote it in {folder}\. {remedy}$"):
        read(raysim.load(folder))
    path.write_bytes(path.read_bytes()[:-1])
    files.write_config({**files.read_config(), "labels": {"method": "given later"}})  # which a finished run may get
    read(raysim.load(folder))


@pytest.mark.parametrize("file", ["config.yaml", "progress.csv", "clients.parquet/rounds-000000-000000.parquet"])
def test_a_changed_file_of_a_run_that_a_scheduler_stopped_is_named_when_it_is_read(file, settings):
    def stop(record):
        raise Stopped

    def given(**more):
        return raysim.run(settings, name="a", quiet=True, rounds=2, **more)

    with pytest.raises(Stopped):
        given(on_round=stop)
    folder = Path(settings["storage"]) / "a"
    RunFolder(folder).mark("STOPPED", "stopped by asha after round 1 of 2")  # the driver's, which is another process
    raysim.load(folder).reload()
    path, sound = folder / file, (folder / file).read_bytes()
    path.write_bytes(sound + b"\n")
    with pytest.raises(DataError, match=rf"^{file} has changed since the run wrote it in {folder}"):
        raysim.load(folder).reload()
    path.write_bytes(sound)
    assert given().status.name == "completed"  # the same command goes on, and then other checksums count
    assert not (folder / "records.sha256").exists()


@pytest.mark.parametrize("content", [b"[" * 100_000, b"!!int x", b"!!timestamp x", None])
def test_a_configuration_that_no_run_wrote_is_damage(content, folder):
    (folder / "config.yaml").unlink()
    if content is None:
        os.mkfifo(folder / "config.yaml")  # reading it would wait for ever
    else:
        (folder / "config.yaml").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        RunFolder(folder).read_config()
    assert [run.status for run in find_runs([folder])] == ["damaged: no readable config.yaml"]


def test_a_summary_nested_without_end_is_damage(folder):
    (folder / "COMPLETED").write_text("")
    (folder / "summary.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        RunFolder(folder).read_json(folder / "summary.json")
    assert [run.status for run in find_runs([folder])] == ["damaged: no readable summary.json"]


def test_a_report_leaves_out_a_finished_run_with_another_summary(tmp_path):
    fabricate(tmp_path / "a", 0.5)
    files = RunFolder(tmp_path / "a")
    files.mark("COMPLETED")
    assert [run.status for run in find_runs([tmp_path])] == ["finished"]
    files.summary.write_text(files.summary.read_text().replace("0.", "0.9", 1))
    assert [run.status for run in find_runs([tmp_path])] == ["damaged: no readable summary.json"]


def test_a_folder_in_the_place_of_a_mark_is_no_mark(folder):
    (folder / "COMPLETED").mkdir()
    assert RunFolder(folder).status.name == "unfinished"
    assert raysim.load(folder).status.name == "unfinished"


def test_the_best_run_is_a_completed_one_and_losses_are_better_when_small(tmp_path):
    for name, loss, status in (("a", 2.0, "COMPLETED"), ("b", 1.0, "COMPLETED"), ("c", 0.5, "FAILED")):
        fabricate(tmp_path / name, loss / 4, status=status, progress={"server/loss": loss, "server/accuracy": loss / 4})
    runs = raysim.load(tmp_path)
    assert runs.best().name == runs.best("best_accuracy").name == runs.best("server/loss", "max").name == "a"
    assert runs.best("server/loss").name == "b"
    fabricate(tmp_path / "d", 0.1, progress={"server/loss": [0.1, *["nan"] * 9]})  # it diverged after a good round
    assert raysim.load(tmp_path).best("server/loss").name == "b"
    with pytest.raises(DataError, match=r"no completed run has 'server/los' in .*Did you mean 'server/loss'"):
        runs.best("server/los")
    with pytest.raises(DataError, match="Finish a run"):
        runs[2:].best()
