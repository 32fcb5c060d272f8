"""Whatever is killed whenever: each job ends exactly once, with the bits of an undisturbed run, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnsys.jobs import JobState, Queue
from tests.jobs.queue_services import expected, left_in
from tests.jobs.survival import arguments_of, survive
from tests.support.processes import alive, await_shared_memory_freed, await_true, shared_memory


def check_survival(folder: Path, count: int, num_kills: int, seed: int, most_stages: int) -> set[tuple[str, str]]:
    before = shared_memory()
    survived = survive(folder, count, num_kills, seed, most_stages)
    with Queue(folder) as queue:
        jobs = queue.list()
        assert [job.number for job in jobs] == list(range(1, count + 1))
        assert [job.state for job in jobs] == [JobState.DONE] * count, [job.error for job in jobs if job.error]
        endings = queue._database.endings()
        assert sorted(endings) == [job.number for job in jobs], "each has ended once"
        assert all(endings[job.number] == (job.attempt, "done") for job in jobs)
        assert len(survived.kills) >= num_kills and sum(job.attempt for job in jobs) > count
        for job in jobs:
            assert job.result == expected(*arguments_of(job.spec.seed)), f"job {job.number}, attempt {job.attempt}"
        log = (folder / "workers.log").read_text()
    assert left_in(folder) == [] and "Traceback" not in log, log
    await_shared_memory_freed(before)
    await_true(lambda: not processes_in(folder), "the end of all processes")
    return set(survived.kills)


def processes_in(folder: Path) -> list[int]:
    """Processes that have a file of the queue open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(folder) in str(file.readlink()) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:
            continue
    return [pid for pid in found if alive(pid) and pid != int(Path("/proc/self").readlink().name)]


def test_a_few_jobs_survive_kills_of_workers_services_and_who_submits(tmp_path: Path):
    killed = check_survival(tmp_path / "queue", count=10, num_kills=5, seed=1, most_stages=12)
    assert {who for who, _ in killed} >= {"submit", "service"}


@pytest.mark.long
def test_two_hundred_jobs_survive_thirty_kills(tmp_path: Path):
    killed = check_survival(tmp_path / "queue", count=200, num_kills=30, seed=7, most_stages=60)
    assert {who for who, _ in killed} == {"submit", "service", "worker"}
    assert len({stage for who, stage in killed if who == "service"}) >= 3, "inside dispatch and finish too"
