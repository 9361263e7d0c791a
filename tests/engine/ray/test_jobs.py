"""Jobs at a dashboard, by a client that is played; nothing here starts Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from raysim.engine.ray import jobs
from raysim.engine.ray.jobs import JobEnd, Jobs


class Client:
    """A dashboard with one job, of id "old", in some state."""

    def __init__(self, status: JobStatus):
        self.job = SimpleNamespace(submission_id="old", status=status, driver_exit_code=3, message="a word")
        self.done = []

    def list_jobs(self):
        return [self.job]

    def delete_job(self, job_id):
        self.done.append(("delete", job_id))

    def submit_job(self, **job):
        self.done.append(("submit", job))

    def get_job_info(self, job_id):
        return self.job

    async def tail_job_logs(self, job_id):
        for line in ("first", "last"):
            yield line


@pytest.fixture
def client(monkeypatch):
    """client(status) -> a Client that the next Jobs talks to."""

    def made(status=JobStatus.SUCCEEDED):
        played = Client(status)
        monkeypatch.setattr(jobs, "JobSubmissionClient", lambda address: played)
        return played

    return made


def test_a_job_takes_the_folder_without_what_its_rayignore_names(client, tmp_path):
    played = client()
    Jobs().submit("new", "raysim run a.yaml", tmp_path, {"A": "1"})
    (tmp_path / ".rayignore").write_text("*.npz\ndata/\n")
    Jobs().submit("new", "raysim run a.yaml", tmp_path, {})
    plain = {"working_dir": str(tmp_path), "env_vars": {"A": "1"}}
    ignoring = {"working_dir": str(tmp_path), "env_vars": {}, "excludes": ["*.npz", "data/"]}
    assert played.done == [
        ("submit", {"entrypoint": "raysim run a.yaml", "submission_id": "new", "runtime_env": environment})
        for environment in (plain, ignoring)
    ]


def test_an_ended_job_of_the_same_id_is_deleted_first(client, tmp_path):
    played = client()
    Jobs().submit("old", "raysim run a.yaml", tmp_path, {})
    assert [step[0] for step in played.done] == ["delete", "submit"]


@pytest.mark.parametrize("status", [JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED])
def test_a_job_is_followed_to_its_end(status, client):
    client(status)
    lines = []
    assert Jobs().follow("old", lines.append) == JobEnd(status.value, 3, "a word")
    assert lines == ["first", "last"]


def test_a_job_runs_until_it_has_ended(client):
    client(JobStatus.RUNNING)
    assert Jobs().is_running("old")
    assert not Jobs().is_running("other")
    client(JobStatus.STOPPED)
    assert not Jobs().is_running("old")
