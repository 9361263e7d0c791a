"""Storage that cannot be used is refused in one sentence, and no credential is printed or kept."""

from __future__ import annotations

import socket
import sys
import time

import pytest

import raysim
from raysim.base.errors import ConfigError, DataError, RaysimError
from raysim.base.uri import masked
from raysim.cli.main import main
from raysim.config import parse_config
from raysim.folders import filesystems
from raysim.running.runner import execute
from tests.support.federations import plan_of
from tests.support.s3 import KEYS


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("foo://bucket/runs", "unknown scheme 'foo'.*known: file, s3, gs, gcs, hdfs"),
        ("s3://", "names no bucket"),
        ("file://runs", "is not absolute; write file:///FOLDER"),
        ("s3://AKIA:ses/ame@bucket/runs", r"s3://\*\*\*@bucket/runs has credentials.*AWS_ACCESS_KEY_ID"),
        ("abfs://box@account/runs?client_secret=sesame", r"client_secret=\*\*\* has credentials"),
        ("s3://bucket/runs?endpoint_override=http%3A%2F%2Fme%3Asesame%40host", "has credentials"),
    ],
)
def test_odd_uris_are_refused_before_anything_is_asked(uri, text):
    for groups in ({"storage": uri}, {"data": {"root": uri}}):
        config, faults = parse_config(groups)
        assert config is None
        with pytest.raises(ConfigError, match=text) as caught:
            raise ConfigError(faults)
        assert "ame" not in str(caught.value).replace("name", "")
    with pytest.raises(DataError, match=text):
        raysim.load(uri)


def test_credentials_are_masked_wherever_they_stand():
    assert masked("a 's3://key:pass/word@b/c', hdfs://me@host/x") == "a 's3://***@b/c', hdfs://me@host/x"
    assert "sesame" not in str(RaysimError("no", "s3://key:sesame@bucket", "write ?sas_token=sesame&x=1"))


def test_credentials_on_the_command_line_are_neither_printed_nor_kept(root, tmp_path, capfd, monkeypatch):
    (tmp_path / "run.yaml").write_text("name: a\n")
    monkeypatch.chdir(tmp_path)
    run = ["raysim", "run", "run.yaml", "storage=s3://AKIA:sesame@bucket/runs", f"data.root={root}"]
    for words in (run, [*run, "--print-config"], ["raysim", "report", "s3://AKIA:sesame@bucket/runs"]):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = "".join(capfd.readouterr())
        assert "has credentials" in said
        assert "sesame" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.slow
def test_absent_server_is_one_sentence_within_seconds(root, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(filesystems, "ANSWER_S", 1.0)
    silent = socket.create_server(("127.0.0.1", 0))  # it takes connections and says nothing
    for name, value in {**KEYS, "RAYSIM_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        ports = [closed.getsockname()[1], silent.getsockname()[1]]
    for port in ports:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        filesystems._limited.cache_clear()
        began = time.monotonic()
        with pytest.raises(
            ConfigError, match=r"storage: s3://bucket/runs cannot be read \(.*AWS_ENDPOINT_URL\)"
        ) as caught:
            execute(plan_of(root, name="a", storage="s3://bucket/runs"))
        assert time.monotonic() - began < 20
        assert len(caught.value.faults) == 1
    silent.close()
    monkeypatch.setattr(
        sys, "argv", ["raysim", "run", "example:quickstart", "storage=s3://bucket/runs", f"data.root={root}"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.count("storage: s3://bucket/runs cannot be read") == 1
    assert "Traceback" not in said
