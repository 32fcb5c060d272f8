"""The queue as its service knows it: who waits, who runs, and what those that have ended tell.

What this service changes it knows at once. What others have changed (jobs that were submitted or cancelled) is read
when the database says that something is new, and then only what is new: a queue of thousands of jobs is as quick as one
of ten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnsys.jobs.job_history import JobHistory
from gnnsys.jobs.job_record import JobRecord, JobState
from gnnsys.jobs.policies import Room, SharingRecord
from gnnsys.jobs.queue_clock import QueueClock
from gnnsys.jobs.queue_database import NOT_WRITTEN, QueueDatabase, sharing_setting
from gnnsys.jobs.queue_folder import QueueFolder
from gnnsys.jobs.running_job import RunningJob
from gnnsys.jobs.worker_process import WorkerProcess

STAGES = ("estimated", "chosen", "start written", "ordered", "end told", "end written")


class ServedQueue:
    """`queued` and `running` are by number. `device`, `room` and `uses_estimates` are those of the service.

    `model` says what device that is (`DeviceFacts.model`), `kind` by whose profile jobs are estimated. `on_stage(name)`
    is called at each of `STAGES`.
    """

    def __init__(
        self, folder: QueueFolder, device: str, model: str, kind: str, room: Room, uses_estimates: bool,
        on_stage: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.folder, self.device, self.model, self.kind, self.room = folder, device, model, kind, room
        self.uses_estimates, self.on_stage = uses_estimates, on_stage
        self.queued: dict[int, JobRecord] = {}
        self.running: dict[int, RunningJob] = {}
        self.fresh = set[int]()  # jobs that run again, in a process that has run no other
        self.clock, self.history = QueueClock(), JobHistory(model)
        self._database: QueueDatabase | None = None
        self._seen = -1
        self._told_factor = 0.0

    def open(self) -> None:
        database = QueueDatabase(self.folder.database)
        self.clock = QueueClock(database.clock())
        self._database = database  # which `close` writes the clock to: not before it is known
        self.queued, self._seen = {}, -1
        before = self.database.settings().get("kind")  # by whose profile the last service has estimated
        if before:
            self.database.name_device(self.model if before == self.kind else before)
        if self.kind and before and before != self.kind:
            self.database.forget_estimates()
        self.database.forget_measured(self.model)
        self.history = JobHistory(self.model, self.database.in_state(JobState.DONE))
        self._write_settings()

    def close(self) -> None:
        """Jobs that run in workers wait again, for the next service; scripts go on. Idempotent."""
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(*NOT_WRITTEN):
                for job in self.running.values():
                    if isinstance(job.runner, WorkerProcess):
                        database.requeue(*job.key)
                database.keep_clock(self.clock.now())
            database.close()
        self.running.clear()

    @property
    def database(self) -> QueueDatabase:
        if self._database is None:
            raise ValueError("this service is not running: call start(), or use it in a with block")
        return self._database

    def read_changes(self) -> Sequence[RunningJob]:
        """Reads what others have changed; the jobs that run and are to be cancelled."""
        version = self.database.data_version()
        if version == self._seen:
            return []
        waiting, ending, cancelling = set[int](), list[int](), list[RunningJob]()
        for number, state, is_cancelling in self.database.unended():
            if state is JobState.RUNNING:
                if is_cancelling and number in self.running:
                    cancelling.append(self.running[number])
            elif is_cancelling:
                ending.append(number)  # its process was lost after it was asked to end
            else:
                waiting.add(number)
        if ending:
            self.database.cancel(ending)
        for number in self.queued.keys() - waiting:
            del self.queued[number]
        self._add_waiting(self.database.numbered(waiting - self.queued.keys()))
        self._seen = version
        return cancelling

    def reread(self, *numbers: int) -> None:
        """After this service has changed a job."""
        for number in numbers:
            self.queued.pop(number, None)
        found = self.database.numbered(numbers)
        self._add_waiting([job for job in found if job.state is JobState.QUEUED and not job.is_cancelling])

    def _add_waiting(self, records: Sequence[JobRecord]) -> None:
        """Those that no service has seen have come now: that is written down first."""
        new = [job.number for job in records if job.arrived is None]
        now = self._keep_clock(new) if new else 0.0
        for job in records:
            self.queued[job.number] = job if job.arrived is not None else replace(job, arrived=now)

    def keep_clock(self) -> None:
        """Now and then: a service that is killed takes the last seconds of its clock along."""
        if self.queued and self.clock.is_to_be_kept():
            self._keep_clock()

    def _keep_clock(self, arrived: Sequence[int] = ()) -> float:
        now = self.clock.now()
        self.database.keep_clock(now, arrived)
        self.clock.was_kept(now)
        return now

    def refuse(self, number: int, error: str) -> None:
        """A job that waits fails without having run."""
        self.database.refuse([number], error)
        self.reread(number)

    def add_running(self, job: RunningJob) -> None:
        self.running[job.record.number] = job
        self.queued.pop(job.record.number, None)
        self.company_changed()

    def remove_running(self, job: RunningJob) -> None:
        """Its end is written down."""
        del self.running[job.record.number]
        self.reread(job.record.number)
        self.company_changed()

    def company_changed(self) -> None:
        """Others run beside these jobs than before: their speeds are measured anew."""
        for job in self.running.values():
            job.pace.begin_again()
            job.had_company |= len(self.running) > 1

    def remember(self, number: int) -> None:
        """A job has ended well."""
        self.history.add(self.database.get(number))
        if self.history.factor != self._told_factor:
            self._write_settings()

    def sharing_record(self) -> SharingRecord:
        """Which jobs gain nothing by running together on this device, as services before have found."""
        told = self.database.settings().get(sharing_setting(self.model))
        return SharingRecord() if told is None else SharingRecord.from_json(told)

    def keep_sharing_record(self, record: SharingRecord) -> None:
        self.database.set({sharing_setting(self.model): record.as_json()})

    def _write_settings(self) -> None:
        """What `submit` needs to refuse what does not fit."""
        self._told_factor = self.history.factor
        self.database.set(
            {
                "kind": self.kind,
                "capacity": self.room.capacity,
                "factor": self._told_factor,
            }
        )
