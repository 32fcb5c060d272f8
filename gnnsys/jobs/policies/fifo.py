"""First come, first served: what a user does without a scheduler, and what the other policies are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnsys.jobs.policies.waiting_jobs import Room, WaitingJob, by_arrival, fits


@dataclass(frozen=True)
class FifoPolicy:
    """Jobs start in the order of submission, up to `at_once` of them together, and nobody overtakes.

    The first one that has no room yet holds all others back. A job that could not run alone is passed over.
    """

    at_once: int = 1

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"at_once is the number of jobs that run together, at least 1, got {self.at_once}")

    def __call__(
        self, waiting: Sequence[WaitingJob], running: Sequence[WaitingJob], room: Room, now: float
    ) -> list[int]:
        together, starting = list(running), list[int]()
        for job in sorted(waiting, key=by_arrival):
            if not fits([job], room):
                continue
            if len(together) >= self.at_once or not fits([*together, job], room):
                break
            together.append(job)
            starting.append(job.number)
        return starting
