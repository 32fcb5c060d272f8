"""What happens to a job in a worker that others have used, and to one that leaves its worker unusable or stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnsys.jobs import JobState, Queue
from gnnsys.jobs.job_record import JobTimes
from tests.jobs.queue_jobs import FOLDER
from tests.jobs.queue_services import DEADLINE, service

OWN = """
import json, os, resource, signal, torch
from dataclasses import replace
from pathlib import Path
from tests.jobs.queue_jobs import linear

def needs_fresh():
    if hasattr(json, "OF_A_JOB"):  # what no fingerprint has
        raise RuntimeError("this process was used")
    json.OF_A_JOB = 1
    return linear()

def always_fails():
    raise RuntimeError("as ever")

def defines():
    torch.library.define("of_a_job::op", "(Tensor x) -> Tensor")
    return linear()

def lowers(limit, is_nobody):
    def evaluate(model):
        number = getattr(resource, limit)
        least = 8 if limit == "RLIMIT_NOFILE" else resource.getrlimit(number)[0]
        resource.setrlimit(number, (least, least))
        if is_nobody and os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        return {}
    return replace(linear(), evaluate=evaluate)

def stops(at, most):
    def after(step):
        file = Path(at)
        times = len(file.read_text()) if file.exists() else 0
        if times < most:
            file.write_text("x" * (times + 1))
            os.kill(os.getpid(), signal.SIGSTOP)
    return linear(epochs=6, after=after)
"""


def run(queue: Queue, folder: Path, *calls: tuple[str, dict[str, object]]) -> tuple[list[int], dict[int, JobTimes]]:
    (folder / "own.py").write_text(OWN)
    environment = {"PYTHONPATH": str(FOLDER)}
    numbers = [
        queue.submit(f"own:{name}", arguments, folder=folder, environment=environment, memory="1M")
        for name, arguments in calls
    ]
    with service(queue.folder.path, workers=1) as running:
        return numbers, {job.number: job for job in running.run_until_empty(DEADLINE)}


def test_a_job_that_fails_in_a_used_worker_runs_once_more_in_a_fresh_one(queue: Queue, tmp_path: Path) -> None:
    calls = ("needs_fresh", "needs_fresh", "always_fails", "defines", "defines")
    numbers, ended = run(queue, tmp_path, *((name, {}) for name in calls))
    found = [(ended[number].state.value, ended[number].attempts) for number in numbers]
    assert found == [("done", 1), ("done", 2), ("failed", 2), ("done", 1), ("done", 1)]
    said = "It runs once more in a fresh one."
    assert [queue.logs(number).count(said) for number in numbers] == [0, 1, 1, 0, 0]
    assert queue.logs(numbers[2]).count("RuntimeError: as ever") == 2
    assert "RuntimeError: as ever" in ended[numbers[2]].error


def test_a_job_that_is_trained_is_done_though_it_lowers_its_own_limits(queue: Queue, tmp_path: Path) -> None:
    cases = [("RLIMIT_NOFILE", False), ("RLIMIT_DATA", False), ("RLIMIT_DATA", True)]
    numbers, ended = run(queue, tmp_path, *(("lowers", {"limit": each, "is_nobody": nobody}) for each, nobody in cases))
    assert [(ended[number].state, ended[number].attempts) for number in numbers] == [(JobState.DONE, 1)] * 3


def test_a_job_that_is_stopped_goes_on_and_ends_if_that_repeats(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr("gnnsys.jobs.job_ender._STOPPED_SECONDS", 0.0)
    monkeypatch.setattr("gnnsys.jobs.service._LOOK_SECONDS", 0.0)
    (tmp_path / "stop.sh").write_text("#!/bin/sh\nkill -STOP $$\nsh -c 'kill -STOP $$; echo child'\necho went on\n")
    (tmp_path / "stop.sh").chmod(0o700)
    script = queue.submit("stop.sh", folder=tmp_path, memory="1M")
    calls = [("stops", {"at": str(tmp_path / f"{most}"), "most": most}) for most in (1, 6)]
    (once, often), ended = run(queue, tmp_path, *calls)
    assert (ended[once].state, ended[once].attempts) == (JobState.DONE, 1)
    assert (ended[script].state, queue.logs(script)) == (JobState.DONE, "child\nwent on\n")
    assert (ended[often].state, ended[often].attempts) == (JobState.FAILED, 1)
    assert "its process was stopped (SIGSTOP) 4 times and continued 3 times" in ended[often].error
    assert any("was stopped (SIGSTOP) for 0 s, and goes on" in line for line in logged)
