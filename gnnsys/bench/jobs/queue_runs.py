"""A queue of jobs run for real by a service, one way or another, and what became of it.

Workers are warm before the clock starts, where they are warm at all: each has run a job with the same layers. All jobs
are submitted at once. Their memory is estimated before, once for all sides, and given with each job; how long that took
is a row of its own.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gnnsys.bench.case import NotHere
from gnnsys.bench.jobs.device_watch import DeviceWatch
from gnnsys.bench.jobs.estimators import MOST_ESTIMATORS, estimators, num_estimators
from gnnsys.bench.workload import Workload
from gnnsys.jobs import (
    FIRST_FACTOR,
    FifoPolicy,
    JobService,
    JobTimes,
    Queue,
    SpecEstimate,
    estimate_spec,
    make_spec,
)

RUN_SECONDS = 420.0
_TURN_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class QueueSide:
    """One way to run a queue. `uses_estimates=False`: jobs start whatever they take, as without a queue. With
    `is_told=False` nobody has estimated them before: the service does, while it runs others. `sharing` is "mps",
    "slices", "auto" (MPS where it is to be had), or "streams": threads of one process instead of workers. `threads` of
    each worker; None: its share of the cores."""

    policy: str = "fifo"
    workers: int = 1
    is_warm: bool = True
    uses_estimates: bool = True
    is_told: bool = True
    sharing: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class QueueRun:
    """Seconds, of jobs in the order of their submission. `busy` in percent and `used` in bytes are the driver's."""

    times: tuple[JobTimes, ...]
    busy: float | None = None
    used: int | None = None

    @property
    def start(self) -> float:
        return min(job.submitted for job in self.times)

    @property
    def end(self) -> float:
        return max(job.ended or job.submitted for job in self.times)

    @property
    def makespan(self) -> float:
        return self.end - self.start

    @property
    def completion(self) -> float:
        return statistics.mean(job.completion or 0.0 for job in self.times)

    @property
    def queueing(self) -> float:
        return statistics.mean(job.queueing or 0.0 for job in self.times)

    @property
    def to_first_step(self) -> float:
        """From a job's start to the end of its first step, the median."""
        known = [job.first_step - job.started for job in self.times if job.first_step and job.started]
        return statistics.median(known) if known else 0.0

    @property
    def num_out_of_memory(self) -> int:
        """Runs that ended so, whether or not the job ended well when it was run again alone."""
        return sum(job.attempts - 1 for job in self.times) + sum("out of memory" in job.error for job in self.times)

    def told(self, names: Sequence[str]) -> str:
        """Of each job, in the order of starts: when it started, its first step, and all of it, in seconds."""
        lines = []
        for name, job in sorted(zip(names, self.times, strict=True), key=lambda named: named[1].started or 0.0):
            if job.started is not None and job.seconds is not None:
                first = (job.first_step or job.started) - job.started
                lines.append(f"{name} {job.started - self.start:.2f}+{first:.2f}/{job.seconds:.2f}")
        return ", ".join(lines)

    def known_busy(self) -> float:
        """NotHere where nobody tells."""
        if self.busy is None:
            raise NotHere("nvidia-smi tells nothing here")
        return self.busy

    def check(self) -> QueueRun:
        """RuntimeError where a job failed: what it did not do took no time."""
        failed = [job for job in self.times if str(job.state) != "done"]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(self.times)} jobs failed, the first with: {failed[0].error}")
        return self


@dataclass(frozen=True, kw_only=True)
class QueuedCall:
    """A job to submit: `memory` is stated, `estimate` was found before."""

    target: str
    arguments: Mapping[str, Any]
    memory: int | None = None
    estimate: SpecEstimate | None = None
    seed: int = 0


@dataclass(frozen=True)
class TimedEstimates:
    """What a service would find of each job, and how many processor seconds that took."""

    found: tuple[SpecEstimate, ...]
    seconds: float

    @property
    def memory(self) -> list[int]:
        """Bytes of each job when it runs alone: its own, with safety, and of the graph that it reads."""
        own = [int(found.num_bytes * FIRST_FACTOR) + 1 if found.num_bytes else 0 for found in self.found]
        return [mine + sum(found.graphs.values()) for mine, found in zip(own, self.found, strict=True)]


class QueueEstimators:
    """Estimates jobs, some at a time, each on one thread of a process that has estimated `warm_up` before. One for all
    queues with the layers of a library: the processes stay until the workload closes."""

    def __init__(self, work: Workload, warm_up: QueuedCall, device: str) -> None:
        self._work, self._device = work, device
        self._warm = partial(_estimate, warm_up, device)
        self._count = num_estimators(MOST_ESTIMATORS)
        self._pool = self._start()
        if self._pool is None:
            self._warm()

    def _start(self) -> ProcessPoolExecutor | None:
        if self._count < 2 or self._device == "cpu":
            return None
        return self._work.enter(estimators(self._count, self._warm))

    def find(self, calls: Sequence[QueuedCall]) -> TimedEstimates:
        try:
            found = self._estimates(calls)
        except BrokenProcessPool:  # one of them was killed: others begin anew, once
            self._pool = self._start()
            found = self._estimates(calls)
        return TimedEstimates(tuple(estimate for estimate, _ in found), sum(seconds for _, seconds in found))

    def _estimates(self, calls: Sequence[QueuedCall]) -> list[tuple[SpecEstimate, float]]:
        each = [self._device] * len(calls)
        return list(map(_estimate, calls, each) if self._pool is None else self._pool.map(_estimate, calls, each))


def _estimate(call: QueuedCall, device: str) -> tuple[SpecEstimate, float]:
    start = time.process_time()
    found = estimate_spec(make_spec(call.target, call.arguments), "cpu" if device == "cpu" else "h200")
    if found.how != "traced":
        raise RuntimeError(f"{call.target} with {dict(call.arguments)} was not to be estimated: {found.why}")
    return found, time.process_time() - start


class QueueService:
    """A queue and its service for one side, from `start` to `close`, or as a `with` block. `make_warm` comes before the
    first run."""

    def __init__(self, side: QueueSide, warm_up: QueuedCall, *, device: str, capacity: int | None) -> None:
        self.side, self._warm_up, self._device, self._capacity = side, warm_up, device, capacity
        self._stack = ExitStack()

    def start(self) -> None:
        side, folder = self.side, self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnsys-queues-"))
        self._service = self._stack.enter_context(
            JobService(
                Path(folder) / "queue",
                device=self._device,
                capacity=self._capacity,
                workers=side.workers,
                policy=FifoPolicy(side.workers) if side.policy == "fifo" else side.policy,
                is_warm=side.is_warm,
                threads=side.threads,
                uses_estimates=side.uses_estimates,
                is_judged=side.policy == "continuous",
                device_sharing=side.sharing,
            )
        )
        self._queue = Queue(Path(folder) / "queue")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> QueueService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self) -> bool:
        """Goes on with what was submitted. Whether nothing is left of it, and every worker waits for a job."""
        self._service.turn(_TURN_SECONDS)
        pool = self._service.pool
        return self._service.is_empty and len(pool.idle) >= (pool.count if self.side.is_warm else 0)

    def submit_warm_up(self) -> None:
        """A job for each worker, all of which wait."""
        self._warming = _submit(self._queue, [self._warm_up] * self.side.workers)

    def check_warm(self) -> None:
        """RuntimeError where a worker has not run its job."""
        for job in map(self._queue.show, self._warming):
            if str(job.state) != "done":
                raise RuntimeError(f"the job that makes a worker warm is {job.state}: {job.error}")

    def run(self, calls: Sequence[QueuedCall]) -> QueueRun:
        with DeviceWatch() as watch:
            numbers = _submit(self._queue, calls)
            ended = {job.number: job for job in self._service.run_until_empty(RUN_SECONDS)}
            run = QueueRun(tuple(ended[number] for number in numbers))
            return QueueRun(run.times, watch.busy(run.start, run.end), watch.most_used(run.start, run.end))


def make_warm(services: Sequence[QueueService]) -> dict[QueueService, Exception]:
    """Until every worker of these has run a job, all at the same time; the errors of those with which that failed."""
    begun, errors = time.monotonic(), dict[QueueService, Exception]()
    warm = [service for service in services if service.side.is_warm]

    def each(do: Callable[[QueueService], object], over: Sequence[QueueService]) -> list[QueueService]:
        """Those for which `do` returned nothing."""
        left = []
        for service in over:
            try:
                if not do(service):
                    left.append(service)
            except Exception as error:
                errors[service] = error
        return left

    def wait(left: list[QueueService]) -> None:
        while left := each(QueueService.turn, left):
            if time.monotonic() - begun > RUN_SECONDS:
                late = TimeoutError(f"workers are not warm after {RUN_SECONDS:g} s")
                errors.update(dict.fromkeys(left, late))
                return

    wait(warm)
    warm = each(QueueService.submit_warm_up, [service for service in warm if service not in errors])
    wait(warm)
    warm = each(QueueService.check_warm, [service for service in warm if service not in errors])
    if count := sum(service.side.workers for service in warm):
        print(f"workers ({count}) are warm after {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return errors


def run_queue(
    side: QueueSide,
    queues: Sequence[Sequence[QueuedCall]],
    warm_up: QueuedCall,
    *,
    device: str,
    capacity: int | None,
) -> list[QueueRun]:
    """Runs queues one after the other in one service: what it learns of the first it knows in the second."""
    with log_to_stderr(), QueueService(side, warm_up, device=device, capacity=capacity) as service:
        for error in make_warm([service]).values():
            raise error
        return [service.run(calls) for calls in queues]


def _submit(queue: Queue, calls: Sequence[QueuedCall]) -> list[int]:
    return [
        queue.submit(
            call.target, dict(call.arguments), memory=call.memory, seed=call.seed, estimate=call.estimate or False
        )
        for call in calls
    ]


class _ToStderr(logging.StreamHandler[Any]):
    pass


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """What services say, such as that there is no MPS here. Once, where blocks are in each other."""
    log, handler = logging.getLogger("gnnsys.jobs"), _ToStderr()
    if any(isinstance(each, _ToStderr) for each in log.handlers):
        yield
        return
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
