"""No groups and no barrier: a job starts as soon as its memory is free, the shortest first, and nobody waits for ever.

Shortest first alone would starve a large job while small ones keep coming: it needs much memory at once, and some of it
is always taken. So a job that has waited for long is due. Those that are due come first, and for the first of them that
does not fit yet room is kept: until it starts, others start only where they could run beside it.

The bound: let `longest` be the longest time that any job runs, and `ahead` the number of waiting jobs that are due
earlier. Then a job starts at the latest at

    due_at(job) + (ahead + 1) * longest,   due_at(job) = submitted + max(patience, stretch * seconds)

Proof. Let the job be the first of those that are due. All that run at this time have ended after `longest`. What has
started meanwhile fits beside the job, all of it together, so at that time the job fits and starts. Nobody comes before
it later, for what is submitted or becomes due later has a later `due_at`. Before it is the first, each of those ahead
takes `longest` at most, by the same argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnnsys.jobs.policies.waiting_jobs import Room, WaitingJob, by_arrival, fits, memory_of


def _always(jobs: Sequence[WaitingJob]) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class ContinuousPolicy:
    """Shortest first by `seconds` where known, else by memory.

    `patience` (seconds) and `stretch` (times its own length): how long a job waits until it is due, the longer of both.
    `pays`: whether a set of jobs should run together, see `SharingRecord.pays`; a part of a set that pays must pay.
    """

    patience: float = 600.0
    stretch: float = 4.0
    pays: Callable[[Sequence[WaitingJob]], bool] = _always

    def __post_init__(self) -> None:
        if not (self.patience >= 0 and self.stretch >= 0):
            raise ValueError(f"patience and stretch must not be negative, got {self.patience} and {self.stretch}")

    def due_at(self, job: WaitingJob) -> float:
        """When a job has waited for long, by the queue's clock."""
        return job.submitted + max(self.patience, self.stretch * (job.seconds or 0.0))

    def latest_start(self, job: WaitingJob, ahead: int, longest: float) -> float:
        """The bound that this module proves."""
        return self.due_at(job) + (ahead + 1) * longest

    def __call__(
        self, waiting: Sequence[WaitingJob], running: Sequence[WaitingJob], room: Room, now: float
    ) -> list[int]:
        together, starting = list(running), list[int]()
        kept: WaitingJob | None = None  # the job that room is kept for
        beside = list[WaitingJob]()  # and those that may run when it starts
        for job in self._order(waiting, running, now):
            if len(together) >= room.workers:
                break
            if not self._may_run([*together, job], room):
                if kept is None and self.due_at(job) <= now and fits([job], room):
                    kept = job
                    beside = [each for each in together if each.started is None or each.started >= self.due_at(job)]
                continue
            if kept is not None:
                if not self._may_run([*beside, kept, job], room):
                    continue
                beside.append(job)
            together.append(job)
            starting.append(job.number)
        return starting

    def _order(self, waiting: Sequence[WaitingJob], running: Sequence[WaitingJob], now: float) -> list[WaitingJob]:
        lengths = expected_lengths([*waiting, *running])

        def key(job: WaitingJob) -> tuple[bool, float, tuple[float, int]]:
            is_due = self.due_at(job) <= now
            return not is_due, self.due_at(job) if is_due else lengths[job.number], by_arrival(job)

        return sorted(waiting, key=key)

    def _may_run(self, jobs: Sequence[WaitingJob], room: Room) -> bool:
        return fits(jobs, room) and (len(jobs) == 1 or self.pays(jobs))


def expected_lengths(jobs: Sequence[WaitingJob]) -> dict[int, float]:
    """What jobs are compared by: seconds where they are known. Memory stands for them where they are not (V-G.2 of the
    paper: the two go together), in seconds by the median of the jobs of which both are known."""
    known = [job.seconds / max(memory_of([job]), 1) for job in jobs if job.seconds is not None]
    rate = statistics.median(known) if known else 1.0
    return {job.number: rate * memory_of([job]) if job.seconds is None else job.seconds for job in jobs}
