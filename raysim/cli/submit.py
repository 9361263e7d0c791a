"""`raysim submit`: a verb as a job of a running cluster; submit the file again to resume."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raysim.base.errors import ConfigError, Fault, RaysimError, explained, refuse
from raysim.cli.terminal import LiveLine, err, say
from raysim.config import is_recipe_name, parse_overrides, read_config, sound_config, sweep
from raysim.config.overlays import layered
from raysim.tuning.plan import read_sweep

#: Exit status of what SIGTERM ended, which is how Ray stops a job.
STOPPED = 143


class Job(NamedTuple):
    """Parts of a job besides the file and the overrides.

    Attributes:
      verb: by default tune for a file with axes, calibrate for one with a `calibrate` group, else run.
      job_id: by default the name of the run or sweep. working_dir: what is uploaded; the file lies below it.
      variables: NAME=VALUE of the job's environment.
    """

    verb: str | None
    job_id: str | None
    working_dir: Path
    variables: Sequence[str]
    is_scaled: bool


def submit_and_follow(config: str, overrides: Sequence[str], job: Job, *, waits: bool) -> int:
    """Submit `raysim VERB CONFIG`, follow the log, and return the exit status. A running job of the same id is
    followed.

    Args:
      waits: False returns once the job is submitted.
    Raises:
      ConfigError: a fault that shows without the cluster's data. RaysimError: no cluster answers.
    """
    raw = read_sweep(Path(config), overrides, is_scaled=job.is_scaled)
    verb = job.verb or ("tune" if sweep.axes_as_written(raw) else "calibrate" if raw.get("calibrate") else "run")
    if verb == "run":
        raw = layered(read_config(Path(config)), parse_overrides(overrides), config, is_scaled=job.is_scaled)
        sound_config(raw, config)
    is_named = bool(raw.get("name"))
    name = str(raw["name"]) if is_named else Path(config).stem + (sweep.SCALED if job.is_scaled else "")
    # Without a name a run gets a new directory each time, and would not resume.
    words = ["python", "-m", "raysim", verb, _below(config, job.working_dir), *overrides]
    words += [] if is_named or verb != "run" else [f"name={name}"]
    words += ["--scaled"] if job.is_scaled else []
    environment = _environment(job.variables)
    job_id = re.sub(r"[^\w.-]+", "-", job.job_id or name)
    return _run_job(job_id, shlex.join(words), job.working_dir, environment, waits=waits)


def _below(config: str, working_dir: Path) -> str:
    """The file as the job sees it."""
    if is_recipe_name(config):
        return config
    path, folder = Path(config).resolve(), working_dir.resolve()
    if not path.is_relative_to(folder):
        text = f"{config} is not below {folder}, the folder that the job uploads; give --working-dir, or move the file"
        raise ConfigError([Fault("file", text)], "the job")
    return path.relative_to(folder).as_posix()


def _environment(variables: Sequence[str]) -> dict[str, str]:
    pairs = [variable.partition("=") for variable in variables]
    faults = [Fault("--env", f"must be NAME=VALUE, got {name!r}") for name, equals, _ in pairs if not (name and equals)]
    refuse(faults, "the job")
    return {name: value for name, _, value in pairs}


def _run_job(job_id: str, command: str, working_dir: Path, environment: dict[str, str], *, waits: bool) -> int:
    from raysim.engine.ray.jobs import Jobs

    mend = "set RAY_API_SERVER_ADDRESS to the dashboard, as http://HOST:8265, and RAY_AUTH_MODE=token for a cluster with a token"
    line = LiveLine()
    kinds = (OSError, RuntimeError)  # a dashboard that refuses a large upload closes the connection, too
    with explained("the job could not be submitted", "the Ray cluster", mend, *kinds, to=RaysimError):
        with line:
            line.step("connecting to the Ray cluster")
            jobs = Jobs()
        if jobs.is_running(job_id):
            say(f"job {job_id} is running; log follows (`ray job stop {job_id}` ends it)")
        else:
            with line:
                line.step(f"sending {working_dir.resolve()} to the cluster")
                jobs.submit(job_id, command, working_dir, environment)
            say(f"submitted job {job_id}: {command}")
    if not waits:
        say(f"`ray job logs --follow {job_id}` shows the log, `ray job stop {job_id}` ends the job")
        return 0
    goes_on = f"job {job_id} keeps running; the same command follows the job, and `ray job stop {job_id}` ends the job"
    try:
        end = jobs.follow(job_id, _write)
    except KeyboardInterrupt:
        err.print(goes_on, markup=False)
        return 130
    except ConnectionError as error:
        raise RaysimError(f"the connection to the cluster was lost ({error})", mend=goes_on) from error
    if end.status == "SUCCEEDED":
        say(f"job {job_id} succeeded")
        return 0
    err.print(f"job {job_id} {end.status.lower()}: {end.message}; submit the file again to resume", markup=False)
    return STOPPED if end.status == "STOPPED" else end.exit_code or 1


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
