"""One job saves to a folder at a time; one that was killed is in nobody's way."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, replace

import pytest
import torch

import gnnsys
from gnnsys.checkpoint import folder_lock
from gnnsys.checkpoint.folder_lock import OWNER, FolderLock, Process
from gnnsys.checkpoint.restore import restore
from gnnsys.checkpoint.states import States
from tests.checkpoint.groups import on_ranks
from tests.support.processes import await_true


class Clock:
    """In place of `time`: sleeping takes no time, and what happens meanwhile is the test's."""

    def __init__(self):
        self.now, self.slept, self.meanwhile = 100.0, 0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += 1
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(folder_lock, "time", Clock())
    return folder_lock.time


@pytest.fixture
def other(tmp_path):
    """A process that runs, as one that saves to `tmp_path`."""
    child = subprocess.Popen(["sleep", "100"])
    yield replace(Process.this("b" * 32), pid=child.pid, start=folder_lock._stat(child.pid)[1]), child
    child.kill()
    child.wait()


def claim(folder, process):
    (folder / OWNER).write_text(json.dumps(asdict(process)))


def life(folder, **options):
    return gnnsys.resume(folder, model=torch.nn.Linear(2, 2), asynchronous=False, **options)


def test_a_second_job_is_refused_when_it_saves_and_the_first_is_named(tmp_path, other, logged):
    process, child = other
    claim(tmp_path, process)
    under_way = tmp_path / f".step-{5:010d}-{'0' * 16}"
    under_way.mkdir()
    with life(tmp_path) as saver:
        (warned,) = [record.getMessage() for record in logged if record.levelname == "WARNING"]
        assert f"another job that still runs saves to {tmp_path} (process {child.pid} on " in warned
        for _ in range(2):
            with pytest.raises(
                ValueError, match=rf"another job that still runs .*\(process {child.pid} on .*, job bbbbbbbb\)"
            ):
                saver.save()
        assert under_way.exists(), "what the other job is writing stays"
        child.kill()
        child.wait()
        assert saver.save() == tmp_path / "step-0000000000"
        assert not under_way.exists()


@pytest.mark.parametrize(
    "change", [{"pid": 0}, {"start": 1}], ids=["it has ended", "its number is another process's by now"]
)
def test_a_job_that_was_killed_is_taken_over_from_at_once(tmp_path, other, clock, change):
    claim(tmp_path, replace(other[0], **change))
    left = tmp_path / f".step-{5:010d}-{'0' * 16}"
    left.mkdir()
    with life(tmp_path) as saver:
        assert not left.exists() and saver.save() is not None
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000000"] and not clock.slept


def test_a_zombie_does_not_run(other):
    process, child = other
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.runs(Process.this("")) is False


@pytest.mark.parametrize("away", [{"boot": "another"}, {"space": "pid:[1]"}, {"boot": ""}])
def test_a_job_of_another_host_or_container_is_known_by_its_heartbeat(tmp_path, other, clock, away):
    claim(tmp_path, replace(other[0], host="elsewhere", **away))
    beats = iter(range(1, 10**9))

    def beat():
        if clock.slept % 20 == 0:
            os.utime(tmp_path / OWNER, (next(beats),) * 2)

    clock.meanwhile = beat
    with life(tmp_path) as saver:
        with pytest.raises(ValueError, match=r"another job that still runs .* on elsewhere, job bbbbbbbb"):
            saver.save()
        clock.meanwhile, before = lambda: None, clock.now
        assert saver.save() is not None, "it is silent for long enough"
        assert folder_lock.LEASE_SECONDS <= clock.now - before < folder_lock.LEASE_SECONDS + 1


def test_machines_that_cannot_see_a_dead_job_hear_of_it_from_one_that_can(tmp_path, other, clock):
    claim(tmp_path, replace(other[0], start=1))

    def body(group):
        mine = FolderLock(tmp_path, group.nonce)
        if group.rank == 1:
            mine._this = replace(mine._this, boot="another", host="elsewhere")
        restore(tmp_path, group, None, States(), mine)
        mine.take()
        return mine._this.host

    assert on_ranks(2, body)[1] == "elsewhere"
    assert not clock.slept, "nobody waited for a sign of life"


def test_a_file_that_says_nothing_is_waited_for_and_then_replaced(tmp_path, clock):
    (tmp_path / OWNER).write_text("{")
    with life(tmp_path) as saver:
        assert saver.save() is not None and clock.slept
    assert not (tmp_path / OWNER).exists()


def test_a_job_that_was_taken_over_from_while_it_could_not_be_heard_notices(tmp_path, other):
    with life(tmp_path) as saver:
        saver.save()
        (tmp_path / OWNER).unlink()
        claim(tmp_path, other[0])
        saver.step()
        with pytest.raises(ValueError, match="another job that still runs"):
            saver.save()
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == other[0].pid, "it is not ours to remove"


def test_savers_of_one_job_and_of_one_process_share_a_folder(tmp_path):
    first, second = FolderLock(tmp_path, "job"), FolderLock(tmp_path, "job")
    second._this = replace(second._this, host="another machine of the job", boot="x")
    first.take()
    second.take()
    second.close()
    assert (tmp_path / OWNER).exists(), "whoever made it removes it"
    first.close()
    with life(tmp_path) as one, life(tmp_path) as two:
        one.save()
        two.step()
        two.save()
    assert not (tmp_path / OWNER).exists()


def test_of_jobs_that_begin_at_once_one_wins(tmp_path, other, monkeypatch):
    one, two = FolderLock(tmp_path, "one"), FolderLock(tmp_path, "two")
    two._this = replace(other[0], job="two")
    create = FolderLock._create
    monkeypatch.setattr(FolderLock, "_create", lambda self: (create(two) if self is one else None, create(self))[1])
    with pytest.raises(ValueError, match="job two"):
        one.take()
    two.take()


def test_a_dead_jobs_file_is_removed_and_no_fresh_one(tmp_path, other):
    mine, dead = FolderLock(tmp_path, "mine"), replace(other[0], start=1)
    claim(tmp_path, other[0])  # between our look and our removal another job came
    mine._remove(dead)
    assert json.loads((tmp_path / OWNER).read_text()) == asdict(other[0])
    claim(tmp_path, dead)
    mine._remove(dead)
    assert list(tmp_path.iterdir()) == []


def test_a_heart_beats_in_the_file_that_the_job_made_and_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.001)
    with life(tmp_path) as saver:
        saver.save()
        os.utime(tmp_path / OWNER, (1, 1))
        await_true(lambda: (tmp_path / OWNER).stat().st_mtime != 1, "a beat")
        held = saver._lock
    assert held._ended.is_set() and held._file is None
