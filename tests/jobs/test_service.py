"""A service runs what was submitted: results are those of each job alone, and one that goes wrong harms no other."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

from gnnsys.jobs import ContinuousPolicy, JobService, JobState, Queue, find_policy
from gnnsys.jobs.process_identity import ProcessIdentity
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.jobs.queue_services import DEADLINE, expected, kill, left_in, run_until, service, submit
from tests.support.processes import alive, await_shared_memory_freed, await_true, run_code, shared_memory

KINDS = ({"kind": "whole", "hidden": 4}, {"kind": "loader", "epochs": 2}, {"kind": "torch"})


def test_results_are_those_of_each_job_alone_and_what_goes_wrong_harms_no_other(queue: Queue, tmp_path: Path):
    before = shared_memory()
    good = [
        submit(queue, "job", arguments, seed=seed, memory=None if seed else "1M")
        for seed in (0, 1)
        for arguments in KINDS
    ]
    bad = {
        submit(queue, "raises"): "RuntimeError: as it was asked to",
        submit(queue, "spoils", memory="1M"): "SystemExit: 3",
        submit(queue, "returns_nonsense", memory="1M"): "returned a dict with ['model']; a job returns TrainingJob(",
        submit(queue, "job", {"nothing": 1}, memory="1M"): "job cannot be called with",
        queue.submit(f"{NAME}:nobody", folder=FOLDER, memory="1M"): "has no function 'nobody'",
        submit(queue, "crashes", memory="1M"): "its process died 3 times, the last time by signal 11",
    }
    died = submit(queue, "dies", {"at": str(tmp_path / "died")}, memory="1M")
    left = submit(queue, "leaves_thread", memory="1M")
    again = [submit(queue, "job", arguments, seed=seed, memory="1M") for seed in (0, 1) for arguments in KINDS]
    with service(queue.folder.path, workers=2) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
        workers = [worker.pid for worker in running.pool.everyone()]
    assert list(ended) == list(range(1, again[-1] + 1))
    wanted = [expected(arguments, seed) for seed in (0, 1) for arguments in KINDS]
    assert [ended[number].result for number in good] == wanted == [ended[number].result for number in again]
    for number, said in bad.items():
        assert ended[number].state is JobState.FAILED and said in ended[number].error
    assert "RuntimeError: as it was asked to" in queue.logs(min(bad))
    assert queue.logs(good[0]) == "hidden 4, seed 0\n"
    assert queue.logs(max(bad)) == 3 * "about to crash\n"
    assert ended[died].state is JobState.DONE and ended[died].attempts == 2
    assert ended[left].state is JobState.DONE
    for job in (ended[number] for number in good):
        assert job.first_step is not None and job.started is not None and job.ended is not None
        assert job.submitted <= job.started <= job.first_step <= job.ended and job.memory
    assert left_in(queue.folder.path) == []
    await_true(lambda: not any(map(alive, workers)), "the end of the workers")
    await_shared_memory_freed(before)


def test_a_job_that_runs_is_cancelled_between_two_steps(queue: Queue, tmp_path: Path):
    numbers = [submit(queue, "waits", {"at": str(tmp_path / name)}, memory="1M") for name in ("a", "b")]
    with service(queue.folder.path) as running:
        run_until(running, lambda: all((tmp_path / f"{name}.begun").exists() for name in ("a", "b")))
        assert queue.cancel(numbers[0]) == [JobState.RUNNING]
        run_until(running, lambda: queue.show(numbers[0]).state.is_over)
        assert queue.show(numbers[1]).state is JobState.RUNNING
        (tmp_path / "b").touch()
        queue.cancel(numbers[1])
        running.run_until_empty(DEADLINE)
    assert [job.state for job in queue.list()] == [JobState.CANCELLED] * 2
    assert [job.attempt for job in queue.list()] == [1, 1]


def test_a_worker_that_is_killed_and_a_service_that_is_closed_lose_nothing(queue: Queue, tmp_path: Path):
    arguments = {"kind": "whole", "epochs": 120}
    number = submit(queue, "job", arguments, memory="1M", checkpoint_steps=10)
    with service(queue.folder.path, workers=1) as running:
        run_until(running, lambda: any(queue.folder.checkpoints(number).glob("step-*")))
        process = queue.show(number).process
        assert process is not None
        kill(process.pid)
        run_until(running, lambda: queue.show(number).attempt == 2)
    assert queue.show(number).state is JobState.QUEUED, "it waits for the next service"
    with service(queue.folder.path, workers=1) as running:
        (ended,) = running.run_until_empty(DEADLINE)
    assert ended.result == expected(arguments) and ended.attempts == 3
    assert "resumed" not in ended.result and left_in(queue.folder.path) == []


def test_a_job_past_its_cap_runs_once_more_alone_with_what_was_measured(queue: Queue):
    stated = submit(queue, "takes", {"num_bytes": 600 << 20}, memory="1M")
    too_much = submit(queue, "takes", {"num_bytes": 600 << 20, "more": 3 << 30}, memory="1M")
    with service(queue.folder.path, workers=2, capacity="1G") as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert ended[stated].state is JobState.DONE and ended[stated].attempts == 2
    assert ended[stated].memory == 1 << 30 and (ended[stated].measured or 0) >= 600 << 20
    assert ended[too_much].state is JobState.FAILED and ended[too_much].attempts == 2
    assert ended[too_much].error.startswith("out of memory alone, with all of 1.0 GiB")


def test_jobs_never_take_more_together_than_the_capacity(queue: Queue):
    for _ in range(6):
        submit(queue, "linear", {}, memory="400M")
    most, seen = 0, []
    continuous = find_policy("continuous")

    def watched(waiting, running, room, now):
        nonlocal most
        chosen = continuous(waiting, running, room, now)
        most = max(most, len(running) + len(chosen))
        seen.append([*(job.memory for job in running)])
        return chosen

    with service(queue.folder.path, workers=4, capacity="1G", policy=watched) as running:
        ended = running.run_until_empty(DEADLINE)
    assert most == 2 and all(sum(each) <= 1 << 30 for each in seen)
    assert all(job.state is JobState.DONE for job in ended)


SCRIPT = """
import json, os, pathlib, sys, time
print("words", *sys.argv[1:])
held = bytearray(50 << 20)
for at in range(0, len(held), 4096):
    held[at] = 1
at = pathlib.Path(sys.argv[2])
at.with_suffix(".begun").write_text(str(os.getpid()))
while not at.exists():
    time.sleep(0.01)
json.dump({"seed": int(os.environ["GNNSYS_JOB_SEED"]), "here": os.getcwd()}, open(os.environ["GNNSYS_JOB_RESULT"], "w"))
sys.exit(int(sys.argv[1]))
"""


def test_a_script_outlives_its_service_and_is_found_again(queue: Queue, tmp_path: Path):
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    good = queue.submit("train.py", words=["0", str(go)], folder=tmp_path, seed=5, memory="60M")
    bad = queue.submit("train.py", words=["3", str(go)], folder=tmp_path, memory="60M")
    with service(queue.folder.path) as running:
        run_until(running, lambda: queue.show(bad).state is JobState.RUNNING and (tmp_path / "go.begun").exists())
    processes = [queue.show(number).process for number in (good, bad)]
    assert all(process is not None and process.is_running() for process in processes), "they go on"
    with service(queue.folder.path) as running:
        go.touch()
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert ended[good].result == {"seed": 5, "here": str(tmp_path)} and ended[good].attempts == 1
    assert (ended[good].measured or 0) > 50 << 20
    assert ended[bad].state is JobState.FAILED and ended[bad].error == "the script ended with exit code 3"
    assert queue.logs(good).startswith("words 0 ") and left_in(queue.folder.path) == []


def test_a_script_that_is_found_again_holds_up_nobody_whom_it_did_not_hold_up_before(queue: Queue, tmp_path: Path):
    """Room is kept for a large job that is due; a small one fits beside it."""
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    options = {"capacity": "1G", "workers": 3, "policy": ContinuousPolicy(patience=0.0)}
    long = queue.submit("train.py", words=["0", str(go)], folder=tmp_path, memory="400M")
    with service(queue.folder.path, **options) as running:
        run_until(running, lambda: queue.show(long).state is JobState.RUNNING)
        large = submit(queue, "linear", memory="800M")
        run_until(running, lambda: queue.show(large).arrived is not None)
    small = submit(queue, "linear", memory="100M")
    with service(queue.folder.path, **options) as running:
        run_until(running, lambda: queue.show(small).state is JobState.DONE)
        assert (queue.show(long).state, queue.show(large).state) == (JobState.RUNNING, JobState.QUEUED)
        go.touch()
        ended = running.run_until_empty(DEADLINE)
    assert {job.number for job in ended if job.state is JobState.DONE} >= {long, large}


def test_a_script_whose_memory_nobody_knows_runs_alone_and_the_next_one_like_it_does_not(queue: Queue, tmp_path: Path):
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    go.touch()
    first, second = (queue.submit("train.py", words=["0", str(go)], folder=tmp_path, seed=seed) for seed in (0, 1))
    with service(queue.folder.path, capacity="1G") as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert ended[first].memory == 1 << 30 and 50 << 20 < (ended[second].memory or 0) < 1 << 29


def test_a_script_is_cancelled_with_all_that_it_started(queue: Queue, tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o700)
    number = queue.submit("train.sh", folder=tmp_path, memory="1M")
    with service(queue.folder.path) as running:
        run_until(running, lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        queue.cancel(number)
        running.run_until_empty(DEADLINE)
    assert queue.show(number).state is JobState.CANCELLED
    child = int((tmp_path / "pid").read_text())
    await_true(lambda: not alive(child), "the end of what the script has started")


def test_a_disk_that_fills_up_under_a_service_holds_it_up_and_no_more(queue: Queue, monkeypatch):
    number = submit(queue, "linear", memory="1M")
    failures = 3
    with service(queue.folder.path) as running:
        from gnnsys.jobs.queue_database import QueueDatabase, QueueDiskFull

        finish = QueueDatabase.finish

        def full(self: QueueDatabase, *arguments: object, **options: object) -> bool:
            nonlocal failures
            if failures:
                failures -= 1
                raise QueueDiskFull("no room")
            return finish(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(QueueDatabase, "finish", full)
        monkeypatch.setattr("gnnsys.jobs.service._DISK_SECONDS", 0.01)
        running.run_until_empty(DEADLINE)
    assert failures == 0 and queue.show(number).state is JobState.DONE and queue.show(number).attempt == 1


def test_what_was_trained_is_kept_whatever_evaluate_does(queue: Queue):
    fails, told = (submit(queue, "evaluates", {"kind": kind}, memory="1M") for kind in ("raises", "numpy"))
    with service(queue.folder.path) as running:
        running.run_until_empty(DEADLINE)
    assert "evaluate was asked to" in queue.show(fails).error
    assert (queue.folder.results(fails) / "losses.json").exists()
    result = queue.show(told).result
    assert (result["score"], result["count"], result["array"]) == (0.5, 3, 2.0)


def test_a_process_is_told_from_a_later_one_with_its_number():
    this = ProcessIdentity.of(os.getpid())
    assert this is not None and this.is_running() and ProcessIdentity.from_json(this.to_json()) == this
    later = ProcessIdentity(this.pid, this.start + 1, this.boot)
    assert not later.is_running() and later.end(1.0), "who has the number now is left alone"
    assert later.is_another() and ProcessIdentity(this.pid, this.start, "before").is_another()
    assert not this.is_another()
    assert signal.getsignal(signal.SIGTERM) is not None


GONE = """
import os
from gnnsys.jobs.work import JobWorker
reading, writing = os.pipe()
os.close(reading)
JobWorker(writing, "cpu", 1).tell({"did": "step"})
"""


def test_a_worker_whose_service_was_killed_ends_without_a_word():
    ended = run_code(GONE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_cold_service_gives_the_same_results(queue: Queue):
    number = submit(queue, "job", dict(KINDS[0]), memory="1M")
    with service(queue.folder.path, is_warm=False) as running:
        (ended,) = running.run_until_empty(DEADLINE)
        assert isinstance(running, JobService) and running.pool.everyone() == []
    assert ended.number == number and ended.result == expected(dict(KINDS[0]))


def test_thousands_of_jobs_are_read_once_and_not_in_every_round(queue: Queue, monkeypatch):
    from gnnsys.jobs.queue_database import QueueDatabase

    queue.sweep(f"{NAME}:linear", {"num_rows": list(range(1, 1001))}, folder=FOLDER, memory="1M")
    read = 0
    select = QueueDatabase.select

    def counted(self: QueueDatabase, *arguments: object) -> object:
        nonlocal read
        found = select(self, *arguments)  # type: ignore[arg-type]
        read += len(found)
        return found

    monkeypatch.setattr(QueueDatabase, "select", counted)
    with service(queue.folder.path, workers=1) as running:
        run_until(running, lambda: len(running._queue.database.endings()) >= 5)
    assert read < 1100, "those that were waiting once, and a few for each that has ended"


def test_a_script_that_cannot_be_started_fails_once_and_says_why(queue: Queue, tmp_path: Path):
    (tmp_path / "train.py").touch()
    words = [queue.submit("train.py", words=[word], folder=tmp_path, memory="1M") for word in ("\ud800", "a\0b")]
    with service(queue.folder.path) as running:
        ended = running.run_until_empty(DEADLINE)
    assert [job.number for job in ended] == words and all(job.attempts == 1 for job in ended)
    assert all("cannot be started" in job.error for job in ended)


def test_a_clock_that_is_set_makes_no_job_look_slow(queue: Queue, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("gnnsys.jobs.running_job._WINDOW_SECONDS", 0.0)
    number = submit(queue, "sets_clock", {"at": str(tmp_path / "at")}, memory="1M")

    def rate() -> float | None:
        job = running._queue.running.get(number)
        return None if job is None else job.pace.rate

    with service(queue.folder.path, workers=1, is_warm=False) as running:
        run_until(running, lambda: rate() is not None)
        assert (rate() or 0.0) > 1.0, "steps per second"
        queue.cancel(number)
        running.run_until_empty(DEADLINE)


def test_a_process_that_holds_the_database_holds_up_a_service_and_no_more(queue: Queue, monkeypatch):
    number = submit(queue, "linear", memory="1M")
    monkeypatch.setattr("gnnsys.jobs.queue_database._BUSY_SECONDS", 0.01)
    monkeypatch.setattr("gnnsys.jobs.service._DISK_SECONDS", 0.01)
    with service(queue.folder.path) as running:
        other = sqlite3.connect(queue.folder.database, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        run_until(running, lambda: running._is_full)
        other.execute("ROLLBACK")
        other.close()
        running.run_until_empty(DEADLINE)
    assert (queue.show(number).state, queue.show(number).attempt) == (JobState.DONE, 1)
