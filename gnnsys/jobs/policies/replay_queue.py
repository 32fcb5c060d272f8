"""A queue played through without a device: who starts when under a policy, from how long each job would run alone.

Time goes from event to event: a job comes, a job ends. In between every job that runs advances at its relative speed,
which depends on who runs beside it. The policy is asked after each event, as a service would ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gnnsys.jobs.policies.waiting_jobs import Policy, Room, WaitingJob, by_arrival, fits

Speeds = Callable[[Sequence[WaitingJob]], Sequence[float]]
"""Jobs that run together -> the relative speed of each."""

_DONE = 1e-9  # seconds that may be left of a job that has ended, for sums of floats are not exact


@dataclass(frozen=True)
class ReplayedJob:
    """When a job came, started and ended."""

    number: int
    submitted: float
    started: float
    ended: float


@dataclass(frozen=True)
class ReplayedQueue:
    """What became of every job, in the order of their ends."""

    jobs: tuple[ReplayedJob, ...]

    @property
    def makespan(self) -> float:
        """From the first submission to the last end."""
        return max(job.ended for job in self.jobs) - min(job.submitted for job in self.jobs)

    @property
    def mean_completion(self) -> float:
        """From submission to end (the paper's JCT)."""
        return sum(job.ended - job.submitted for job in self.jobs) / len(self.jobs)

    @property
    def mean_queueing(self) -> float:
        """From submission to start (the paper's QT)."""
        return sum(job.started - job.submitted for job in self.jobs) / len(self.jobs)


def undisturbed(jobs: Sequence[WaitingJob]) -> list[float]:
    """Relative speeds on a device that has room for all."""
    return [1.0] * len(jobs)


def replay_queue(
    jobs: Sequence[WaitingJob],
    seconds: Mapping[int, float],
    policy: Policy,
    room: Room,
    speeds: Speeds = undisturbed,
    startup: float = 0.0,
) -> ReplayedQueue:
    """Plays a queue through. `seconds`: how long each job really runs alone, by its number; the policy knows what the
    job itself says. `startup`: seconds from a job's start to its first step, in which it disturbs nobody.

    RuntimeError where a policy breaks its word: a set that does not fit, a job that does not wait, or a halt.
    """
    coming, waiting = sorted(jobs, key=by_arrival), list[WaitingJob]()
    running, left, ended = list[WaitingJob](), dict[int, float](), list[ReplayedJob]()
    now = coming[0].submitted if coming else 0.0
    while coming or waiting or running:
        while coming and coming[0].submitted <= now:
            waiting.append(coming.pop(0))
        for number in policy(tuple(waiting), tuple(running), room, now):
            job = next((job for job in waiting if job.number == number), None)
            if job is None:
                raise RuntimeError(f"the policy starts job {number}, which does not wait")
            waiting.remove(job)
            running.append(replace(job, started=now))
            left[number] = seconds[number]
        if len(running) > 1 and not fits(running, room):
            raise RuntimeError(f"the policy runs {[job.number for job in running]} together, which do not fit")
        if not running and not coming:
            raise RuntimeError(f"the policy starts none of {[job.number for job in waiting]}, and nothing runs")
        now = _advance(now, running, left, speeds, startup, coming[0].submitted if coming else None)
        for job in [job for job in running if left[job.number] <= _DONE]:
            running.remove(job)
            assert job.started is not None
            ended.append(ReplayedJob(job.number, job.submitted, job.started, now))
    return ReplayedQueue(tuple(ended))


def _advance(
    now: float,
    running: Sequence[WaitingJob],
    left: dict[int, float],
    speeds: Speeds,
    startup: float,
    next_arrival: float | None,
) -> float:
    """Goes on to the next event, and takes off `left` what was done meanwhile."""
    ready = {job.number: (job.started or 0.0) + startup for job in running}
    training = [job for job in running if ready[job.number] <= now]
    rates = dict(zip((job.number for job in training), speeds(training), strict=True)) if training else {}
    events = [at for at in ready.values() if at > now]
    events += [now + left[number] / rate for number, rate in rates.items()]
    if next_arrival is not None:
        events.append(next_arrival)
    then = min(events)
    for number, rate in rates.items():
        left[number] = max(left[number] - rate * (then - now), 0.0)
    return then
