"""`ray up` and `ray submit` with cluster/local.yaml against this machine, in namespaces of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import BIN, HAS_TOKENS, PROJECT

SSHD = Path("/usr/sbin/sshd")


def lacking():
    """What this machine lacks for the test, "" if nothing."""
    if not HAS_TOKENS:
        return "this Ray knows no tokens, and the launcher's file copies one"
    for tool in ("ssh", "ssh-keygen", "rsync", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not SSHD.is_file():
        return "sshd is not installed (openssh-server)"
    if os.getuid() != 0:
        return "only root may make network and process namespaces"
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "true"]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return "namespaces cannot be made here"
    return ""


def write_files(folder: Path) -> None:
    """Keys, an account, an ssh server and a cluster of this machine alone."""
    for name in ("home/.ssh", "ray", "shared"):
        (folder / name).mkdir(parents=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    accounts = Path("/etc/passwd").read_text().splitlines()
    changed = [re.sub(r"^(root:.*:)[^:]*(:[^:]*)$", rf"\g<1>{folder}/home:/bin/bash", line) for line in accounts]
    (folder / "passwd").write_text("\n".join(changed) + "\n")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
        "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    config = yaml.safe_load((PROJECT / "cluster" / "local.yaml").read_text())
    config["cluster_name"] = folder.name
    config["provider"] |= {"head_ip": "127.0.0.1", "worker_ips": []}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "user_key")}
    # No network here: the packages are those of this environment, the sources those that the launcher copied.
    installed = [
        f"ln -sfn {sys.prefix} ~/raysim-venv",
        f"printf 'export RAYSIM_HOME=%s PYTHONPATH=%s\\n' {folder}/shared ~/raysim-code > ~/.bashrc",
    ]
    config["setup_commands"] = installed + config["setup_commands"][2:]
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.cluster
def test_ray_submit_runs_sweeps_and_reports_on_a_cluster_of_the_launcher(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("up")
    write_files(folder)
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RAYSIM_"))}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        [*command, "bash", str(PROJECT / "tests" / "cluster" / "launch.sh"), str(folder), str(clone)],
        env={**environment, "PATH": f"{BIN}:{environment['PATH']}", "RAY_AUTH_MODE": "token"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    text = result.stdout
    assert result.returncode == 0, text
    parts = re.findall(r"^\+ ray (\w+)[^\n]*\n(.*?)^= (\d+)$", text, flags=re.MULTILINE | re.DOTALL)
    parts = [part for part in parts if part[0] != "up" or part[2] == "0"]
    statuses = [(verb, int(status)) for verb, _, status in parts]
    assert statuses == [("up", 0), *[("submit", status) for status in (0, 0, 0, 0)], ("exec", 0), ("down", 0)], text
    assert f"run directory: {folder}/shared/runs/submitted" in parts[1][1]
    assert "all 3 rounds are in" in parts[2][1]  # submitted again: it shows what it found
    assert json.loads((folder / "shared" / "runs" / "submitted" / "summary.json").read_text())["rounds"] == 3
    assert "2 trials" in parts[3][1]
    swept = folder / "shared" / "runs" / "swept"
    assert len(list(swept.glob("*/COMPLETED"))) == 2
    assert (swept / "report" / "report.md").is_file()
    environment = json.loads((folder / "shared" / "runs" / "submitted" / "env.json").read_text())
    assert environment["resources"]["backend"] == "ray"
    assert len(list((folder / "ray").glob("session_2*"))) == 1  # no second Ray beside the launcher's
    sources = folder / "home" / "raysim-code"
    assert (sources / "raysim" / "data" / "sources.py").is_file()
    assert not [name for name in (".git", ".venv", "data", "runs/old", "mine/large.npz") if (sources / name).exists()]
