"""What a policy sees of the jobs that wait: how much memory is set aside for each, and how long it may run.

Pure functions of the queue's records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnnsys.jobs.job_history import JobHistory
from gnnsys.jobs.job_memory import FIRST_FACTOR, memory_to_reserve
from gnnsys.jobs.job_record import JobRecord
from gnnsys.jobs.policies import Room, WaitingJob


def list_waiting(
    queued: Sequence[JobRecord], history: JobHistory, room: Room, uses_estimates: bool = True
) -> tuple[dict[int, WaitingJob], dict[int, int]]:
    """The jobs that could start, by number; and the bytes of those that can under no circumstances.

    A job whose memory nobody knows, or that was out of memory beside others, must be alone. It lets those go first that
    were submitted before it and are being estimated still: they would have to wait for all of it.
    """
    factor = history.factor
    found: dict[int, WaitingJob] = {}
    too_large: dict[int, int] = {}
    estimating = [job.number for job in queued if uses_estimates and not job.estimate]
    for job in queued:
        if uses_estimates and not job.estimate:
            continue  # it is being estimated
        memory = memory_to_reserve(job, factor, history.memory(job)) if uses_estimates else 0
        is_alone = job.is_alone or memory is None
        if is_alone and job.number > min(estimating, default=job.number):
            continue
        graphs = job.graphs if uses_estimates and not is_alone else {}
        whole = (memory or 0) + sum(graphs.values())
        if whole > room.capacity and not is_alone:
            if whole - _margin(job, memory or 0) > room.capacity:
                too_large[job.number] = whole
                continue
            is_alone, graphs = True, {}  # it fits without the margin: alone it has all there is
        found[job.number] = WaitingJob(
            number=job.number, memory=room.capacity if is_alone or memory is None else memory, submitted=arrival(job),
            seconds=history.seconds(job), graphs=graphs, is_alone=is_alone, kind=job.kind,
        )  # fmt: skip
    return found, too_large


def arrival(job: JobRecord) -> float:
    """By the queue's clock. Of a job that no service has seen it is yet to come."""
    return math.inf if job.arrived is None else job.arrived


def _margin(job: JobRecord, memory: int) -> int:
    """Bytes that are set aside for safety, beside what was estimated or measured. What a user states has none."""
    return 0 if job.spec.memory is not None else memory - int(memory / FIRST_FACTOR)
