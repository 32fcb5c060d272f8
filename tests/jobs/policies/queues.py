"""Queues for tests of policies, drawn with a seed; and what every policy must keep to, looked at from outside."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gnnsys.jobs import Policy, ReplayedQueue, Room, WaitingJob, find_policy, memory_of
from gnnsys.jobs.policies import FifoPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "base": lambda: find_policy("base"),
    "lmcf": lambda: find_policy("lmcf"),
    "bmc": lambda: find_policy("bmc"),
    "fifo": lambda: find_policy("fifo"),
    "fifo of three": lambda: FifoPolicy(3),
    "continuous": lambda: find_policy("continuous"),
}


def draw_jobs(draw: random.Random, count: int, capacity: int, *, arrive: float = 0.0) -> list[WaitingJob]:
    """Jobs that fit `capacity` alone: of all sizes, some on graphs that others read too, some alone, some of known
    length."""
    jobs = []
    for number in range(count):
        graphs = {name: 1 + capacity // 5 for name in draw.sample("ABC", draw.choice((0, 0, 1, 1, 2)))}
        memory = draw.randint(0, capacity - sum(graphs.values()))
        jobs.append(
            WaitingJob(
                number=number,
                memory=memory if draw.random() < 0.3 else memory // 4,
                submitted=draw.uniform(0.0, arrive),
                seconds=draw.choice((None, draw.uniform(1.0, 100.0))),
                graphs=graphs,
                is_alone=draw.random() < 0.1,
                kind=draw.choice(("", "a", "b")),
            )
        )
    return jobs


def draw_seconds(draw: random.Random, jobs: Sequence[WaitingJob]) -> dict[int, float]:
    """How long they really run: what they said, more or less."""
    return {job.number: draw.uniform(0.5, 2.0) * (job.seconds or draw.uniform(1.0, 100.0)) for job in jobs}


def check_promises(jobs: Sequence[WaitingJob], room: Room, found: ReplayedQueue) -> None:
    """Each job once, and at no time more than the capacity, more jobs than workers, or anybody beside a lone job."""
    assert sorted(job.number for job in found.jobs) == sorted(job.number for job in jobs)
    by_number = {job.number: job for job in jobs}
    for moment in {job.started for job in found.jobs}:  # nobody joins at any other time
        together = [by_number[job.number] for job in found.jobs if job.started <= moment < job.ended]
        assert 1 <= len(together) <= room.workers
        assert len(together) == 1 or not any(job.is_alone for job in together)
        own = sum(job.memory for job in together)
        graphs = {name: size for job in together for name, size in job.graphs.items()}
        assert own + sum(graphs.values()) == memory_of(together) <= room.capacity
    assert all(by_number[job.number].submitted == job.submitted <= job.started < job.ended for job in found.jobs)
