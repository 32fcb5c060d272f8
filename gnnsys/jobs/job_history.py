"""What jobs that have ended well tell of those that wait: how far estimates are off, what they took, how long they ran.

One device says nothing of another: on the CPU a job's memory is what its process grows by, on a GPU what torch takes.
Sums alone are kept, so that a queue with thousands of ended jobs is as quick as a new one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

from gnnsys.jobs.job_memory import FIRST_FACTOR
from gnnsys.jobs.job_record import JobRecord, JobState

MOST_FACTOR = 1.5  # one job that is further off is no reason to set so much aside for all
ENOUGH_JOBS = 20
_PERCENTILE = 0.99
_LEAST_BYTES = 64 << 20  # smaller jobs say little: what libraries take hides what the job takes
_EPOCHS = "epochs"


class JobHistory:
    """`add` is told of each job that has ended; those that ran on another device than `device` tell nothing."""

    def __init__(self, device: str, ended: Iterable[JobRecord] = ()) -> None:
        self._device = device
        self._ratios: list[float] = []  # measured over estimated, in order
        self._memory: dict[str, int] = {}  # by likeness
        self._seconds: dict[tuple[str, str], tuple[float, int]] = {}  # the sum, and of how many
        for job in ended:
            self.add(job)

    def add(self, job: JobRecord) -> None:
        if job.state is not JobState.DONE or job.device != self._device:
            return
        if job.measured and job.estimated and job.estimate == "traced" and not job.is_alone:
            if job.estimated >= _LEAST_BYTES:  # `memory` has those that were far off, which ran alone
                bisect.insort(self._ratios, job.measured / job.estimated)
        elif job.measured and (job.estimated is None or job.is_alone):
            like = job.spec.likeness
            self._memory[like] = max(self._memory.get(like, 0), math.ceil(FIRST_FACTOR * job.measured))
        if (seconds := job.times.seconds) is not None:
            total, count = self._seconds.get(_alike(job), (0.0, 0))
            self._seconds[_alike(job)] = total + seconds, count + 1

    @property
    def factor(self) -> float:
        """1.15 until enough estimated jobs have been measured, then the 99th percentile of measured over estimated."""
        if len(self._ratios) < ENOUGH_JOBS:
            return FIRST_FACTOR
        return min(max(1.0, self._ratios[math.ceil(_PERCENTILE * len(self._ratios)) - 1]), MOST_FACTOR)

    def memory(self, job: JobRecord) -> int | None:
        """What jobs like it took, where no estimate is to be had or the estimate was too low for one of them."""
        return self._memory.get(job.spec.likeness)

    def seconds(self, job: JobRecord) -> float | None:
        """How long jobs that are alike took, on the mean."""
        total, count = self._seconds.get(_alike(job), (0.0, 0))
        return total / count if count else None


def _alike(job: JobRecord) -> tuple[str, str]:
    return job.kind, str(job.spec.arguments.get(_EPOCHS))
