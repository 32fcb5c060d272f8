"""Estimates function jobs for who submits them, in a process of its own: a user's function runs there, and may end it.

It is a worker, as a service has them: it finds the modules that are on disk now, not those of a notebook that is old.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

from gnnsys.jobs.job_record import SpecEstimate
from gnnsys.jobs.job_spec import JobSpec
from gnnsys.jobs.worker_process import WorkerProcess, ending_words

_log = logging.getLogger(__name__)
ESTIMATE_SECONDS = 300.0  # a function that takes longer is run alone
_START_SECONDS = 300.0  # to import torch, on a machine that is far too busy
_LOOK_SECONDS = 0.5
_STANDARD_ERROR = 2


class SubmitEstimator:
    """Its process is started for the first estimate and stays for the next ones. `close` ends it, and so does whatever
    forgets this object."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._forgotten: weakref.finalize[..., Any] | None = None
        self._told: list[Mapping[str, Any]] = []  # answers that nobody has waited for yet

    def estimate(self, spec: JobSpec, kind: str, capacity: int, factor: float) -> SpecEstimate:
        """For a device of this kind. ValueError where nobody could call it, or where it is too large."""
        try:
            found, refusal = self._ask(spec, {"kind": kind, "capacity": capacity, "factor": factor})
        except (ChildProcessError, TimeoutError) as error:  # this machine may have no room for it
            self.close()
            _log.warning("%s is left to the service to estimate: %s", spec.target, error)
            return SpecEstimate()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if refusal:
            raise ValueError(refusal)
        if found.why:
            _log.warning("%s will run alone, its memory was not to be estimated: %s", spec.target, found.why)
        return found

    def close(self) -> int:
        """Idempotent; the exit code of the process."""
        worker, self._worker = self._worker, None
        self._told.clear()
        if self._forgotten is not None:
            self._forgotten.detach()
        return 0 if worker is None else _end(worker)

    def _ask(self, spec: JobSpec, of_device: Mapping[str, Any]) -> tuple[SpecEstimate, str]:
        if self._worker is not None and self._await(self._worker, "ready", _START_SECONDS) is None:
            self.close()  # the last function has left something running in it
        if self._worker is None:
            self._worker = WorkerProcess("cpu", 1, _STANDARD_ERROR, {})
            self._forgotten = weakref.finalize(self, _end, self._worker)
            if self._await(self._worker, "ready", _START_SECONDS) is None:
                raise ChildProcessError(f"the process that estimates jobs ended {ending_words(self.close())}")
        self._worker.send({"do": "estimate", "number": 0, "spec": spec.to_json(), **of_device})
        try:
            answer = self._await(self._worker, "estimate", ESTIMATE_SECONDS)
        except TimeoutError:
            self.close()
            return SpecEstimate(how="unknown", why=f"that takes longer than {ESTIMATE_SECONDS:g} s"), ""
        if answer is None:
            return SpecEstimate(how="unknown", why=f"it ended its process {ending_words(self.close())}"), ""
        return SpecEstimate(**answer["found"]), str(answer["refusal"])

    def _await(self, worker: WorkerProcess, wanted: str, seconds: float) -> Mapping[str, Any] | None:
        """The next answer of this kind; None where the process ends without one. TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            while self._told:
                answer = self._told.pop(0)
                if answer["did"] == wanted:
                    return answer
                if answer["did"] == "leave":
                    return None
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"the process that estimates jobs does nothing for {seconds:g} s: try again")
            wait([worker.fileno()], min(left, _LOOK_SECONDS))
            is_gone = worker.has_ended  # though a process that the function has started may hold the pipe
            answers, has_ended = worker.receive()
            self._told += answers
            if not answers and (is_gone or has_ended):
                return None


def _end(worker: WorkerProcess) -> int:
    """Its exit code."""
    if not worker.has_ended:
        worker.kill()
    return worker.close()
