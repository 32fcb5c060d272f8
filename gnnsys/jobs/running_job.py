"""A job that runs now, as its service knows it: who runs it, how fast it is, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnnsys.jobs.job_record import JobRecord
from gnnsys.jobs.policies import WaitingJob
from gnnsys.jobs.script_process import ScriptProcess
from gnnsys.jobs.worker_process import WorkerProcess

_WINDOW_SECONDS = 1.0  # a pace of less time is not told


@dataclass
class RunningJob:
    """`runner` is a worker or the keeper of a script; `ending` what came of it, until that is written down."""

    record: JobRecord
    attempt: int
    waiting: WaitingJob  # what the policy sees of it
    runner: WorkerProcess | ScriptProcess
    pace: JobPace
    ending: Mapping[str, Any] | None = None
    kill_at: float | None = None  # asked to end: killed then
    stopped_at: float | None = None  # its process was seen to be stopped (SIGSTOP)
    num_stops: int = 0  # times that it was continued since
    has_stepped: bool = False
    had_company: bool = False  # others ran beside it, in this attempt

    @property
    def key(self) -> tuple[int, int]:
        """The job and which attempt at it: an answer of an earlier one is no answer to this one."""
        return self.record.number, self.attempt


@dataclass
class JobPace:
    """Steps per second of a job, of the time since its company last changed."""

    number: int
    kind: str
    alone: float | None = None  # steps per second of jobs of this kind with nobody beside them, where known
    is_paused: bool = False
    rate: float | None = None
    _first: tuple[int, float] | None = None

    def tell(self, steps: int, at: float, paused: float) -> None:
        """`at` is a time of a clock that nobody sets, and `paused` the seconds of a pause up to it."""
        worked = at - paused
        if self._first is None:
            self._first = steps, worked
        elif worked - self._first[1] >= _WINDOW_SECONDS:
            self.rate = (steps - self._first[0]) / (worked - self._first[1])

    def begin_again(self) -> None:
        """Others have come or gone: what was measured is of another company."""
        self.rate, self._first = None, None
