"""The user's own code by name: models, methods, readers, augmentations, partitions, metrics."""

from __future__ import annotations

import json
import os
import textwrap
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import raysim
from raysim.base.digest import source_digest
from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.data.reader_api import fingerprint
from tests.support.own_folder import SETTINGS, command, summary

# --- it runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_empty_folder_with_own_net_method_and_reader_gives_one_hash_everywhere(here):
    ended = command(here, "run", "own.yaml", "name=ray", "resources.backend=ray", "resources.trainers=1")
    assert ended.returncode == 0, ended.stderr
    assert (here / "data" / "mine" / "mine.arrow").is_file()
    raysim.run("own.yaml", name="python", quiet=True)
    assert CliRunner().invoke(app, ["run", "own.yaml", "name=serial"]).exit_code == 0
    found = [summary(here, name) for name in ("serial", "ray", "python")]
    assert len({one["params_sha256"] for one in found}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_that_runs_already_and_trials_find_own_code(here):
    """Neither the started Ray nor Tune's workers know this folder."""
    serial = raysim.run("own.yaml", quiet=True)
    on_ray = raysim.run("own.yaml", name="ray", resources={"backend": "ray", "trainers": 2}, quiet=True)

    def local_net(num_classes, input_shape, *, width):
        import my_net

        return my_net.net(num_classes, input_shape, width=width)

    sweep = {"param_space": {"model.name": {"grid_search": ["my_net:net", local_net]}}, "max_concurrent": 1}
    runs = raysim.tune("own.yaml", name="sweep", tune=sweep, resources={"trainers": 1}, quiet=True)
    assert len(runs) == 2
    assert len({run.summary["params_sha256"] for run in (serial, on_ray, *runs)}) == 1


@pytest.mark.slow
def test_functions_as_values_are_the_functions_by_name(here):
    import my_data
    import my_method
    import my_net

    by_name = raysim.run("own.yaml", quiet=True)
    by_value = raysim.run(
        SETTINGS,
        name="value",
        methods=[{my_method.pull: {"mu": 0.2}}],
        data__reader={my_data.read: {"invert": True}},
        partition__scheme=my_data.split,
        model__name=my_net.net,
        evaluation__metrics=[my_data.share],
        quiet=True,
    )
    assert by_value.config["model"] == by_name.config["model"]
    assert by_value.summary["params_sha256"] == by_name.summary["params_sha256"]
    assert list(by_name.history["server/share"]) == pytest.approx(list(by_name.history["server/accuracy"]))
    plain = raysim.run(SETTINGS, name="plain", data__augment="none", quiet=True)
    assert plain.summary["params_sha256"] != by_name.summary["params_sha256"]


@pytest.mark.slow
def test_functions_without_a_module_travel_everywhere(here):
    import my_data
    import my_net

    by_name = raysim.run("own.yaml", quiet=True)
    mine = raysim.run(
        SETTINGS,
        name="value",
        model__name=lambda num_classes, input_shape, width: my_net.net(num_classes, input_shape, width=width),
        partition__scheme=lambda labels, num_clients, rng: my_data.split(labels, num_clients, rng),
        data={"augment": lambda images, generator: my_data.noise(images, generator, strength=0.2)},
        quiet=True,
    )
    assert "@" in mine.config["model"]["name"]
    assert mine.summary["params_sha256"] == by_name.summary["params_sha256"]
    assert mine.model()(torch.zeros(1, 1, 8, 8)).shape == (1, 4)


def made_pull(mu: float) -> raysim.Method:
    """A method as a value, with an option inside."""

    def grads(inner, client):
        return lambda params, batch: inner(params, batch).add_(params - client.start, alpha=mu)

    return raysim.Method("pull", grads=grads)


SMALL = {"rounds": 2, "local": {"steps": 2}, "partition": {"num_clients": 4}, "resources": {"backend": "serial"}}


@pytest.mark.slow
def test_a_method_as_a_value_is_the_method_by_name_and_its_folder_says_so(here, root, capsys):
    import my_method

    data = {"root": str(root)}
    by_name = raysim.run(SMALL, data=data, name="name", methods=[{my_method.pull: {"mu": 0.2}}], quiet=True)
    by_value = raysim.run(SMALL, data=data, name="value", methods=[made_pull(0.2), "fedavgm"])
    assert by_value.config["methods"][0].startswith(f"{__name__}:pull@")
    same = raysim.run(SMALL, data=data, name="same", methods=[my_method.pull(mu=0.2)], quiet=True)
    assert same.summary["params_sha256"] == by_name.summary["params_sha256"] != by_value.summary["params_sha256"]
    note = f"{by_value.config['methods'][0]} is a value given from Python; no file holds it, so only the same call"
    assert f"note: {note}" in capsys.readouterr().out
    assert (by_value.folder / "config.yaml").read_text().startswith(f"# {note}")
    assert not (by_name.folder / "config.yaml").read_text().startswith("#")


@pytest.mark.slow
def test_a_run_of_a_method_as_a_value_goes_on_with_the_same_value_only(here, root):
    settings = {**SMALL, "data": {"root": str(root)}, "name": "cut"}
    raysim.run(settings, methods=[made_pull(0.2)], quiet=True)
    longer = raysim.run(settings, rounds=3, methods=[made_pull(0.2)], quiet=True)
    through = raysim.run(settings, name="through", rounds=3, methods=[made_pull(0.2)], quiet=True)
    assert longer.summary["params_sha256"] == through.summary["params_sha256"]
    with pytest.raises(ConfigError, match=r"methods: is .*pull@.* but the finished run in .* has .*pull@"):
        raysim.run(settings, rounds=4, methods=[made_pull(0.3)], quiet=True)
    ended = command(here, "run", "runs/cut/config.yaml", "rounds=4")
    assert ended.returncode == 2
    assert "was given from Python as a value, and no file holds it. Give the same value to raysim.run" in ended.stderr


def test_the_digest_of_a_value_changes_with_what_it_holds():
    def pull(mu: float = 0.1) -> raysim.Method:
        return made_pull(mu)

    class Scaled:
        def __init__(self, factor: object):
            self.factor = factor

        def __call__(self, images):
            return images * self.factor

    same = [made_pull(0.1), made_pull(0.1)]
    assert len({source_digest(each) for each in same}) == 1

    def with_default(value: float, by_name: float = 0.0):
        def default(images, strength=value, *, more=by_name):
            return images * strength + more

        return default

    assert source_digest(with_default(0.1)) == source_digest(with_default(0.1))
    others = [with_default(0.1), with_default(0.2), with_default(0.1, 0.2)]
    others += [made_pull(0.1), made_pull(0.2), pull, partial(pull, mu=0.1), partial(pull, mu=0.2)]
    others += [Scaled(2), Scaled(torch.tensor(2)), Scaled(torch.tensor(3)), Scaled]
    others += [Scaled(2).__call__, Scaled(3).__call__, partial(torch.relu), partial(torch.tanh)]
    assert len({source_digest(each) for each in others}) == len(others)


def test_named_classifier_is_the_head(here):
    from raysim.models import ModelSpec, head_of

    assert head_of(ModelSpec("my_net:net", 4, (8, 8, 1))) == "1"
    assert head_of(ModelSpec("my_net:net", 4, (8, 8, 1), {"width": 4}, head="0.1")) == "0.1"
    with pytest.raises(ConfigError, match=r"model\.head: cnn has the classifier at fc2; drop it"):
        raysim.run("own.yaml", model={"name": "cnn", "head": "fc1"})


def test_a_network_that_reads_a_number_while_it_is_built_is_sound(tmp_path, monkeypatch):
    from raysim.models import ModelSpec, build_skeleton, try_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = """
    import torch
    from torch import nn

    def net(num_classes, input_shape):
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        return nn.Sequential(nn.Flatten(), *map(nn.Dropout, rates), nn.Linear(64, num_classes))
    """
    (tmp_path / "reads_numbers.py").write_text(textwrap.dedent(text))
    spec = ModelSpec("reads_numbers:net", 4, (8, 8, 1))
    state = torch.random.get_rng_state()
    try_model(spec)
    assert {leaf.device.type for leaf in build_skeleton(spec).parameters()} == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), state)


def test_another_file_of_the_same_size_and_time_is_another_source(tmp_path):
    read, files = made_pull, [tmp_path / name for name in ("fold1.npy", "fold2.npy")]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 8)
        os.utime(file, (1, 1))
    assert fingerprint(read, files[0], {}) != fingerprint(read, files[1], {})
    assert fingerprint(read, files[0], {}) == fingerprint(read, files[0], {})


# --- sets -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_set_is_made_again_when_reader_options_or_files_change_and_not_otherwise(here):
    file, numbers = here / "data" / "mine" / "mine.arrow", count()

    def made() -> tuple[int, str]:
        raysim.run("own.yaml", name=f"run{next(numbers)}", quiet=True)
        return file.stat().st_mtime_ns, json.loads(file.with_suffix(".json").read_text())["checksum"]

    first = made()
    assert made() == first
    settings = yaml.safe_load((here / "own.yaml").read_text())
    settings["data"]["reader"] = "my_data:read"
    (here / "own.yaml").write_text(yaml.safe_dump(settings))
    other = made()
    assert other[1] != first[1]
    np.save(here / "scans" / "scans.npy", np.zeros((200, 8, 8), np.uint8))
    assert made()[1] not in (first[1], other[1])
    (here / "scans").rename(here / "elsewhere")  # another machine has the prepared set alone
    made()
    with pytest.raises(
        ConfigError, match=r"no such file or folder for the set 'mine' in .*scanz"
    ):  # a slip, no other machine
        raysim.run("own.yaml", data__files="scanz")
    with pytest.raises(ConfigError, match=r"no such file or folder for the set 'fresh'"):
        raysim.run("own.yaml", data__name="fresh")
    with pytest.raises(ConfigError, match=r"'digits' is a set of raysim's own"):
        raysim.run("own.yaml", data__name="digits")
    raysim.arrays(np.zeros((9, 8, 8), np.uint8), np.arange(9) % 3, name="given")
    with pytest.raises(ConfigError, match=r"'given' exists and was not written by your reader"):
        raysim.run("own.yaml", data__name="given")
