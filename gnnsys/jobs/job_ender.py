"""What has come of a job, and what is written down of it: an end, or that it waits once more."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from gnnsys.jobs.job_record import JobRecord, JobState
from gnnsys.jobs.running_job import RunningJob
from gnnsys.jobs.script_process import ScriptProcess
from gnnsys.jobs.served_queue import ServedQueue
from gnnsys.jobs.shared_device import SharedDevice
from gnnsys.jobs.worker_process import ending_words
from gnnsys.observe import format_size

_CANCEL_SECONDS = 10.0  # for a job that was asked to end
_KILL_SECONDS = 10.0
_MOST_CRASHES, _MOST_KILLS = 3, 10  # of a job's process, by itself and by somebody
_KILLS = (-9, -15)
_STOPPED_SECONDS, _MOST_STOPS = 10.0, 3  # a process that was stopped waits so long, and is continued so often

_log = logging.getLogger(__name__)


class JobEnder:
    """Asks jobs to end, and writes down how they did."""

    def __init__(self, queue: ServedQueue, shared: SharedDevice) -> None:
        self._queue, self._shared = queue, shared

    def cancel(self, job: RunningJob) -> None:
        """Asked first; killed where it has not ended in time."""
        if job.kill_at is not None:
            return
        job.kill_at = time.monotonic() + _CANCEL_SECONDS
        if isinstance(job.runner, ScriptProcess):
            job.runner.terminate()
        else:
            job.runner.send({"do": "cancel", "job": list(job.key)})

    def kill_where_due(self, job: RunningJob) -> None:
        """One that was asked to end, and has not."""
        now = time.monotonic()
        if job.kill_at is None or now <= job.kill_at:
            return
        if not isinstance(job.runner, ScriptProcess):
            self._shared.let_go(job.runner.pid)
        job.runner.kill()
        job.kill_at = now + _KILL_SECONDS

    def continue_where_stopped(self, job: RunningJob) -> None:
        """Continues a job's process that was stopped (SIGSTOP); ends the job if that happens too often."""
        process, now = job.runner.stopped(), time.monotonic()
        if process is None:
            job.stopped_at = None
        elif job.stopped_at is None:
            job.stopped_at = now
        elif now - job.stopped_at >= _STOPPED_SECONDS:
            job.stopped_at, job.num_stops = None, job.num_stops + 1
            what = f"process {process.pid} of job {job.record.number} was stopped (SIGSTOP)"
            if job.num_stops > _MOST_STOPS:
                _log.warning("%s again, and is ended", what)
                job.runner.kill()
                error = f"its process was stopped (SIGSTOP) {job.num_stops} times and continued {_MOST_STOPS} times"
                job.ending = {"outcome": "failed", "error": f"{error}: cancel a job to make room"}
            else:
                _log.warning("%s for %g s, and goes on: cancel a job to make room", what, _STOPPED_SECONDS)
                process.go_on()

    def script_ending(self, job: RunningJob, script: ScriptProcess) -> Mapping[str, Any] | None:
        """In the words of a worker; None while it runs."""
        ending = script.ending(self._queue.folder, *job.key)
        if ending is None:
            return None
        self._queue.on_stage("end told")
        if ending.code is None:
            return {"outcome": "lost", "code": -9}
        if ending.code == 0 and not ending.error:
            return {"outcome": "done", "result": ending.result, "measured": ending.measured}
        error = ending.error or f"the script ended with exit code {ending.code}"
        return {"outcome": "failed", "error": error, "measured": ending.measured, "result": ending.result}

    def write(self, job: RunningJob, ending: Mapping[str, Any]) -> None:
        """QueueDiskFull where that cannot be done now."""
        outcome, measured, database = str(ending["outcome"]), ending.get("measured"), self._queue.database
        record, is_alone = database.get(job.record.number), job.waiting.is_alone
        if record.is_cancelling and outcome != "done":
            self._finish(job, JobState.CANCELLED, measured=measured)
        elif outcome == "done":
            self._finish(job, JobState.DONE, result=ending["result"], measured=measured)
        elif outcome == "no memory" and not is_alone:
            database.requeue(*job.key, is_alone=True, measured=measured)
            self._queue.fresh.add(job.record.number)
        elif outcome == "failed" and ending.get("is_used"):
            database.requeue(*job.key)
            self._queue.fresh.add(job.record.number)
        elif outcome == "device error" and not is_alone and job.had_company and self._shared.has_mps:
            database.requeue(*job.key, is_alone=True)  # its own doing, or a neighbour's: alone, that is known
        elif outcome == "lost":
            self._write_lost(job, record, int(ending["code"]), str(ending.get("error", "")))
        else:
            error = str(ending.get("error", ""))
            if outcome == "no memory":
                error = f"out of memory alone, with all of {format_size(self._queue.room.capacity)}: {error}"
            self._finish(job, JobState.FAILED, error=error, measured=measured, result=ending.get("result"))

    def _write_lost(self, job: RunningJob, record: JobRecord, code: int, why: str) -> None:
        most = _MOST_KILLS if code in _KILLS else _MOST_CRASHES
        if record.num_lost + 1 < most:
            self._queue.database.requeue(*job.key, is_lost=True)
            return
        what = f"by {why}" if why else ending_words(code)
        error = f"its process died {record.num_lost + 1} times, the last time {what}: see gnnsys jobs logs"
        self._finish(job, JobState.FAILED, error=error)

    def _finish(self, job: RunningJob, state: JobState, **what: Any) -> None:
        number = job.record.number
        self._queue.fresh.discard(number)
        if self._queue.database.finish(*job.key, state, **what):
            self._queue.folder.forget(number, keeps_checkpoints=state is JobState.FAILED)  # to go on with by hand
            if state is JobState.DONE:
                self._queue.remember(number)
