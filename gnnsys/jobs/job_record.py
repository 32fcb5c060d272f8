"""A job as the queue knows it: what it is, how far it is, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from gnnsys.jobs.job_spec import JobSpec
from gnnsys.jobs.process_identity import ProcessIdentity


class JobState(str, Enum):
    """A job is in one of the last three exactly once, and for good."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value

    @property
    def is_over(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Times are seconds of time.time(), but `arrived`, which is of the queue's own clock (`QueueClock`).

    `estimated` and `measured` are bytes at the peak, None where not known.
    """

    number: int
    spec: JobSpec
    state: JobState
    sweep: int | None
    attempt: int
    submitted: float
    started: float | None
    first_step: float | None
    ended: float | None
    process: ProcessIdentity | None
    is_cancelling: bool
    estimated: int | None
    estimate: str  # traced, stated, learned, unknown, or "" before anybody has tried
    reserved: int | None  # what was set aside for it when it started
    measured: int | None
    is_alone: bool
    graphs: Mapping[str, int]  # bytes of the shared graphs that it reads, by name
    num_lost: int  # times that its process died under it
    error: str
    result: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None  # what its last attempt ran on, as `DeviceFacts.model` says it
    arrived: float | None = None  # None before a service has seen it

    @cached_property
    def kind(self) -> str:
        """Jobs of one kind are alike: the same function and memory, or the same script and words."""
        if self.spec.is_script:
            return " ".join([self.spec.target, *self.spec.words])
        return f"{self.spec.target}/{self.estimated}"

    @property
    def times(self) -> JobTimes:
        return JobTimes(
            number=self.number, state=self.state, submitted=self.submitted, started=self.started,
            first_step=self.first_step, ended=self.ended, memory=self.reserved, measured=self.measured,
            attempts=self.attempt, error=self.error, result=self.result,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """What a benchmark wants to know of a job that has ended."""

    number: int
    state: JobState
    submitted: float
    started: float | None  # of its last attempt
    first_step: float | None  # when its first step had ended; None of a script
    ended: float | None
    memory: int | None  # bytes that were set aside for it
    measured: int | None  # bytes at its peak
    attempts: int
    error: str
    result: Mapping[str, Any]

    @property
    def queueing(self) -> float | None:
        return None if self.started is None else self.started - self.submitted

    @property
    def completion(self) -> float | None:
        return None if self.ended is None else self.ended - self.submitted

    @property
    def seconds(self) -> float | None:
        return None if self.ended is None or self.started is None else self.ended - self.started


@dataclass(frozen=True, kw_only=True)
class SpecEstimate:
    """What is known of a job's memory before it runs: bytes of its own, and of the graphs that it shares.

    `how`: traced, stated, unknown, or "" where nobody has tried; `why` says why it is unknown. Bytes are known where
    it is traced or stated.
    """

    num_bytes: int | None = None
    how: str = ""
    why: str = ""
    graphs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.how not in ("traced", "stated", "unknown", ""):
            raise ValueError(f"how must be traced, stated, unknown or empty, got {self.how!r}")
        if (self.num_bytes is not None) != (self.how in ("traced", "stated")):
            raise ValueError(f"only what is traced or stated has num_bytes, got {self.num_bytes} and {self.how!r}")
        for size in (0 if self.num_bytes is None else self.num_bytes, *self.graphs.values()):
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"num_bytes and sizes of graphs must be numbers of bytes, got {size!r}")

    def columns(self) -> tuple[int | None, str, str]:
        """As the database has it."""
        return self.num_bytes, self.how, json.dumps(dict(self.graphs), sort_keys=True)
