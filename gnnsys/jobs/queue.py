"""`Queue`: what a user does with a queue, with or without a service. Any tuner submits through it too."""

from __future__ import annotations

import builtins
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gnnsys.jobs.grid import combinations
from gnnsys.jobs.job_memory import too_large
from gnnsys.jobs.job_record import JobRecord, JobState, SpecEstimate
from gnnsys.jobs.job_spec import JobSpec, is_function, make_spec
from gnnsys.jobs.queue_database import QueueDatabase
from gnnsys.jobs.queue_folder import QueueFolder
from gnnsys.jobs.submit_estimator import SubmitEstimator
from gnnsys.observe import parse_size

DEFAULT_FOLDER = "~/.gnnsys/jobs"
_LOOK_SECONDS = (0.02, 0.5)
_ESTIMATE_SECONDS = 30.0  # of a sweep that is submitted; the service estimates the rest


def default_folder() -> Path:
    """$GNNSYS_JOBS, else ~/.gnnsys/jobs."""
    return Path(os.environ.get("GNNSYS_JOBS") or DEFAULT_FOLDER).expanduser()


class Queue:
    """A queue in a folder, which is made where there is none. Close it, or use it in a `with` block.

    >>> queue = gnnsys.jobs.Queue("runs/")  # doctest: +SKIP
    >>> numbers = queue.sweep("train:job", {"lr": [0.1, 0.01], "hidden": [64, 256]}, seeds=3)  # doctest: +SKIP
    >>> [job.result["accuracy"] for job in queue.wait(numbers)]  # doctest: +SKIP
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, is_new: bool = True,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:  # fmt: skip
        self.folder = QueueFolder(default_folder() if folder is None else folder, is_new)
        self._database, self._on_stage = QueueDatabase(self.folder.database), on_stage
        self._estimator = SubmitEstimator()

    def submit(
        self, target: str, arguments: Mapping[str, Any] | None = None, words: Sequence[str] = (), *, seed: int = 0,
        memory: int | str | None = None, folder: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None, checkpoint_steps: int | None = None,
        checkpoint_seconds: float | None = None, keeps_weights: bool = True, key: str | None = None,
        estimate: bool | SpecEstimate = True,
    ) -> int:  # fmt: skip
        """Adds one job; its number.

        `target` is MODULE:FUNCTION with `arguments`, or a script with `words`. `memory` is what it takes, where you
        know better than an estimate. `key` makes this safe to repeat: what was submitted with the same key before is
        not submitted again. Where a service has said how much memory there is, a job that is too large is a ValueError.
        `estimate=False` leaves estimating to the service; what `estimate_spec` has found need not be found again, and
        whether the function is there is not looked at then.
        """
        spec = make_spec(
            target, arguments, words, folder=folder, environment=environment, seed=seed,
            memory=None if memory is None else parse_size(memory), checkpoint_steps=checkpoint_steps,
            checkpoint_seconds=checkpoint_seconds, keeps_weights=keeps_weights,
        )  # fmt: skip
        if isinstance(estimate, SpecEstimate):
            self._check_size(spec, estimate)
            return self._write([spec], [estimate], False, key)[0]
        return self._add([spec], False, key, estimate)[0]

    def sweep(
        self, target: str, grid: Mapping[str, Sequence[Any]], seeds: int = 1, *,
        arguments: Mapping[str, Any] | None = None, key: str | None = None, estimate: bool = True,
        memory: int | str | None = None, words: Sequence[str] = (), **options: Any,
    ) -> builtins.list[int]:  # fmt: skip
        """Adds a job per combination of the grid and seed, all of them or none; their numbers.

        `arguments` are those of every job. Of a script a combination is words: `--lr 0.1 --hidden 64 --seed 0`.
        """
        specs, size = [], None if memory is None else parse_size(memory)
        for row, seed in combinations(grid, seeds):
            if is_function(target):
                both = sorted(row.keys() & (arguments or {}).keys())
                if both:
                    raise ValueError(f"{both[0]} is in the grid and in the arguments: leave it out of one of them")
                given, own = {**(arguments or {}), **row}, list(words)
            else:
                given = {}
                own = [*words, *(str(part) for name, value in row.items() for part in (f"--{name}", value))]
                own += ["--seed", str(seed)] if seeds > 1 else []
            specs.append(make_spec(target, given, own, seed=seed, memory=size, **options))
        return self._add(specs, True, key, estimate)

    def _add(self, specs: Sequence[JobSpec], is_sweep: bool, key: str | None, estimate: bool) -> builtins.list[int]:
        if not isinstance(estimate, bool):
            raise ValueError(f"estimate must be True or False, or for one job a SpecEstimate, got {estimate!r}")
        estimates = [SpecEstimate()] * len(specs)
        if estimate:
            estimates = self._estimates(specs)
        return self._write(specs, estimates, is_sweep, key)

    def _check_size(self, spec: JobSpec, found: SpecEstimate) -> None:
        """ValueError where what is known of a job is more than a service has said that there is."""
        if spec.memory is not None or spec.is_script:
            raise ValueError("an estimate is of a function whose memory is not stated: leave out estimate=")
        settings = self._database.settings()
        if settings.get("kind"):
            needed = int((found.num_bytes or 0) * settings["factor"]) + sum(found.graphs.values())
            if needed > settings["capacity"]:
                raise ValueError(too_large(spec, needed, settings["capacity"]))

    def _write(
        self, specs: Sequence[JobSpec], estimates: Sequence[SpecEstimate], is_sweep: bool, key: str | None
    ) -> builtins.list[int]:
        estimates = [found if found.how else _without_trace(spec) for spec, found in zip(specs, estimates, strict=True)]
        self._on_stage("estimated")
        numbers = self._database.add(specs, estimates, is_sweep, key)
        self._on_stage("written")
        return numbers

    def _estimates(self, specs: Sequence[JobSpec]) -> builtins.list[SpecEstimate]:
        """Of each job, where a service has said for which device and how much of it; else it finds out itself."""
        settings = self._database.settings()
        kind = settings.get("kind")
        if not kind:  # no service yet, or one that estimates nothing
            return [SpecEstimate()] * len(specs)
        known: dict[str, SpecEstimate] = {}
        until = time.monotonic() + _ESTIMATE_SECONDS
        for spec in specs:
            if spec.likeness in known:
                continue
            if spec.is_script or spec.memory is not None:
                if spec.memory is not None and spec.memory > settings["capacity"]:
                    raise ValueError(too_large(spec, spec.memory, settings["capacity"]))
                known[spec.likeness] = _without_trace(spec)
            elif time.monotonic() > until:
                known[spec.likeness] = SpecEstimate()  # the service does it
            else:
                known[spec.likeness] = self._estimator.estimate(spec, kind, settings["capacity"], settings["factor"])
        return [known[spec.likeness] for spec in specs]

    def list(self, state: str | None = None, sweep: int | None = None) -> builtins.list[JobRecord]:
        """All jobs, or those in a state, or of the sweep that began with job `sweep`."""
        if state is not None and state not in [each.value for each in JobState]:
            raise ValueError(f"a state is one of {', '.join(each.value for each in JobState)}, got {state!r}")
        where, values = ["1"], builtins.list[Any]()
        for name, value in (("state", state), ("sweep", sweep)):
            if value is not None:
                where.append(f"{name} = ?")
                values.append(value)
        return self._database.select(" AND ".join(where), values)

    def show(self, number: int) -> JobRecord:
        """One job. ValueError where there is none of this number."""
        return self._database.get(number)

    def wait(self, numbers: Sequence[int] | None = None, timeout: float | None = None) -> builtins.list[JobRecord]:
        """Until these jobs, or all that are there now, have ended. TimeoutError where they have not in time."""
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout must be a number of seconds, got nan")
        wanted = [job.number for job in self.list()] if numbers is None else builtins.list(numbers)
        deadline = None if timeout is None else time.monotonic() + timeout
        pause, left = _LOOK_SECONDS[0], wanted
        while True:
            left = [number for number in left if not self.show(number).state.is_over]
            if not left:
                return [self.show(number) for number in wanted]
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"jobs {left[:10]} have not ended within {timeout:g} s: gnnsys jobs serve runs them")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS[1])

    def cancel(self, numbers: int | Sequence[int]) -> builtins.list[JobState]:
        """Jobs that wait are cancelled at once, those that run as soon as the service sees it. Their states now.

        All of them or none: a ValueError where there is no job of one of these numbers.
        """
        each = [numbers] if isinstance(numbers, int) else builtins.list(numbers)
        self._database.cancel(each)
        states = {job.number: job.state for job in self._database.numbered(each)}
        return [states[number] for number in each]

    def logs(self, number: int) -> str:
        """What a job has printed so far."""
        self.show(number)
        try:
            return self.folder.log(number).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        self._estimator.close()
        self._database.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _without_trace(spec: JobSpec) -> SpecEstimate:
    """What is known of a job that nobody has traced: what was stated, or that a script cannot be."""
    if spec.memory is not None:
        return SpecEstimate(num_bytes=spec.memory, how="stated")
    return SpecEstimate(how="unknown") if spec.is_script else SpecEstimate()
