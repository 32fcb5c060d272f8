"""What a policy sees of jobs: how much memory each takes, how long it may run, and what it shares with others.

A policy is a pure function of these records. It starts nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """A job that could start. `memory` is its own, graphs not counted, safety included.

    `graphs`: bytes of the graphs it reads, by name: jobs that run together have one copy of each. `seconds`: how long
    it is thought to run alone, None where nothing is known. `submitted`, and of a job that runs `started`: seconds of
    the queue's clock, which nobody sets and which stands while no service runs.
    """

    number: int
    memory: int
    submitted: float
    seconds: float | None = None
    graphs: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    is_alone: bool = False  # must have the device to itself
    kind: str = ""  # jobs of one kind are alike (function and sizes): who disturbs whom is remembered by it
    started: float | None = None


@dataclass(frozen=True, kw_only=True)
class Room:
    """What there is to share: bytes of the device, and how many jobs may run at a time."""

    capacity: int
    workers: int


Policy = Callable[[Sequence[WaitingJob], Sequence[WaitingJob], Room, float], list[int]]
"""(waiting, running, room, now) -> the numbers of jobs to start now, in this order."""


def memory_of(jobs: Iterable[WaitingJob]) -> int:
    """Bytes of a set of jobs that run together: the sum of their own, and each distinct graph once."""
    total, graphs = 0, dict[str, int]()
    for job in jobs:
        total += job.memory
        for name, num_bytes in job.graphs.items():
            graphs[name] = max(num_bytes, graphs.get(name, 0))
    return total + sum(graphs.values())


def fits(jobs: Sequence[WaitingJob], room: Room) -> bool:
    """Whether these jobs may run together: safety condition, workers, and nobody beside a job that must be alone."""
    if len(jobs) > room.workers or (len(jobs) > 1 and any(job.is_alone for job in jobs)):
        return False
    return memory_of(jobs) <= room.capacity


def by_arrival(job: WaitingJob) -> tuple[float, int]:
    """Sorts jobs as they came."""
    return job.submitted, job.number
