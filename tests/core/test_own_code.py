"""The user's own code by name: models, methods, readers, augmentations, partitions, metrics; and its faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import raysim
from raysim.core.digest import source_digest
from raysim.core.errors import ConfigError, RaysimError

SOURCES = Path(__file__).parents[2]

MY_NET = """
from torch import nn


def net(num_classes, input_shape, *, width: int = 16):
    height, breadth, channels = input_shape
    body = nn.Sequential(nn.Flatten(), nn.Linear(height * breadth * channels, width), nn.ReLU())
    return nn.Sequential(body, nn.Linear(width, num_classes))
"""
MY_METHOD = """
from raysim.core.method import Method


def pull(*, mu=0.1):
    def grads(inner, client):
        return lambda params, batch: inner(params, batch).add_(params - client.start, alpha=mu)

    return Method("pull", grads=grads)
"""
MY_DATA = """
import numpy as np
import torch


def read(files, *, invert: bool = False):
    images, labels = np.load(files / "scans.npy"), np.load(files / "grades.npy")
    return (255 - images if invert else images), labels


def noise(images, generator, strength: float = 0.1):
    return (images + strength * torch.rand(images.shape, generator=generator)).clamp(0, 1)


def split(labels, num_clients, rng):
    return np.array_split(rng.permutation(len(labels)), num_clients)


def share(labels, logits):
    return (logits.argmax(1) == labels).mean()
"""
SETTINGS = {
    "name": "own",
    "rounds": 2,
    "methods": [{"my_method:pull": {"mu": 0.2}}],
    "data": {
        "name": "mine",
        "reader": {"my_data:read": {"invert": True}},
        "files": "scans",
        "augment": {"my_data:noise": {"strength": 0.2}},
    },
    "partition": {"scheme": "my_data:split", "num_clients": 4},
    "model": {"name": "my_net:net", "width": 8},
    "local": {"lr": 0.1, "steps": 2},
    "evaluation": {"metrics": ["my_data:share"]},
    "resources": {"backend": "serial"},
}


def write_files(folder: Path, **others: str) -> Path:
    """The user's folder: modules, scans and own.yaml."""
    for name, text in {"my_net": MY_NET, "my_method": MY_METHOD, "my_data": MY_DATA, **others}.items():
        (folder / f"{name}.py").write_text(text)
    rng = np.random.default_rng(0)
    (folder / "scans").mkdir()
    np.save(folder / "scans" / "scans.npy", rng.integers(0, 256, (200, 8, 8), np.uint8))
    np.save(folder / "scans" / "grades.npy", np.arange(200) % 4)
    (folder / "own.yaml").write_text(yaml.safe_dump(SETTINGS))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The user's folder, which this process stands in and can import from."""
    monkeypatch.chdir(write_files(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(tmp_path))
    ]:
        del sys.modules[name]


def command(folder: Path, *words: str, script: bool = True) -> subprocess.CompletedProcess[str]:
    """`raysim WORDS` as the installed script starts it, whose first folder of modules is not the current one."""
    start = (
        ["-c", "import sys; sys.path.remove(''); from raysim.cli.main import main; main()"]
        if script
        else ["-m", "raysim"]
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *start, *words], cwd=folder, env=environment, capture_output=True, text=True)


def summary(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / "runs" / name / "summary.json").read_text())


# --- it runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_empty_folder_with_own_net_method_and_reader_gives_one_hash_everywhere(tmp_path):
    write_files(tmp_path)
    for name, where in {"serial": [], "ray": ["resources.backend=ray", "resources.trainers=2"]}.items():
        ended = command(tmp_path, "run", "own.yaml", f"name={name}", *where)
        assert ended.returncode == 0, ended.stderr
    code = "import raysim; raysim.run('own.yaml', name='python', quiet=True)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    found = [summary(tmp_path, name) for name in ("serial", "ray", "python")]
    assert len({one["params_sha256"] for one in found}) == 1
    assert (tmp_path / "data" / "mine" / "mine.arrow").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_that_runs_already_and_trials_find_own_code(here):
    """Neither the started Ray nor Tune's workers know this folder."""
    serial = raysim.run("own.yaml", quiet=True)
    on_ray = raysim.run("own.yaml", name="ray", resources={"backend": "ray", "trainers": 2}, quiet=True)

    def local_net(num_classes, input_shape, *, width):
        import my_net

        return my_net.net(num_classes, input_shape, width=width)

    sweep = {"param_space": {"model.name": {"grid_search": ["my_net:net", local_net]}}}
    runs = raysim.tune("own.yaml", name="sweep", tune=sweep, resources={"trainers": 1}, quiet=True)
    assert len(runs) == 2
    assert len({run.summary["params_sha256"] for run in (serial, on_ray, *runs)}) == 1


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


@pytest.mark.usefixtures("ray_cluster")
def test_a_method_as_a_value_gives_the_same_bits_on_ray(here, root):
    settings = {**SMALL, "data": {"root": str(root)}, "methods": [made_pull(0.2)]}
    serial = raysim.run(settings, name="serial", quiet=True)
    on_ray = raysim.run(settings, name="ray", resources={"backend": "ray", "trainers": 2}, quiet=True)
    assert on_ray.summary["params_sha256"] == serial.summary["params_sha256"]


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
    others = [made_pull(0.1), made_pull(0.2), pull, partial(pull, mu=0.1), partial(pull, mu=0.2)]
    others += [Scaled(2), Scaled(torch.tensor(2)), Scaled(torch.tensor(3)), Scaled]
    others += [Scaled(2).__call__, Scaled(3).__call__, partial(torch.relu), partial(torch.tanh)]
    assert len({source_digest(each) for each in others}) == len(others)


def test_named_classifier_is_the_head(here):
    from raysim.models import ModelSpec, head_of

    assert head_of(ModelSpec("my_net:net", 4, (8, 8, 1))) == "1"
    assert head_of(ModelSpec("my_net:net", 4, (8, 8, 1), {"width": 4}, head="0.1")) == "0.1"
    with pytest.raises(ConfigError, match=r"model\.head: cnn has its classifier at fc2; drop it"):
        raysim.run("own.yaml", model={"name": "cnn", "head": "fc1"})


# --- sets -------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ConfigError, match=r"'given' that no reader of yours wrote"):
        raysim.run("own.yaml", data__name="given")


def test_prepare_by_an_own_reader(tmp_path):
    write_files(tmp_path)
    ended = command(tmp_path, "prepare", "my_data:read", "--as", "scans", "--root", "scans", "invert=true")
    assert ended.returncode == 0, ended.stderr
    assert "scans: 200 images (8, 8, 1), 4 classes" in ended.stdout
    ended = command(tmp_path, "prepare", "my_data:read", "--as", "scans", "--root", "scans", "inwert=true")
    assert ended.returncode == 2
    assert "Did you mean 'invert'?" in ended.stderr
    assert "Give --as NAME" in command(tmp_path, "prepare", "my_data:read", "--root", "scans").stderr


# --- faults -----------------------------------------------------------------------------------------------------------


def test_command_finds_methods_of_this_folder_and_says_what_it_does_not_find(tmp_path):
    write_files(tmp_path, broken="import nothing_like_it\n")
    assert "mu = 0.1 " in command(tmp_path, "methods", "my_method:pull").stdout
    ended = command(tmp_path, "methods", "my_method:pul")
    assert ended.returncode == 2
    assert f"no function 'pul' in {tmp_path}/my_method.py. Did you mean 'pull'?" in ended.stderr


@pytest.mark.parametrize("name", ["methods", "cluster"])
@pytest.mark.parametrize("script", [True, False])
def test_a_folder_that_shadows_ours_is_one_sentence(tmp_path, name, script):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    ended = command(tmp_path, "methods", script=script)
    assert ended.returncode == 2
    assert ended.stderr.strip() == (
        f"OwnCodeError: {tmp_path / name} stands in the way of raysim's own package {name!r}. Give it another name"
    )


BROKEN = """
import numpy as np
from raysim.core.method import Method


def boom(*anything, **options):
    raise ValueError("boom")

def failing_model(num_classes, input_shape): boom()
def failing_reader(files): boom()
def failing_augment(images): boom()
def failing_split(labels, num_clients): boom()
def failing_method(): boom()
def failing_metric(labels, logits): boom()
def none(num_classes=0, input_shape=0, files=0, images=0, labels=0): pass
def none_split(labels, num_clients): pass
def twice(labels, num_clients): return [np.arange(9)] * num_clients
def none_metric(labels, logits): pass
def no_shape(num_classes): pass
def taken(num_classes, input_shape, blocks=3): pass
def hook(name="grads"): return Method("hook", **{name: boom})
def none_hook(name="grads"): return Method("hook", **{name: lambda *values: None})
def none_gradient(): return Method("hook", grads=lambda inner, client: lambda params, batch: None)
number = 3
"""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"name": "broken:failing_model"}}, r"model: .*boom.*broken\.py, line 7, in boom"),
        (
            {"model": {"name": "broken:none"}},
            r"model: .*returned NoneType in .*broken\.py, line \d+, in none\. Return an nn\.Module",
        ),
        ({"model": {"name": "broken:no_shape"}}, r"model\.name: takes no argument 'input_shape'.*in no_shape"),
        ({"model": {"name": "broken:taken"}}, r"model\.name: its option 'blocks' is a key of raysim's; rename it"),
        ({"model": {"name": "my_net:net", "width": "wide"}}, r"model\.width: "),
        ({"model": {"name": "my_net:net", "widht": 3}}, r"model\.widht: unknown key\. Did you mean 'width'"),
        ({"model": {"name": "broken:nett"}}, r"model\.name: cannot import model .*no function 'nett' in .*broken\.py"),
        ({"model": {"name": "broken:number"}}, r"model\.name: .*is no function but of type int, in .*broken\.py"),
        ({"model": {"name": "absent:f"}}, r"model\.name: .*there is no module 'absent'"),
        ({"model": {"name": "wrong:f"}}, r"model\.name: .*SyntaxError.*wrong\.py, line 2"),
        ({"model": {"name": "needy:f"}}, r"model\.name: .*nothing_like_it.*needy\.py, line 1"),
        ({"methods": ["broken:failing_method"]}, r"methods\[0\].*ValueError: boom in .*broken\.py, line 7, in boom"),
        ({"methods": ["broken:boom2"]}, r"methods\[0\].*no function 'boom2' in .*broken\.py"),
        ({"data": {"reader": "broken:failing_reader"}}, r"data: ValueError: boom in .*broken\.py, line 7, in boom"),
        ({"data": {"reader": "broken:none"}}, r"data: a reader returned NoneType in .*broken\.py, line \d+, in none"),
        ({"data": {"reader": {"my_data:read": {"inwert": 1}}}}, r"data\.reader.*Did you mean 'invert'"),
        ({"data": {"files": "scans"}}, r"data\.files: no reader is given"),
        ({"data": {"augment": "broken:failing_augment"}}, r"data\.augment: ValueError: boom in .*broken\.py, line 7"),
        (
            {"data": {"augment": "broken:none"}},
            r"data\.augment: an augmentation returned NoneType .*broken\.py.*in none",
        ),
        ({"partition": {"scheme": "broken:failing_split"}}, r"partition: ValueError: boom in .*broken\.py, line 7"),
        (
            {"partition": {"scheme": "broken:none_split"}},
            r"partition: got NoneType for 20 clients.*broken\.py.*none_split",
        ),
        ({"partition": {"scheme": "broken:twice"}}, r"partition: position 0 goes to two clients.*broken\.py.*in twice"),
        ({"partition": {"scheme": "dirichlt"}}, r"partition\.scheme: must be .*dirichlet or .*got 'dirichlt'"),
        ({"evaluation": {"metrics": ["broken:absent"]}}, r"evaluation\.metrics\[0\]: .*no function 'absent'"),
    ],
)
def test_faults_of_own_code_are_found_before_the_run(here, root, settings, message):
    (here / "broken.py").write_text(BROKEN)
    (here / "wrong.py").write_text("\ndef f(:\n")
    (here / "needy.py").write_text("import nothing_like_it\n")
    settings = {**settings, "data": {"root": str(root), **settings.get("data", {})}}
    if "reader" in settings["data"]:
        settings["data"] |= {"name": "fresh", "root": str(here / "data"), "files": str(here / "scans")}
    with pytest.raises(ConfigError, match=message) as caught:
        raysim.run({"resources": {"backend": "serial"}, "name": "a", **settings}, quiet=True)
    assert len(str(caught.value).splitlines()) == 2
    assert not (here / "runs").exists()


HOOKS = ("loss", "forward", "grads", "report")
SERVER_HOOKS = ("broadcast", "weigh", "server_update", "evaluation_override")


@pytest.mark.parametrize("function", ["hook", "none_hook"])
@pytest.mark.parametrize("name", [*HOOKS, *SERVER_HOOKS, "none_gradient", "metric"])
def test_faults_of_hooks_and_metrics_name_file_and_function(here, root, name, function):
    (here / "broken.py").write_text(BROKEN)
    settings = {"methods": [{f"broken:{function}": {"name": name}}]}
    if name == "none_gradient":
        settings = {"methods": ["broken:none_gradient"]}
    if name == "metric":
        metric = "failing_metric" if function == "hook" else "none_metric"
        settings = {"evaluation": {"metrics": [f"broken:{metric}"]}}
    small = {
        "data": {"root": str(root)},
        "local": {"steps": 1},
        "partition": {"num_clients": 3},
        "model": {"name": "mlp"},
    }
    with pytest.raises(RaysimError, match=r"broken\.py, line \d+, in ") as caught:
        raysim.run({"resources": {"backend": "serial"}, "rounds": 1, "name": "a", **small, **settings}, quiet=True)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_faults_on_ray_are_the_same_messages(here, root):
    (here / "broken.py").write_text(BROKEN)
    small = {
        "data": {"root": str(root)},
        "local": {"steps": 1},
        "partition": {"num_clients": 3},
        "model": {"name": "mlp"},
    }
    settings = {"rounds": 1, **small, "methods": [{"broken:hook": {"name": "grads"}}]}
    with pytest.raises(RaysimError, match=r"ValueError: boom in .*broken\.py, line 7, in boom") as caught:
        raysim.run({"resources": {"trainers": 1}, "name": "a", **settings}, quiet=True)
    assert len(str(caught.value).splitlines()) == 1
    assert "Traceback" in (here / "runs" / "a" / "FAILED").read_text()
