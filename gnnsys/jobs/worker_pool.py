"""The workers of a service: started, kept ready, and replaced where one ends.

Without `is_warm` there are none to keep: each job has a process of its own, which is what a user has without a queue.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from gnnsys.jobs.worker_process import WorkerProcess

_log = logging.getLogger(__name__)
_WITHIN_SECONDS = 600.0
_MAX_FAILURES = 3
_START_SECONDS = 300.0  # to import torch, on a machine that is far too busy


class WorkerPool:
    """`idle` are ready for a job. A worker that `take` returns is the caller's until `give_back` or `lost`."""

    def __init__(self, count: int, device: str, threads: int, log: Path, is_warm: bool) -> None:
        self.count, self.device, self.threads, self.is_warm = count, device, threads, is_warm
        self._log = log
        self.environment: Mapping[str, str] = {}  # of workers that are started from now on, beside the service's own
        self._starting: dict[WorkerProcess, float] = {}
        self.idle: list[WorkerProcess] = []
        self._taken: set[WorkerProcess] = set()
        self._proven: set[WorkerProcess] = set()  # that were ready once: what goes wrong later is of a job
        self._used: set[WorkerProcess] = set()  # that have run a job
        self._early: set[WorkerProcess] = set()  # taken, and ready again before the end of its job was written down
        self._failures: deque[float] = deque(maxlen=_MAX_FAILURES)

    def fill(self) -> None:
        """Starts as many as are missing."""
        now = time.monotonic()
        for worker, deadline in list(self._starting.items()):
            if now > deadline:
                del self._starting[worker]
                worker.close(0.0)
                self._failed(f"a worker was not ready within {_START_SECONDS:g} s")
        missing = self.count - len(self.idle) - len(self._starting) - len(self._taken)
        for _ in range(missing if self.is_warm else 0):
            self._starting[self.start()] = now + _START_SECONDS

    def shrink(self, least: int) -> None:
        """Ends those that nobody needs now, beyond `count`; `least` stay ready."""
        while self.idle and len(self.everyone()) > max(self.count, least):
            self.idle.pop().close()

    def start(self) -> WorkerProcess:
        with open(self._log, "ab") as log:
            return WorkerProcess(self.device, self.threads, log, self.environment)

    @property
    def can_take(self) -> bool:
        return bool(self.idle) if self.is_warm else len(self._taken) < self.count

    def take(self, *, is_fresh: bool = False) -> WorkerProcess:
        """One that has run a job, where there is one; with `is_fresh` one that has run none."""
        if self.is_warm:
            worker = next((each for each in self.idle if (each in self._used) != is_fresh), self.idle[-1])
            self.idle.remove(worker)
        else:
            worker = self.start()
        self._taken.add(worker)
        return worker

    def can_take_fresh(self) -> bool:
        """Whether a worker is ready that has run no job. If none will be soon, one that has run others makes room."""
        if not self.is_warm or any(each not in self._used for each in self.idle):
            return True
        if all(each in self._used for each in self._starting) and self.idle:
            self.lost(self.idle[-1])
        return False

    def is_taken(self, worker: WorkerProcess) -> bool:
        return worker in self._taken

    def everyone(self) -> list[WorkerProcess]:
        return [*self._starting, *self.idle, *self._taken]

    def waiting(self) -> list[WorkerProcess]:
        """Those that run no job."""
        return [*self._starting, *self.idle]

    def ready(self, worker: WorkerProcess) -> None:
        """It says that it is: for the first time, or after a job."""
        if worker in self._starting:
            del self._starting[worker]
            self._proven.add(worker)
            self.idle.append(worker)
        elif worker in self._taken:
            self._early.add(worker)

    def give_back(self, worker: WorkerProcess) -> None:
        """Its job has ended. It is ready for the next one when it says so."""
        self._used.add(worker)
        self._taken.discard(worker)
        if worker in self._early and self.is_warm:
            self._early.discard(worker)
            self.idle.append(worker)
        elif self.is_warm:
            self._starting[worker] = time.monotonic() + _START_SECONDS
        else:
            self._early.discard(worker)
            worker.close()

    def put_back(self, worker: WorkerProcess) -> None:
        """It was given nothing to do."""
        self._taken.discard(worker)
        self.idle.append(worker)

    def lost(self, worker: WorkerProcess) -> int:
        """It has ended, or has to; its exit code."""
        was_new = worker in self._starting and worker not in self._proven
        self._proven.discard(worker)
        self._used.discard(worker)
        self._early.discard(worker)
        self._starting.pop(worker, None)
        self._taken.discard(worker)
        if worker in self.idle:
            self.idle.remove(worker)
        ended_itself = worker.has_ended
        code = worker.close()
        if not ended_itself and code == -signal.SIGTERM:
            code = 1  # its job has closed the pipe: nobody but this service has sent a signal
        if was_new and code > 0:
            self._failed(f"a worker ended with exit code {code} before it was ready")
        return code

    def close(self) -> None:
        for worker in self.everyone():
            worker.kill()
        for worker in self.everyone():
            worker.close()
        self._starting.clear()
        self._taken.clear()
        self.idle.clear()

    def _failed(self, what: str) -> None:
        now = time.monotonic()
        if len(self._failures) == _MAX_FAILURES - 1 and now - self._failures[0] < _WITHIN_SECONDS:
            raise ChildProcessError(f"{what}, {_MAX_FAILURES} times: {self._log} says why")
        self._failures.append(now)
        _log.warning("%s; another one is started", what)
