"""Jobs of a Ray cluster, through its dashboard; nothing here runs a federation."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from ray.job_submission import JobDetails, JobSubmissionClient


@dataclass(frozen=True)
class JobEnd:
    """End of a job. status: SUCCEEDED, FAILED or STOPPED; exit_code: of the command, None if unknown; message: Ray's text."""

    status: str
    exit_code: int | None
    message: str


class Jobs:
    """The jobs of the cluster at RAY_API_SERVER_ADDRESS or RAY_ADDRESS, or of the Ray on this machine.

    Raises:
      ConnectionError: nobody answers there, or the token is not that of the cluster.
    """

    def __init__(self) -> None:
        try:
            # Given, since older Rays read RAY_ADDRESS alone.
            self._client = JobSubmissionClient(os.environ.get("RAY_API_SERVER_ADDRESS") or None)
        except (ConnectionError, RuntimeError, ValueError) as error:  # as Ray's versions tell it
            raise ConnectionError(str(error).strip().splitlines()[0]) from error

    def is_running(self, job_id: str) -> bool:
        """Whether a job of the id is pending or running."""
        found = self._find(job_id)
        return found is not None and not found.status.is_terminal()

    def submit(self, job_id: str, command: str, working_dir: Path, variables: Mapping[str, str]) -> None:
        """Start a job; a finished job of the same id is deleted first, since Ray assigns an id once."""
        if self._find(job_id) is not None:
            self._client.delete_job(job_id)
        environment: dict[str, object] = {"working_dir": str(working_dir), "env_vars": dict(variables)}
        if (ignored := working_dir / ".rayignore").is_file():  # which older Rays do not read by themselves
            environment["excludes"] = ignored.read_text().splitlines()
        self._client.submit_job(entrypoint=command, submission_id=job_id, runtime_env=environment)

    def follow(self, job_id: str, write: Callable[[str], None]) -> JobEnd:
        """Stream a job's log from the start until the job ends.

        Raises:
          ConnectionError: the connection was lost; the job keeps running.
        """

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job_id):
                write(text)

        try:
            asyncio.run(tail())
            while not (details := self._client.get_job_info(job_id)).status.is_terminal():
                time.sleep(0.5)
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            raise ConnectionError(str(error)) from error
        return JobEnd(details.status.value, details.driver_exit_code, details.message or "")

    def _find(self, job_id: str) -> JobDetails | None:
        return next((job for job in self._client.list_jobs() if job.submission_id == job_id), None)
