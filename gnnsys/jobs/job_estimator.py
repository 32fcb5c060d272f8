"""Estimates the memory of jobs that wait, in processes of its own: user's code runs there, and no GPU is touched.

Jobs that differ only in their seed have one estimate. Nobody waits for an estimate but the jobs that it is of.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnsys.jobs.job_memory import FIRST_FACTOR
from gnnsys.jobs.job_record import JobRecord, SpecEstimate
from gnnsys.jobs.queue_database import NOT_WRITTEN
from gnnsys.jobs.served_queue import ServedQueue
from gnnsys.jobs.submit_estimator import ESTIMATE_SECONDS
from gnnsys.jobs.worker_pool import WorkerPool
from gnnsys.jobs.worker_process import WorkerProcess, ending_words

_log = logging.getLogger(__name__)
_MOST_PROCESSES, _CORES_EACH = 4, 4  # a machine with fewer idle cores has one


@dataclass
class _UnderWay:
    number: int  # the first of the jobs that it is of
    likeness: str
    deadline: float


class JobEstimator:
    """`begin` in each round of the service's loop; what a worker answers goes to `told`, its end to `lost`."""

    def __init__(self, queue: ServedQueue, log: Path) -> None:
        self._queue = queue
        self._most = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // _CORES_EACH))
        self.pool = WorkerPool(0, "cpu", 1, log, is_warm=True)
        self._under_way: dict[WorkerProcess, _UnderWay] = {}

    def begin(self) -> None:
        """Has as many jobs estimated at a time as there are processes for it."""
        if not self._queue.uses_estimates:
            return
        unknown = self._unknown()
        for worker, each in list(self._under_way.items()):
            if each.likeness not in unknown:  # all of them were cancelled, and others wait
                del self._under_way[worker]
                worker.kill()
            elif time.monotonic() > each.deadline:
                worker.kill()
        for each in self._under_way.values():
            unknown.pop(each.likeness)
        self.pool.count = min(self._most, len(unknown) + len(self._under_way))
        self.pool.shrink(1)
        self.pool.fill()
        for likeness, (job, *_) in unknown.items():
            if not self.pool.can_take:
                break
            worker = self.pool.take()
            self._under_way[worker] = _UnderWay(job.number, likeness, time.monotonic() + ESTIMATE_SECONDS)
            self._order(worker, job)

    def told(self, worker: WorkerProcess, answer: Mapping[str, Any]) -> None:
        found, refusal = SpecEstimate(**answer["found"]), str(answer["refusal"])
        each = self._under_way.pop(worker, None)
        if each is None:
            return  # of jobs that were cancelled, or a job has written it to the pipe of a worker
        self.pool.give_back(worker)
        if not found.how and not refusal:
            found = SpecEstimate(how="unknown", why=f"there is no profile of {self._queue.kind} any more")
        if self._write(each, found, refusal):
            self._queue.on_stage("estimated")

    def lost(self, worker: WorkerProcess) -> None:
        """The process has ended: such jobs run alone."""
        code = self.pool.lost(worker)
        if (each := self._under_way.pop(worker, None)) is not None:
            why = f"it ended its process {ending_words(code)}"
            if time.monotonic() > each.deadline:
                why = f"that takes longer than {ESTIMATE_SECONDS:g} s"
            self._write(each, SpecEstimate(how="unknown", why=why))

    def begin_again(self) -> None:
        """What is under way is estimated once more, by other processes."""
        self._under_way.clear()
        for worker in self.pool.everyone():
            worker.kill()

    def _unknown(self) -> dict[str, list[JobRecord]]:
        """Jobs that nobody has estimated, by what makes them alike."""
        found: dict[str, list[JobRecord]] = {}
        for job in self._queue.queued.values():
            if not job.estimate:
                found.setdefault(job.spec.likeness, []).append(job)
        return found

    def _order(self, worker: WorkerProcess, job: JobRecord) -> None:
        worker.send(
            {
                "do": "estimate", "number": job.number, "spec": job.spec.to_json(), "kind": self._queue.kind,
                "capacity": self._queue.room.capacity, "factor": min(FIRST_FACTOR, self._queue.history.factor),
            }
        )  # fmt: skip

    def _write(self, each: _UnderWay, found: SpecEstimate, refusal: str = "") -> bool:
        """Of all jobs that are alike. Where the disk is full they are estimated once more."""
        numbers = [job.number for job in self._unknown().get(each.likeness, [])]
        try:
            self._queue.database.set_estimate(numbers, found)
            if refusal:
                self._queue.database.refuse(numbers, refusal)
        except NOT_WRITTEN:
            return False
        finally:
            self._queue.reread(*numbers)
        if found.why and not refusal:
            _log.warning("job %d runs alone, its memory was not to be estimated: %s", each.number, found.why)
        return True
