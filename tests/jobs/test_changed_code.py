"""A job whose code is changed after it was submitted: what runs is what is on disk when it starts."""

from __future__ import annotations

from pathlib import Path

from gnnsys.jobs import JobState, Queue
from tests.jobs.queue_services import DEADLINE, kill, run_until, serve_nothing, service

TRAIN = """
from dataclasses import replace
import helper
from tests.jobs.queue_jobs import {function} as made

def job(**arguments):
    return replace(made(**arguments), evaluate=lambda model: {{"code": [{version}, helper.VERSION]}})
"""
LINEAR = "linear"


def write(folder: Path, version: int, function: str = LINEAR) -> None:
    """The code of a job, and of what it imports: of another length each time, which Python's own cache looks at."""
    (folder / "train.py").write_text(TRAIN.format(version=version, function=function) + version * "#")
    (folder / "helper.py").write_text(f"VERSION = {version}" + version * "#")


def submit(queue: Queue, folder: Path, **options: object) -> int:
    given = {"memory": "1M", **options}
    return queue.submit("train:job", folder=folder, **given)  # type: ignore[arg-type]


def test_what_runs_is_the_code_that_is_there_when_a_job_starts(queue: Queue, tmp_path: Path):
    write(tmp_path, 1)
    first = submit(queue, tmp_path)
    write(tmp_path, 2)
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
        worker = running.pool.everyone()[0].pid
        second = submit(queue, tmp_path)
        write(tmp_path, 3)
        running.run_until_empty(DEADLINE)
        assert [each.pid for each in running.pool.everyone()] == [worker], "which had the code of the first job"
    assert [queue.show(number).result["code"] for number in (first, second)] == [[2, 2], [3, 3]]


def test_what_is_estimated_is_the_code_that_is_there_when_a_job_is_submitted(
    queue: Queue, forked_workers: None, tmp_path: Path
):
    serve_nothing(queue)
    found = []
    for version, rows in ((1, 8), (2, 80_000)):  # one process estimates both
        write(tmp_path, version)
        with (tmp_path / "train.py").open("a") as file:
            file.write(f"\ndef sized():\n    return made(num_rows={rows}, batch_size={rows})\n")
        number = queue.submit("train:sized", arguments={}, folder=tmp_path, key=str(version))
        found.append(queue.show(number).estimated or 0)
    assert 0 < found[0] < found[1]


def test_code_that_takes_more_than_was_estimated_before_it_changed_runs_once_more_alone(
    queue: Queue, forked_workers: None, tmp_path: Path
):
    serve_nothing(queue)
    write(tmp_path, 1)
    train = tmp_path / "train.py"
    train.write_text(train.read_text() + "\ndef grows():\n    return made()\n")
    number = queue.submit("train:grows", folder=tmp_path)
    assert queue.show(number).estimate == "traced"
    write(tmp_path, 2, "takes")
    train.write_text(train.read_text() + f"\ndef grows():\n    return made({600 << 20})\n")
    with service(queue.folder.path, capacity="2G") as running:
        (ended,) = running.run_until_empty(DEADLINE)
    assert (ended.state, ended.attempts, ended.memory) == (JobState.DONE, 2, 2 << 30), ended.error


def test_a_function_that_is_gone_when_its_job_starts_is_named(queue: Queue, tmp_path: Path):
    write(tmp_path, 1)
    number = submit(queue, tmp_path)
    (tmp_path / "train.py").write_text("def jobs():\n    pass\n")
    with service(queue.folder.path) as running:
        running.run_until_empty(DEADLINE)
    assert "module 'train' has no function 'job'" in queue.show(number).error and queue.show(number).attempt == 1


def test_a_job_that_runs_again_runs_the_code_of_then(queue: Queue, tmp_path: Path):
    go = tmp_path / "go"
    write(tmp_path, 1, "waits")
    number = submit(queue, tmp_path, arguments={"at": str(go)})
    with service(queue.folder.path, workers=1) as running:
        run_until(running, (tmp_path / "go.begun").exists)
        write(tmp_path, 2, LINEAR)
        train = tmp_path / "train.py"
        train.write_text(train.read_text().replace("made(**arguments)", "made()"))
        process = queue.show(number).process
        assert process is not None
        kill(process.pid)
        running.run_until_empty(DEADLINE)
    assert queue.show(number).result["code"] == [2, 2] and queue.show(number).attempt == 2
