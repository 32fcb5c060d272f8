"""What services before have measured: on which device, and in queues that an older gnnsys wrote."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.jobs import JobState, Queue, Room, SharingRecord, make_spec
from gnnsys.jobs.process_identity import ProcessIdentity
from gnnsys.jobs.queue_database import VERSION, QueueDatabase
from gnnsys.jobs.served_queue import ServedQueue
from gnnsys.jobs.waiting_list import list_waiting
from tests.jobs.queue_jobs import FOLDER, NAME

THIS = ProcessIdentity.of(os.getpid())
H200, T1000 = "NVIDIA H200", "NVIDIA T1000"
ROOM = Room(capacity=64 << 30, workers=2)
SCHEMA_1 = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, sweep INTEGER, spec TEXT NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL DEFAULT 0, submitted REAL NOT NULL, started REAL, first_step REAL,
    ended REAL, process TEXT, is_cancelling INTEGER NOT NULL DEFAULT 0, estimated INTEGER,
    estimate TEXT NOT NULL DEFAULT '', reserved INTEGER, measured INTEGER, is_alone INTEGER NOT NULL DEFAULT 0,
    num_lost INTEGER NOT NULL DEFAULT 0, graphs TEXT NOT NULL DEFAULT '{}',
    error TEXT NOT NULL DEFAULT '', result TEXT NOT NULL DEFAULT '{}');
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE endings (number INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL, time REAL NOT NULL);
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


def served(queue: Queue, model: str, kind: str) -> ServedQueue:
    """As a service on such a device has it, open."""
    device = "cpu" if model == "cpu" else "cuda:0"
    made = ServedQueue(queue.folder, device, model, kind, ROOM, True, lambda stage: None)
    made.open()
    made.read_changes()
    return made


def run(queue: Queue, number: int, device: str, measured: int) -> None:
    """As a service does with a job that ends well on such a device."""
    assert THIS is not None
    attempt = queue._database.start(number, THIS, 1, device)
    assert attempt is not None and queue._database.finish(number, attempt, JobState.DONE, measured=measured)


def script(queue: Queue) -> int:
    """A job that nobody can estimate."""
    path = queue.folder.path.parent / "train.py"
    path.touch()
    return queue.submit(str(path))


def test_what_one_device_has_measured_counts_on_others_of_its_kind_alone(queue: Queue):
    for device, measured in (("cpu", 1 << 30), (H200, 2 << 30)):
        run(queue, script(queue), device, measured)
    waiting = script(queue)
    found = {}
    for model, kind in (("cpu", "cpu"), (H200, "h200"), (T1000, "h200")):
        here = served(queue, model, kind)
        job = replace(here.queued[waiting], estimate="unknown")  # as the estimator says of a script
        found[model] = here.history.memory(job)
        assert (here.history.seconds(job) is None) == (model == T1000), "nor does it say how long"
        told = list_waiting([job], here.history, ROOM)[0][waiting]
        assert told.is_alone == (model == T1000), "it is measured there first"
        here.close()
    assert found[T1000] is None and (found["cpu"] or 0) >> 30 == 1 and (found[H200] or 0) >> 30 == 2


def test_a_job_that_ends_tells_of_the_device_it_ran_on(queue: Queue):
    number, waiting = script(queue), script(queue)
    here = served(queue, "cpu", "cpu")
    run(queue, number, H200, 2 << 30)  # a script that the service before has left, on a GPU
    here.remember(number)
    assert here.history.memory(here.queued[waiting]) is None and queue.show(number).device == H200
    here.close()


def test_a_job_that_had_to_be_alone_on_one_device_need_not_on_another(queue: Queue):
    number = queue.submit(f"{NAME}:linear", folder=FOLDER, memory="1M")
    assert THIS is not None and queue._database.start(number, THIS, 1, T1000) == 1
    queue._database.requeue(number, 1, is_alone=True, measured=3 << 20)
    for model, is_alone in ((T1000, True), (H200, False), (T1000, False)):
        here = served(queue, model, "h200")
        assert here.queued[number].is_alone == is_alone
        here.close()


def test_which_jobs_gain_nothing_by_running_together_is_known_by_device(queue: Queue):
    record = SharingRecord().measured(["a", "b"], 0.9)
    here = served(queue, H200, "h200")
    here.keep_sharing_record(record)
    here.close()
    for model in ("cpu", H200):
        here = served(queue, model, "h200")
        assert here.sharing_record() == (record if model == H200 else SharingRecord())
        here.close()


def write_version_1(folder: Path, kind: str) -> None:
    """A queue as version 1 left it: one job was measured, one runs still, one was lost, and one waits for an hour."""
    folder.mkdir(mode=0o700)
    (folder / "train.py").touch()
    spec = make_spec(str(folder / "train.py")).to_json()
    rows = [("done", 1, 2.0, 1 << 30), ("running", 1, None, None), ("queued", 1, None, None), ("queued", 0, None, None)]
    with sqlite3.connect(folder / "queue.db") as old:
        old.executescript(SCHEMA_1)
        old.execute("PRAGMA application_id=0x676E6E6A")
        old.execute("PRAGMA user_version=1")
        for state, attempt, ended, measured in rows:
            old.execute(
                "INSERT INTO jobs (spec, state, attempt, submitted, started, ended, measured, estimate, result)"
                " VALUES (?,?,?,?,?,?,?,'unknown',?)",
                (spec, state, attempt, time.time() - 3600, 1.0, ended, measured, '{"loss": 0.5}'),
            )
        old.execute("INSERT INTO endings VALUES (1, 1, 'done', 2.0)")
        told = {"kind": kind, "capacity": 1 << 30, "factor": 1.15, "sharing": [[["a", "b"], 0.9]]}
        old.executemany("INSERT INTO settings VALUES (?, ?)", [(name, json.dumps(told[name])) for name in told])
    old.close()


@pytest.mark.parametrize(("before", "model", "kind"), [("cpu", "cpu", "cpu"), ("h200", T1000, "h200")])
def test_a_queue_of_version_1_goes_on_without_loss_on_the_device_it_was_served_on(
    tmp_path: Path, before: str, model: str, kind: str
):
    write_version_1(tmp_path / "queue", before)
    with Queue(tmp_path / "queue") as queue:
        assert [job.state for job in queue.list()] == ["done", "running", "queued", "queued"]
        assert queue.show(1).result == {"loss": 0.5} and queue._database.endings() == {1: (1, "done")}
        here = served(queue, model, kind)
        assert [job.device for job in queue.list()] == [model, model, model, None]
        assert (here.history.memory(here.queued[4]) or 0) >> 30 == 1
        assert here.sharing_record() == SharingRecord().measured(["a", "b"], 0.9)
        here.close()
        assert queue.submit(f"{NAME}:linear", folder=FOLDER, memory="1M") == 5


def test_what_a_queue_of_version_1_has_measured_is_not_taken_for_another_devices(tmp_path: Path):
    write_version_1(tmp_path / "queue", "h200")
    with Queue(tmp_path / "queue") as queue:
        for _ in range(2):
            here = served(queue, "cpu", "cpu")
            assert here.history.memory(here.queued[4]) is None and here.sharing_record() == SharingRecord()
            here.close()
        assert [job.device for job in queue.list()] == ["h200", "h200", "h200", None], "nobody knows more of it"


def test_what_a_queue_of_version_1_has_measured_is_named_by_a_service_that_estimates_nothing_too(tmp_path: Path):
    write_version_1(tmp_path / "queue", "cpu")
    with Queue(tmp_path / "queue") as queue:
        for kind in ("", "cpu"):
            here = served(queue, "cpu", kind)
            assert (here.history.memory(here.queued[4]) or 0) >> 30 == 1
            here.close()
        assert [job.device for job in queue.list()] == ["cpu", "cpu", "cpu", None]


def test_two_that_open_a_queue_of_version_1_at_once_change_it_once(tmp_path: Path, monkeypatch):
    write_version_1(tmp_path / "queue", "cpu")
    path = tmp_path / "queue" / "queue.db"
    old = sqlite3.connect(path, isolation_level=None)
    assert old.execute("SELECT count(*) FROM jobs").fetchone() == (4,)
    pragma, versions = QueueDatabase._pragma, [1]  # what the other one saw before the first one changed it

    def late(self: QueueDatabase, name: str) -> int:
        return versions.pop() if versions and name == "user_version" else pragma(self, name)

    one = QueueDatabase(path)
    monkeypatch.setattr(QueueDatabase, "_pragma", late)
    two = QueueDatabase(path)
    assert not versions and two._pragma("user_version") == VERSION
    old.execute("UPDATE jobs SET is_cancelling=1 WHERE number=4")  # one of version 1 that has it open goes on
    assert two.get(4).is_cancelling and -3700 < (one.get(4).arrived or 0) <= -3600, "an hour"
    for database in (one, two, old):
        database.close()
