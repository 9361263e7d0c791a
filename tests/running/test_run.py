"""How a run ends early, and what may have moved when it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file

from raysim.base.errors import ConfigError, RaysimError
from raysim.engine.simulation import Interrupted
from raysim.models import build_model
from raysim.running.runner import execute
from tests.cluster.conftest import MARK, end, marked, wait_for
from tests.support.federations import plan_of, raw_config
from tests.support.runs import a_plan, quietly, stopped_after

pytestmark = pytest.mark.ray

PROJECT = Path(__file__).parents[2]


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize(("raised", "number"), [(KeyboardInterrupt, signal.SIGINT), (SystemExit, signal.SIGTERM)])
def test_signal_before_the_first_round_is_no_failure(raised, number, root, tmp_path):
    def start(*_):
        raise raised

    plan = plan_of(root, name="a", storage=str(tmp_path))
    with pytest.raises(Interrupted) as caught:
        execute(plan, on_start=start, on_round=lambda _: None)
    assert (caught.value.signal_number, caught.value.next_round) == (number, None)
    assert not (tmp_path / "a" / "FAILED").exists()
    execute(plan, on_start=lambda *_: None, on_round=lambda _: None)
    assert (tmp_path / "a" / "COMPLETED").exists()


@pytest.mark.essential
@pytest.mark.slow
def test_run_goes_on_where_its_data_were_moved(root, tmp_path):
    def stop(record):
        if record.round_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def go(plan, on_round=lambda _: None):
        first = []
        summary = execute(plan, on_start=lambda folder, start, count: first.append(start), on_round=on_round)
        return first[0], summary["params_sha256"]

    with pytest.raises(Interrupted):
        go(plan_of(root, name="a", storage=str(tmp_path)), stop)
    moved = tmp_path / "moved"
    shutil.copytree(root / "digits", moved / "digits")
    assert go(plan_of(moved, name="a", storage=str(tmp_path))) == (
        2,
        go(plan_of(root, name="whole", storage=str(tmp_path)))[1],
    )


def test_a_run_does_not_go_on_with_other_weights_in_the_file_it_began_with(root, tmp_path):
    def plan(rounds):
        model = {"name": "mlp", "hidden": 4, "pretrained": str(tmp_path / "weights.safetensors")}
        return plan_of(root, name="a", storage=str(tmp_path), model=model, rounds=rounds)

    def save(seed):
        save_file(build_model(spec, seed=seed).state_dict(), weights)

    weights, sound = tmp_path / "weights.safetensors", plan_of(root, model={"name": "mlp", "hidden": 4})
    spec = sound.spec
    save(seed=0)
    execute(plan(1))
    save(seed=1)
    with pytest.raises(ConfigError, match=r"model\.pretrained: the weights in .* changed since the finished run"):
        execute(plan(2))
    save(seed=0)
    assert execute(plan(2))["rounds"] == 2


@pytest.mark.essential
@pytest.mark.parametrize(
    ("content", "words"),
    [(b"round,accuracy\n0,\xff", "progress.csv is damaged"), (None, "a file of the run cannot be read or written")],
)
def test_a_damaged_file_of_a_run_is_one_sentence(content, words, root, tmp_path):
    execute(plan_of(root, name="a", storage=str(tmp_path), rounds=1))
    progress = tmp_path / "a" / "progress.csv"
    progress.unlink()
    (tmp_path / "a" / "COMPLETED").write_text("")  # as versions wrote it that knew no checksums
    if content is None:
        (tmp_path / "a" / ".lock").unlink()
        (tmp_path / "a" / ".lock").mkdir()
    else:
        progress.write_bytes(content)
    with pytest.raises(RaysimError, match=rf"{words} .*{tmp_path}"):
        execute(plan_of(root, name="a", storage=str(tmp_path), rounds=2))


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_in_a_checkpoint_and_leaves_nothing_running(root, tmp_path):
    """Ctrl-C reaches every process in the foreground, Ray's among them; the run still finishes its round."""
    raw = raw_config(root, ["fedvg"], name="a", storage=str(tmp_path), rounds=100_000)
    raw |= {"checkpoint": {"every_s": 0}, "resources": {"backend": "ray", "trainers": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    folder = tmp_path / "a" / "checkpoints"
    try:
        for _ in range(3):  # on a machine at its limits a raylet misses Ray's own deadline of 30 s
            process = subprocess.Popen(
                [sys.executable, "-m", "raysim", "run", str(tmp_path / "run.yaml")],
                cwd=PROJECT,
                env={**environment, "PYTHONPATH": str(PROJECT), MARK: str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            wait_for(lambda: len(list(folder.glob("round-*"))) > 1 or process.poll() is not None, "two checkpoints")  # noqa: B023
            if process.poll() is None:
                break
            output, _ = process.communicate()
            assert "timed out during startup" in output, output
            end(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        wait_for(lambda: not marked(tmp_path), "the end of all its processes", 60)
    finally:
        end(tmp_path)
    assert process.returncode == 128 + signal.SIGINT, output
    last = max(path.name for path in folder.glob("round-*"))
    assert f"stopped by a signal after a checkpoint; the same command resumes at round {int(last[6:]) + 1}" in output
    assert "Traceback" not in output
    assert output.count("stopped by") == 1
    rows = (tmp_path / "a" / "progress.csv").read_text().splitlines()
    assert len(rows) == int(last[6:]) + 1
    assert json.loads((tmp_path / "a" / "env.json").read_text())["resources"]["backend"] == "ray"


def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_new_keys(root, tmp_path):
    plan = a_plan(root, tmp_path, rounds=2, checkpoint={"every_s": 0})
    stopped_after(0, plan)
    file = tmp_path / "a" / "config.yaml"
    written = yaml.safe_load(file.read_text())
    del written["cohort"]["sampling"]
    file.write_text(yaml.safe_dump(written))
    assert quietly(plan)["rounds"] == 2
    shutil.rmtree(tmp_path / "a")
    stopped_after(0, plan)
    file.write_text(yaml.safe_dump({**written, "cohort": {**written["cohort"], "sampling": "poisson"}}))
    with pytest.raises(ConfigError, match=r"cohort\.sampling: is 'fixed', but the unfinished run in .* has 'poisson'"):
        quietly(plan)
