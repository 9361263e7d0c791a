"""`import raysim` as a library: runs, their results, sweeps, stop conditions, more rounds, functions of one's own."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

import raysim
from raysim.base.errors import ConfigError, DataError, RunExists
from raysim.core.method import Method
from raysim.engine.round_metrics import RoundRecord
from tests.samples import typed_use
from tests.support.federations import SMALL
from tests.support.report_runs import fabricate

PROJECT = Path(__file__).parent.parent


def pulled(*, mu: float = 0.1) -> Method:
    """FedProx under another name."""
    return Method("pulled", grads=lambda inner, client: lambda p, b: inner(p, b).add_(p - client.start, alpha=mu))


def test_import_is_light():
    code = "import sys, raysim; print(sorted({'torch', 'ray', 'pandas', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert set(raysim.__all__) <= set(dir(raysim))
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        raysim.runs  # noqa: B018


def test_a_faulty_configuration_is_refused_before_numpy_is_imported(tmp_path):
    (tmp_path / "a.yaml").write_text("local: {lrr: 0.1}\nmethods: [fedvgg]\n")
    code = (
        "import atexit, sys; sys.argv[1:] = ['run', 'a.yaml']; import raysim.__main__ as entry;"
        "atexit.register(lambda: print(sorted({'torch', 'ray', 'pandas', 'numpy', 'pyarrow'} & set(sys.modules))));"
        "entry.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "local.lrr: unknown key" in result.stderr
    assert "unknown method 'fedvgg'" in result.stderr
    assert (result.returncode, result.stdout.strip()) == (2, "[]")


def test_a_run_is_its_directory_as_an_object(settings):
    run = raysim.run(settings, name="a", methods=[{"fedvg": {"granularity": "layer"}}], quiet=True)
    assert run.status.name == "completed"
    assert run.summary["params_sha256"] == raysim.load(run.folder).summary["params_sha256"]
    assert list(run.history.index) == [0, 1, 2]
    assert run.accuracy == run.history["server/accuracy"].iloc[-1] == run.summary["accuracy"]
    assert run.best_accuracy == run.summary["best_accuracy"]
    assert len(run.clients) == 9
    norms = run.arrays("fedvg.norms")[2]
    assert norms.shape == (3, 4)
    assert list(norms.index) == sorted(run.clients.query("round == 2").client)
    with pytest.raises(KeyError, match=r"there is fedvg\.norms"):
        run.arrays("fedvg.norm")


def test_model_scores_as_the_run_did(settings, root):
    import torch

    from raysim.data.federation import Federation
    from raysim.plan.check import check
    from tests.support.federations import build_shards

    run = raysim.run(settings, name="a", local__steps=20, quiet=True)
    plan = check(run.config, "the run")
    shards = Federation(build_shards(plan.manifest, root / "shards"))
    images, labels = shards.held_out("test")
    inputs = torch.as_tensor(np.asarray(images)).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        hits = run.model()(inputs).argmax(1) == torch.as_tensor(np.asarray(labels))
    assert float(hits.float().mean()) == pytest.approx(run.accuracy, abs=1e-6)


@pytest.mark.slow
def test_files_dictionaries_and_overrides_give_one_configuration(settings, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(settings))
    runs = [
        raysim.run(file, {"partition.alpha": 0.5}, name="file", local={"lr": 0.2}, quiet=True),
        raysim.run(settings, name="dictionary", partition__alpha=0.5, local__lr=0.2, quiet=True),
    ]
    assert len({run.summary["params_sha256"] for run in runs}) == 1
    assert runs[0].config["local"]["steps"] == 2  # a dictionary is laid over its group
    assert settings["partition"] == SMALL["partition"]  # what was given is not changed
    assert list(raysim.Runs(runs).frame().index) == ["file", "dictionary"]


def test_faults_are_raised_all_at_once(settings):
    with pytest.raises(ConfigError) as error:
        raysim.run(settings, name="a", local__lr=-1, partition__alpha=0, rouns=3)
    assert {fault.key for fault in error.value.faults} == {"local.lr", "partition.alpha", "rouns"}
    with pytest.raises(ConfigError, match="rounds is not a group of keys"):
        raysim.run(settings, rounds__x=1)
    with pytest.raises(ConfigError, match="mu"):
        raysim.methods.fedprox(nu=0.1)
    with pytest.raises(AttributeError, match="fedprox"):
        raysim.methods.fedprocs()
    with pytest.raises(DataError, match="no such folder"):
        raysim.load(settings["storage"] + "/..")


@pytest.mark.essential
@pytest.mark.slow
def test_methods_as_names_values_and_functions_are_the_same_run(settings):
    here = [[{"fedprox": {"mu": 0.1}}], [raysim.methods.fedprox(mu=0.1)], [pulled], [{pulled: {"mu": 0.1}}]]
    runs = [raysim.run(settings, name=f"run{index}", methods=m, quiet=True) for index, m in enumerate(here)]
    assert len({run.summary["params_sha256"] for run in runs}) == 1
    assert runs[2].config["methods"] == [f"{__name__}:pulled"]


@pytest.mark.slow
def test_a_function_without_a_module_travels_by_value(settings):
    strength = 0.1

    def local_method() -> Method:
        return pulled(mu=strength)

    run = raysim.run(settings, name="own", methods=[local_method], quiet=True)
    assert (
        run.summary["params_sha256"]
        == raysim.run(settings, name="m", methods=[pulled], quiet=True).summary["params_sha256"]
    )
    assert "local_method@" in run.config["methods"][0]
    lock = threading.Lock()

    def unsendable() -> Method:
        return Method(str(lock))

    with pytest.raises(ConfigError, match=r"methods\[0\].*cannot be sent to other processes"):
        raysim.run(settings, methods=[unsendable])
    axis = {"method": {"grid_search": {"own": {"methods": [{unsendable: {}}, local_method]}}}}
    with pytest.raises(ConfigError, match=r"param_space\.method\.grid_search\.own\.methods\[0\].*cannot be sent"):
        raysim.tune(settings, tune={"param_space": axis})


@pytest.mark.usefixtures("ray_cluster")
def test_functions_and_methods_by_value_give_the_same_bits_on_ray(settings):
    def local_method() -> Method:
        return pulled(mu=0.1)

    strength = 0.2
    value = Method("value", grads=lambda inner, client: lambda p, b: inner(p, b).add_(p - client.start, alpha=strength))
    settings = {**settings, "methods": [local_method, value]}
    serial = raysim.run(settings, name="serial", quiet=True)
    on_ray = raysim.run(settings, name="ray", resources={"backend": "ray", "trainers": 2}, quiet=True)
    assert on_ray.summary["params_sha256"] == serial.summary["params_sha256"]


@pytest.mark.slow
def test_callback_sees_every_round_and_may_stop(settings):
    rounds: list[int] = []

    def watch(record: RoundRecord) -> str | None:
        rounds.append(record.round_index)
        return "stop" if record.round_index == 1 else None

    run = raysim.run(settings, name="a", rounds=5, on_round=watch, quiet=True)
    assert rounds == [0, 1]
    assert (run.status.name, run.summary["rounds"]) == ("completed", 2)
    assert run.summary["params_sha256"] == raysim.run(settings, name="b", rounds=2, quiet=True).summary["params_sha256"]
    assert (run.folder / "confusion.png").is_file()

    def fail(record: RoundRecord) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        raysim.run(settings, name="c", on_round=fail, quiet=True)
    assert raysim.load(run.folder.parent / "c").status.name == "failed"


def test_runs_in_a_thread(settings):
    found: list[raysim.Run] = []
    thread = threading.Thread(target=lambda: found.append(raysim.run(settings, name="thread", quiet=True)))
    thread.start()
    thread.join()
    assert found[0].status.name == "completed"


@pytest.mark.essential
@pytest.mark.slow
def test_ctrl_c_in_a_script_ends_it_after_a_checkpoint_and_the_same_call_goes_on(settings):
    script = f"""
import raysim
raysim.run({settings!r}, name="cut", rounds=5, on_round=lambda record: print(record.round_index, flush=True), quiet=True)
"""
    lines = []
    with subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT, stdout=-1, stderr=-1, text=True) as process:
        lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # a loop of the shell around it ends, too
    assert lines == ["0\n"]
    message = r"KeyboardInterrupt: stopped by a signal after a checkpoint; the same command resumes at round (\d)\n"
    (next_round,) = re.findall(message, errors)
    assert int(next_round) == len(output.splitlines()) + 2 < 6
    rounds: list[int] = []
    cut = raysim.run(
        settings, name="cut", rounds=5, on_round=lambda record: rounds.append(record.round_index), quiet=True
    )
    assert rounds == list(range(int(next_round) - 1, 5))
    through = raysim.run(settings, name="through", rounds=5, quiet=True)
    assert cut.summary["params_sha256"] == through.summary["params_sha256"]


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.essential
@pytest.mark.slow
def test_stop_conditions_end_a_run_completed(settings):
    settings["data"] |= {"validation": 0.1}  # whose accuracy falls early
    full = raysim.run(settings, name="full", rounds=12, quiet=True).history["server/accuracy"]
    wanted = float(full.iloc[:6].max())
    first = int((full >= wanted).idxmax())
    reached = raysim.run(settings, name="accuracy", rounds=12, stop__score=wanted, quiet=True)
    assert reached.summary["rounds"] == first + 1
    assert "was asked for" in reached.status.message == reached.summary["stopped_by"]
    patient = raysim.run(settings, name="patience", rounds=12, stop__patience=2, quiet=True)
    scores = full.to_list()
    expected = next(i for i in range(12) if i - scores.index(max(scores[: i + 1])) >= 2)
    assert patient.summary["rounds"] == expected + 1
    again = raysim.run(settings, name="accuracy", rounds=12, stop__score=wanted, quiet=True)
    assert again.summary == reached.summary


def test_a_stopped_run_that_was_interrupted_ends_at_the_same_round(settings):
    settings["data"] |= {"validation": 0.1}  # see above
    whole = raysim.run(settings, name="whole", rounds=12, stop__patience=2, quiet=True)

    def fail(record: RoundRecord) -> None:
        if record.round_index == whole.summary["rounds"] - 1:
            raise ZeroDivisionError

    again = {"name": "cut", "rounds": 12, "stop": {"patience": 2}, "checkpoint": {"every_s": 0.0}, "quiet": True}
    with pytest.raises(ZeroDivisionError):
        raysim.run(settings, on_round=fail, **again)
    cut = raysim.run(settings, **again)
    assert cut.summary["params_sha256"] == whole.summary["params_sha256"]
    assert cut.summary["rounds"] == whole.summary["rounds"]


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize("methods", [["scaffold"], [{"fedvg": {}}, "fedavgm"]])
def test_more_rounds_give_the_hash_of_a_run_through(settings, methods):
    through = raysim.run(settings, name="through", rounds=5, methods=methods, quiet=True)
    short = raysim.run(settings, name="longer", rounds=3, methods=methods, quiet=True)
    longer = raysim.run(settings, name="longer", rounds=5, methods=methods, quiet=True)
    assert short.summary["params_sha256"] != through.summary["params_sha256"] == longer.summary["params_sha256"]
    assert list(longer.history.index) == list(range(5))
    assert len(longer.clients) == 15
    with pytest.raises(RunExists, match="Raise rounds"):
        raysim.run(settings, name="longer", rounds=4, methods=methods, quiet=True)
    with pytest.raises(ConfigError, match=r"local\.lr"):
        raysim.run(settings, name="longer", rounds=7, methods=methods, local__lr=0.2, quiet=True)


def test_more_rounds_are_refused_where_the_schedule_depends_on_the_total(settings):
    raysim.run(settings, name="a", local__schedule="cosine", quiet=True)
    with pytest.raises(ConfigError, match="cosine depends on the number"):
        raysim.run(settings, name="a", rounds=5, local__schedule="cosine", quiet=True)


# --- data and sweeps --------------------------------------------------------------------------------------------------


def test_arrays_become_a_prepared_set(settings, tmp_path):
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (60, 8, 8), np.uint8), np.arange(60) % 3
    info = raysim.arrays(images, labels, name="mine", root=tmp_path / "data")
    assert (info.num_examples, info.shape, info.classes) == (60, (8, 8, 1), ("0", "1", "2"))
    run = raysim.run(settings, name="a", data={"name": "mine", "root": str(tmp_path / "data")}, quiet=True)
    assert run.status.name == "completed"
    for bad, message in (
        (images.astype(complex), "uint8"),
        (images[:, 0], r"Give \(n, height, width, channels\)"),
        (images[:5], "Give one a row"),
    ):
        with pytest.raises(DataError, match=message):
            raysim.arrays(bad, labels, name="bad", root=tmp_path / "data")
    with pytest.raises(DataError, match="label"):
        raysim.arrays(images, labels, name="bad", classes=["one"], root=tmp_path / "data")


def test_a_report_of_all_runs_of_a_folder_lies_in_that_folder(tmp_path):
    for sweep in ("one", "two"):
        fabricate(tmp_path / "runs" / sweep / "t0", 0.5, labels={"method": sweep})
    (tmp_path / "runs" / "one" / "sweep.yaml").write_text("name: one")
    report = raysim.report(raysim.load(tmp_path / "runs"), figures=[])
    assert report.folder == tmp_path / "runs" / "report"
    assert (
        raysim.report(raysim.load(tmp_path / "runs" / "one"), figures=[]).folder == tmp_path / "runs" / "one" / "report"
    )


def test_a_finished_run_without_checkpoints_keeps_its_results(settings):
    run = raysim.run(settings, name="a", rounds=2, quiet=True)
    shutil.rmtree(run.folder / "checkpoints")
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    with pytest.raises(RunExists, match="has no checkpoints"):
        raysim.run(settings, name="a", rounds=3, quiet=True)
    assert {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()} == before
    assert raysim.run(settings, name="a", rounds=2, quiet=True).accuracy == run.accuracy


@pytest.mark.essential
@pytest.mark.usefixtures("ray_cluster")
def test_sweep_and_report(settings):
    axes = {"local.lr": {"grid_search": [0.1, 0.01]}, "seed": {"grid_search": [0, 1]}}
    runs = raysim.tune(settings, name="lr", tune={"param_space": axes, "max_concurrent": 1}, quiet=True)
    assert len(runs) == 4
    frame = runs.frame()
    assert {"lr", "seed", "accuracy", "status"} <= set(frame.columns)
    assert set(frame.sweep) == {"lr"}
    assert raysim.run(settings, name="alone", rounds=1, quiet=True).sweep == ""
    assert runs.best().accuracy == frame.accuracy.max()
    report = raysim.report(runs, rows="lr", against="0.1", metric="accuracy")
    assert report.text == (report.folder / "report.md").read_text()
    assert report.text.startswith("#")
    ((title, means),) = report.tables.items()
    assert title == "digits / mlp"
    expected = frame.groupby("lr").accuracy.mean() * 100
    assert means.iloc[:, 0].to_dict() == pytest.approx({f"{lr:g}": value for lr, value in expected.items()})
    assert report.cells[["n", "mean"]].to_numpy() == pytest.approx(np.array([[2, value] for value in expected]))
    (test,) = report.p_values.itertuples()
    assert (test.table, test.method, test.better_than, test.num_pairs) == (title, "0.1", "0.01", 2)
    assert 0 < test.p == test.p_holm
    assert report.figures
    assert all(path.is_file() and f"{name}.png" == path.name for name, path in report.figures.items())
    shown = report._repr_markdown_()
    assert all(Path(link).is_file() for link in re.findall(r"!\[.*?\]\((.*?)\)", shown))
    with pytest.raises(ConfigError, match=r"fault in the call\n.*report\.against: no row 'fedvg'"):
        raysim.report(runs, against="fedvg")
    # A folder of runs: what lies inside of runs, and Tune's own files, are none.
    for inside in (runs[0].folder / "checkpoints", runs.folder / ".tune" / "state"):
        inside.mkdir(parents=True, exist_ok=True)
        (inside / "config.yaml").write_text("name: no run")
    found = raysim.load(runs.folder)
    assert sorted(run.name for run in found) == sorted(run.name for run in runs)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_typed_sample_runs(settings):
    report = typed_use.compare(settings)
    assert sorted(report.cells["method"]) == ["tests.samples.typed_use:pulled", "uniform + fedprox"]
    assert (
        PROJECT / "raysim" / "py.typed"
    ).is_file()  # without it no type reaches a user; `make lint` checks the sample


def test_a_run_is_not_written_into_a_sweep_and_a_damaged_summary_is_one_sentence(settings, tmp_path):
    folder = raysim.run(settings, name="a", quiet=True).folder
    (folder / "summary.json").write_text("")
    with pytest.raises(
        DataError, match=r"summary.json has changed since the run wrote it .*delete the folder and repeat the run"
    ):
        raysim.run(settings, name="a", quiet=True)
    (tmp_path / "runs" / "swept").mkdir()
    (tmp_path / "runs" / "swept" / "sweep.yaml").write_text("")
    with pytest.raises(RunExists, match="'swept' is a sweep, not a run"):
        raysim.run(settings, name="swept", quiet=True)
