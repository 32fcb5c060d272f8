"""Which jobs start now, and how one starts: its start is written down with the process that will run it, then that
process is told to run it."""

from __future__ import annotations

import math
from dataclasses import replace

from gnnsys.jobs.job_memory import too_large
from gnnsys.jobs.job_record import JobRecord
from gnnsys.jobs.pace_keeper import PaceKeeper
from gnnsys.jobs.policies import Policy, WaitingJob
from gnnsys.jobs.running_job import RunningJob
from gnnsys.jobs.script_process import ScriptProcess
from gnnsys.jobs.served_queue import ServedQueue
from gnnsys.jobs.shared_device import SharedDevice
from gnnsys.jobs.waiting_list import arrival, list_waiting
from gnnsys.jobs.worker_pool import WorkerPool
from gnnsys.jobs.worker_process import WorkerProcess


class JobStarter:
    """Asks `policy`, and starts what it says in a worker of `pool` or as a script."""

    def __init__(
        self, queue: ServedQueue, policy: Policy, pool: WorkerPool, shared: SharedDevice, paces: PaceKeeper
    ) -> None:
        self._queue, self._policy, self._pool = queue, policy, pool
        self._shared, self._paces = shared, paces

    def start_jobs(self) -> None:
        queue = self._queue
        if not queue.queued or len(queue.running) >= queue.room.workers:
            return
        if not self._pool.can_take and not any(job.spec.is_script for job in queue.queued.values()):
            return
        waiting, refused = list_waiting(list(queue.queued.values()), queue.history, queue.room, queue.uses_estimates)
        for number, needed in refused.items():
            queue.refuse(number, too_large(queue.queued[number].spec, needed, queue.room.capacity))
        running = [job.waiting for job in queue.running.values()]
        chosen = self._policy(list(waiting.values()), running, queue.room, queue.clock.now())
        for number in sorted(chosen, key=lambda number: number not in queue.fresh):
            record = queue.queued[number]
            if not record.spec.is_script and not self._pool.can_take:
                break  # one will be ready soon
            if number in queue.fresh and not self._pool.can_take_fresh():
                continue
            queue.on_stage("chosen")
            self._start(record, waiting[number])

    def adopt(self, record: JobRecord) -> None:
        """A script that an earlier service has started and that may still run: it began before any job was due here."""
        assert record.process is not None
        waiting = WaitingJob(
            number=record.number, memory=record.reserved or 0, submitted=arrival(record), is_alone=record.is_alone,
            kind=record.kind, started=-math.inf,
        )  # fmt: skip
        self._add(record, record.attempt, ScriptProcess(record.process), waiting)

    def _start(self, record: JobRecord, waiting: WaitingJob) -> None:
        queue = self._queue
        self._shared.free_for([*(job.waiting for job in queue.running.values()), waiting])
        runner: WorkerProcess | ScriptProcess
        if record.spec.is_script:
            runner = ScriptProcess.start(self._shared.script_environment(waiting.memory))
        else:
            runner = self._pool.take(is_fresh=record.number in queue.fresh)
        attempt = None
        try:
            if runner.identity is not None:
                attempt = queue.database.start(record.number, runner.identity, waiting.memory, queue.model)
        finally:
            if attempt is None:  # it was cancelled meanwhile, or nothing can be written
                self._untake(runner)
        if attempt is None:
            queue.reread(record.number)
            return
        queue.on_stage("start written")
        job = self._add(record, attempt, runner, replace(waiting, started=queue.clock.now()))
        self._order(job)
        queue.on_stage("ordered")

    def _add(
        self, record: JobRecord, attempt: int, runner: WorkerProcess | ScriptProcess, waiting: WaitingJob
    ) -> RunningJob:
        pace = self._paces.begin(record.number, "" if record.spec.is_script else record.kind)  # who tells no steps
        job = RunningJob(record, attempt, waiting, runner, pace)
        self._queue.add_running(job)
        return job

    def _order(self, job: RunningJob) -> None:
        """The process begins."""
        folder, memory, number = self._queue.folder, job.waiting.memory, job.record.number
        if isinstance(job.runner, ScriptProcess):
            job.runner.run(folder, job.record, job.attempt, self._queue.device, memory)
            return
        job.runner.send(
            {
                "do": "run", "job": list(job.key), "spec": job.record.spec.to_json(),
                "log": str(folder.log(number)),
                "results": str(folder.results(number)),
                "checkpoints": str(folder.checkpoints(number)),
                "cap": memory if self._queue.uses_estimates else self._queue.room.capacity,
            }
        )  # fmt: skip

    def _untake(self, runner: WorkerProcess | ScriptProcess) -> None:
        if isinstance(runner, ScriptProcess):
            runner.abandon()
        elif self._pool.is_warm:
            self._pool.put_back(runner)
        else:
            self._pool.lost(runner)
