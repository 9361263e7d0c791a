"""Where relative paths begin: on this machine, with RAYSIM_HOME, and in a Ray job."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysim.base.errors import ConfigError
from raysim.config import JOB_VARIABLE, Config, home_folder, located
from raysim.plan.check import check
from tests.support.federations import raw_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory of its own, and no trace of a job."""
    for name in (JOB_VARIABLE, "RAYSIM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def places(**groups):
    config = located(Config.model_validate(groups))
    return config.storage, config.data.root


def test_relative_paths_begin_at_the_working_directory_once_and_for_all(here, monkeypatch):
    config = located(Config())
    assert (config.storage, config.data.root) == (f"{here}/runs", f"{here}/data")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert located(config) == config
    assert places() == (f"{here}/elsewhere/runs", f"{here}/elsewhere/data")


def test_raysim_home_is_where_they_begin_instead(here, monkeypatch):
    monkeypatch.setenv("RAYSIM_HOME", "/shared/raysim")
    assert places() == ("/shared/raysim/runs", "/shared/raysim/data")
    assert places(storage="/mine", data={"root": "/sets"}) == ("/mine", "/sets")
    assert places(data={"root": "s3://bucket/data"})[1] == "s3://bucket/data"
    assert places(storage="~/runs")[0] == f"{Path.home()}/runs"


def test_a_job_never_writes_to_its_temporary_working_directory(here, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    assert home_folder() == Path("/home/someone/raysim-home")
    assert places() == ("/home/someone/raysim-home/runs", "/home/someone/raysim-home/data")
    monkeypatch.setenv("RAYSIM_HOME", "/shared")
    assert places() == ("/shared/runs", "/shared/data")


def test_a_set_that_was_uploaded_with_a_job_is_used(here, monkeypatch):
    monkeypatch.setenv("RAYSIM_HOME", "/shared")
    (here / "sets" / "mine").mkdir(parents=True)
    assert places(data={"root": "sets", "name": "mine"})[1] == f"{here}/sets"
    assert places(data={"root": "sets", "name": "other"})[1] == "/shared/sets"


def test_data_that_a_job_cannot_see_is_a_fault_with_the_remedy(here, monkeypatch):
    raw = raw_config(here, data={"root": "data", "name": "cifar10"})
    with pytest.raises(
        ConfigError, match=r"Run `.*raysim prepare cifar10 --root FILES --download --out data`.*correct data"
    ):
        check(raw, "a test")
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    monkeypatch.setenv("RAYSIM_HOME", str(here / "shared"))
    with pytest.raises(ConfigError, match=r"a folder there, or to a URI such as s3://bucket/data") as caught:
        check(raw, "a test")
    assert f"no prepared set 'cifar10' in {here}/shared/data/cifar10/cifar10.arrow" in str(caught.value)
