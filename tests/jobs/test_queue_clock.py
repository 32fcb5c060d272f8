"""How long a job has waited: whatever the wall clock says, and however many services it has waited for."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence

import pytest

from gnnsys.jobs import JobService, Queue, Room, WaitingJob
from gnnsys.jobs.process_identity import ProcessIdentity
from gnnsys.jobs.served_queue import ServedQueue
from tests.jobs.queue_services import submit


class Seconds:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    made = Seconds()
    monkeypatch.setattr("gnnsys.jobs.queue_clock.monotonic", made)
    return made


def served(queue: Queue) -> ServedQueue:
    """As a service has it that has just begun."""
    made = ServedQueue(queue.folder, "cpu", "cpu", "cpu", Room(capacity=1 << 30, workers=1), True, lambda stage: None)
    made.open()
    made.read_changes()
    return made


def age(here: ServedQueue, number: int) -> float:
    arrived = here.queued[number].arrived
    assert arrived is not None
    return here.clock.now() - arrived


def test_a_wall_clock_that_is_set_makes_no_job_older_or_younger(queue: Queue, monkeypatch):
    real, ahead, ages = time.time, [0.0], list[float]()
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    submit(queue, "linear", memory="1M")

    def watched(waiting: Sequence[WaitingJob], running: Sequence[WaitingJob], room: Room, now: float) -> list[int]:
        ages.extend(now - job.submitted for job in waiting)
        return []

    with JobService(queue.folder.path, shares_graphs=False, is_warm=False, policy=watched) as running:
        for ahead[0] in (0.0, 1e6, -1e6):  # as if somebody had set it in between
            running.turn(0.0)
    assert len(ages) == 3 and 0.0 <= ages[0] < ages[1] < ages[2] < 1e5


def test_jobs_are_in_the_order_they_came_though_the_clock_was_set_back(queue: Queue, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    first = submit(queue, "linear", memory="1M")
    monkeypatch.undo()
    second, chosen = submit(queue, "linear", memory="1M"), list[int]()

    def watched(waiting: Sequence[WaitingJob], running: Sequence[WaitingJob], room: Room, now: float) -> list[int]:
        chosen.extend(job.number for job in sorted(waiting, key=lambda job: (job.submitted, job.number)))
        return []

    with JobService(queue.folder.path, shares_graphs=False, is_warm=False, policy=watched) as running:
        running.turn(0.0)
    assert chosen == [first, second]


def test_a_job_has_waited_for_all_services_together_and_not_while_there_was_none(queue: Queue, seconds: Seconds):
    first = submit(queue, "linear", memory="1M")
    here = served(queue)
    assert age(here, first) == 0.0
    seconds.at += 400.0
    here.close()
    second = submit(queue, "linear", memory="1M")
    seconds.at = 7.0  # of another boot, a week later
    here = served(queue)
    assert (age(here, first), age(here, second)) == (400.0, 0.0)
    seconds.at += 300.0
    assert (age(here, first), age(here, second)) == (700.0, 300.0)
    here.close()


def test_a_service_that_is_killed_takes_the_last_seconds_of_waiting_along_and_no_more(queue: Queue, seconds: Seconds):
    first = submit(queue, "linear", memory="1M")
    here = served(queue)
    for _ in range(100):
        seconds.at += 3.0
        here.keep_clock()
    here.database.close()  # as the kernel does
    here = served(queue)
    assert 295.0 <= age(here, first) <= 300.0
    here.close()


def test_a_job_that_comes_when_a_service_has_idled_for_long_is_not_younger_after_a_kill(queue: Queue, seconds: Seconds):
    here = served(queue)
    seconds.at += 5000.0
    here.keep_clock()  # nobody waits: nothing is written
    number = submit(queue, "linear", memory="1M")
    here.read_changes()
    here.database.close()  # as the kernel does
    here = served(queue)
    assert age(here, number) == 0.0
    here.close()


def test_a_service_that_cannot_begin_leaves_the_clock_as_it_was(queue: Queue, seconds: Seconds, monkeypatch):
    submit(queue, "linear", memory="1M")
    here = served(queue)
    seconds.at += 900.0
    here.close()
    monkeypatch.setattr("gnnsys.jobs.queue_database.QueueDatabase.clock", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        here.open()
    here.close()
    with sqlite3.connect(queue.folder.database) as other:
        assert other.execute("SELECT value FROM settings WHERE name='clock'").fetchone() == ("900.0",)


def test_a_job_that_runs_once_more_has_waited_since_it_came(queue: Queue, seconds: Seconds):
    number, this = submit(queue, "linear", memory="1M"), ProcessIdentity.of(os.getpid())
    here = served(queue)
    seconds.at += 50.0
    assert this is not None and here.database.start(number, this, 1) == 1
    here.reread(number)
    assert number not in here.queued and here.database.requeue(number, 1, is_lost=True)
    here.reread(number)
    assert age(here, number) == 50.0
    here.close()
