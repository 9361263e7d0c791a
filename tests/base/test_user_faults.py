"""Faults of the user's own code are found before the run, or name file and function."""

from __future__ import annotations

import pytest

import raysim
from raysim.base.errors import ConfigError, RaysimError
from tests.support.own_folder import command, write_files


@pytest.mark.slow
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
        f"UserCodeError: {tmp_path / name} stands in the way of raysim's own package {name!r}. Give it another name"
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
        ({"model": {"name": "broken:taken"}}, r"model\.name: option 'blocks' is a key of raysim's; rename the option"),
        ({"model": {"name": "my_net:net", "width": "wide"}}, r"model\.width: "),
        ({"model": {"name": "my_net:net", "widht": 3}}, r"model\.widht: unknown key\. Did you mean 'width'"),
        ({"model": {"name": "broken:nett"}}, r"model\.name: cannot import model .*no function 'nett' in .*broken\.py"),
        ({"model": {"name": "broken:number"}}, r"model\.name: .*must be a function, got int, in .*broken\.py"),
        ({"model": {"name": "absent:f"}}, r"model\.name: .*there is no module 'absent'"),
        ({"model": {"name": "wrong:f"}}, r"model\.name: .*SyntaxError.*wrong\.py, line 2"),
        ({"model": {"name": "needy:f"}}, r"model\.name: .*nothing_like_it.*needy\.py, line 1"),
        ({"methods": ["broken:failing_method"]}, r"methods\[0\].*ValueError: boom in .*broken\.py, line 7, in boom"),
        ({"methods": ["broken:boom2"]}, r"methods\[0\].*no function 'boom2' in .*broken\.py"),
        ({"data": {"reader": "broken:failing_reader"}}, r"data: ValueError: boom in .*broken\.py, line 7, in boom"),
        ({"data": {"reader": "broken:none"}}, r"data: a reader returned NoneType in .*broken\.py, line \d+, in none"),
        ({"data": {"reader": {"my_data:read": {"inwert": 1}}}}, r"data\.reader.*Did you mean 'invert'"),
        ({"data": {"files": "scans"}}, r"data\.files: has no effect with data\.reader null"),
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
        (
            {"partition": {"scheme": "dirichlt"}},
            r"partition\.scheme: must be .*dirichlet.* or module:function .*got 'dirichlt'",
        ),
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
