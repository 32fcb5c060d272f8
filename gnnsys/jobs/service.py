"""The service of a queue: one loop in one thread, which listens, writes down ends, estimates, and starts jobs.

What must not be lost is in the database before it is acted on: a job is told to run after its start is written with the
process that will run it, and its worker is free after its end is written. So a service that is killed anywhere leaves
jobs that wait, jobs whose process is known, and jobs that have ended.

`served_queue` is what is known of the queue; `job_estimator`, `job_starter` and `job_ender` do what their names say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from gnnsys.jobs.device_facts import DeviceFacts
from gnnsys.jobs.job_ender import JobEnder
from gnnsys.jobs.job_estimator import JobEstimator
from gnnsys.jobs.job_record import JobState, JobTimes
from gnnsys.jobs.job_starter import JobStarter
from gnnsys.jobs.pace_keeper import PaceKeeper
from gnnsys.jobs.policies import ContinuousPolicy, Policy, Room, SharingWatch, find_policy
from gnnsys.jobs.queue_database import NOT_WRITTEN
from gnnsys.jobs.queue_folder import QueueFolder
from gnnsys.jobs.script_process import ScriptProcess
from gnnsys.jobs.served_queue import ServedQueue
from gnnsys.jobs.shared_device import SharedDevice
from gnnsys.jobs.sharing_hook import SharingJudge
from gnnsys.jobs.worker_pool import WorkerPool
from gnnsys.jobs.worker_process import WorkerProcess
from gnnsys.observe import num_usable_cores, parse_size

_log = logging.getLogger(__name__)
_REFUSAL = "{folder} has a service already ({other}): end that one, or give this one another folder"
_TURN_SECONDS = 0.1
_KILL_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # between two looks for processes that are stopped
_DISK_SECONDS = 1.0  # between two tries to write to a full disk


class JobService:
    """Owns a queue's folder from `start` to `close`, or as a `with` block.

    `device` is "cpu" or "cuda"; `capacity` in bytes or as "26G" is what jobs may take of it together (default: most of
    it). `workers` is how many run at a time; where it is not given `DeviceFacts.choose_workers` says it, and with
    another policy than the default or without estimates it is two. `is_warm=False` starts a process per job. With
    `uses_estimates=False` jobs start whatever they take. `policy` is a name of `find_policy`, or a function. Jobs that
    gain nothing by running together are parted, unless `is_judged=False`. Where workers are warm, what jobs ask
    `shared_graph` for is in memory once for all of them, unless `shares_graphs=False`. `device_sharing` is "mps",
    "slices" or "auto" (`start_sharing`); None leaves it to who started this process. `on_stage(name)` is called at each
    of `served_queue.STAGES`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, device: str = "cpu", capacity: int | str | None = None,
        workers: int | None = None, policy: Policy | str = "continuous", is_warm: bool = True,
        threads: int | None = None, uses_estimates: bool = True, sharing: SharingJudge | None = None,
        is_judged: bool = True, shares_graphs: bool | None = None, device_sharing: str | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:  # fmt: skip
        for name, value in (("workers", workers), ("threads", threads)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
        if device != "cpu" and not device.startswith("cuda"):
            raise ValueError(f"device must be cpu or cuda, got {device!r}")
        self.folder, self.device = QueueFolder(folder), "cuda:0" if device == "cuda" else device
        wanted = None if capacity is None else parse_size(capacity)
        facts, cores = DeviceFacts.ask(self.device), num_usable_cores()
        if workers is None:
            workers = facts.choose_workers(cores) if policy == "continuous" and uses_estimates else 2
        self.room = Room(capacity=facts.choose_capacity(wanted, workers), workers=workers)
        kind, self._said = facts.kind() if uses_estimates else ("", "")
        self._watch = SharingWatch()
        judge = sharing or (self._watch if is_judged and workers > 1 else None)
        self._paces = PaceKeeper(judge)
        if policy == "continuous" and judge is self._watch:
            chosen: Policy = ContinuousPolicy(pays=self._watch.pays)
        else:
            chosen = find_policy(policy) if isinstance(policy, str) else policy
        self.folder.make_rooms()
        log = self.folder.path / "workers.log"
        self.pool = WorkerPool(workers, self.device, threads or max(1, cores // workers), log, is_warm)
        shares_graphs = is_warm if shares_graphs is None else shares_graphs
        self._queue = ServedQueue(
            self.folder, self.device, facts.model, kind, self.room, uses_estimates, on_stage
        )  # fmt: skip
        self._shared = SharedDevice(self.folder.path, self.device, self.room, device_sharing, shares_graphs)
        self._estimator = JobEstimator(self._queue, log)
        self._starter = JobStarter(self._queue, chosen, self.pool, self._shared, self._paces)
        self._ender = JobEnder(self._queue, self._shared)
        self._disk_at = self._look_at = 0.0
        self._is_full = False

    # -- its life

    def start(self) -> None:
        """Takes the folder, and goes on from what a service before has left. ValueError where another one has it."""
        from gnnsys.checkpoint import FolderLock

        self._lock = FolderLock(self.folder.path, secrets.token_hex(8), _REFUSAL, is_strict=True)
        self._lock.take()
        try:
            self._queue.open()
            self._watch.record = self._queue.sharing_record()
            if self._said:
                _log.warning("%s", self._said)
            self._recover()
            self._shared.start()
            self._begin_workers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers. Jobs that run in them wait again, for the next service; scripts go on. Idempotent."""
        self._estimator.pool.close()
        self.pool.close()
        self._shared.close()
        self._queue.close()
        self._lock.close()

    def __enter__(self) -> JobService:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _recover(self) -> None:
        """Jobs that ran when the last service ended: scripts are found again, all else waits once more."""
        for record in self._queue.database.in_state(JobState.RUNNING):
            assert record.process is not None
            if record.spec.is_script:
                self._starter.adopt(record)
            elif record.process.end(_KILL_SECONDS):
                self._queue.database.requeue(record.number, record.attempt)
            else:
                raise ChildProcessError(f"process {record.process.pid} of job {record.number} does not end: kill it")

    def _begin_workers(self) -> None:
        """As many as are missing, with what they need to know of the device and of graphs."""
        self.pool.environment = self._shared.worker_environment()
        self._estimator.pool.environment = self._shared.estimator_environment()
        self.pool.fill()

    # -- its loop

    def run_until_empty(self, timeout: float | None = None, stop: threading.Event | None = None) -> list[JobTimes]:
        """Runs until no job waits or runs, or `stop` is set; those that have ended meanwhile, by number."""
        queue = self._queue
        before = queue.database.endings().keys()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.turn()
            if self.is_empty or (stop is not None and stop.is_set()):
                break
            if deadline is not None and time.monotonic() > deadline:
                left = [*queue.running, *queue.queued]
                raise TimeoutError(f"jobs {left[:10]} have not ended within {timeout:g} s")
        return [job.times for job in queue.database.select() if job.state.is_over and job.number not in before]

    @property
    def is_empty(self) -> bool:
        """Whether no job waited or ran after the last turn. On a full disk not all that wait are known."""
        return not self._is_full and not self._queue.running and not self._queue.queued

    def serve(self, stop: threading.Event) -> None:
        """Runs until `stop` is set."""
        while not stop.is_set():
            self.turn()

    def turn(self, seconds: float = _TURN_SECONDS) -> None:
        """One round of the loop: waits for an answer, at most so long, and does what is to be done."""
        self._listen(seconds)
        if time.monotonic() < self._disk_at:
            return
        try:
            if self._shared.revive(self._kill_workers):
                self._begin_workers()
            for job in self._queue.read_changes():
                self._ender.cancel(job)
            self._write_ends()
            self._queue.keep_clock()
            self._estimator.begin()
            self.pool.fill()
            self._starter.start_jobs()
            self._judge()
            self._is_full = False
        except NOT_WRITTEN as error:  # nothing has changed: it is tried again
            if not self._is_full:
                _log.error("%s", error)
            self._is_full, self._disk_at = True, time.monotonic() + _DISK_SECONDS

    def _write_ends(self) -> None:
        """Writes down what has come of jobs. A worker is free only then."""
        is_looking = time.monotonic() >= self._look_at
        if is_looking:
            self._look_at = time.monotonic() + _LOOK_SECONDS
        for job in list(self._queue.running.values()):
            if isinstance(job.runner, ScriptProcess) and job.ending is None:
                job.ending = self._ender.script_ending(job, job.runner)
            elif isinstance(job.runner, WorkerProcess) and job.ending is None and job.runner.has_ended:
                self._hear_all(job.runner, job.runner.receive()[0])
                self._lost(job.runner)
            if job.ending is None:
                self._ender.kill_where_due(job)
                if is_looking:
                    self._ender.continue_where_stopped(job)
                continue
            self._ender.write(job, job.ending)
            self._queue.remove_running(job)
            if isinstance(job.runner, WorkerProcess) and self.pool.is_taken(job.runner):
                self.pool.give_back(job.runner)
            self._queue.on_stage("end written")

    def _judge(self) -> None:
        """Parts jobs that gain nothing by running together."""
        before, running = self._watch.record, self._queue.running
        changed = self._paces.change([job.pace for job in running.values()])
        for pace in changed:
            job = running[pace.number]
            if isinstance(job.runner, WorkerProcess):  # a script cannot be paused between two steps
                job.runner.send({"do": "pause" if pace.is_paused else "go_on", "job": list(job.key)})
        if changed:
            self._queue.company_changed()
        if self._watch.record is not before:
            self._queue.keep_sharing_record(self._watch.record)

    def _kill_workers(self) -> None:
        self._estimator.begin_again()
        for worker in self.pool.everyone():
            worker.kill()

    # -- what workers say

    def _listen(self, seconds: float) -> None:
        workers = {worker.fileno(): worker for worker in [*self.pool.everyone(), *self._estimator.pool.everyone()]}
        if any(job.ending is not None for job in self._queue.running.values()) and not self._is_full:
            seconds = 0.0
        if not workers:
            time.sleep(seconds)
            return
        for number in wait(list(workers), seconds):
            worker = workers[number]  # type: ignore[index]
            answers, has_ended = worker.receive()
            self._hear_all(worker, answers)
            if has_ended:
                self._lost(worker)
        for worker in self.pool.waiting():
            if worker.has_ended:  # though a child of its last job may hold the pipe
                self._lost(worker)

    def _hear_all(self, worker: WorkerProcess, answers: Sequence[Mapping[str, Any]]) -> None:
        for answer in answers:
            try:
                self._hear(worker, answer)
            except (KeyError, IndexError, TypeError, ValueError):  # its job has written to the pipe
                _log.warning("worker %d is replaced: what it says is no answer: %.200r", worker.pid, answer)
                worker.kill()

    def _hear(self, worker: WorkerProcess, answer: Mapping[str, Any]) -> None:
        if answer["did"] == "ready":
            self.pool.ready(worker)
            self._estimator.pool.ready(worker)
        elif answer["did"] == "leave":
            _log.info("worker %d is replaced: %s", worker.pid, answer["why"])
        elif answer["did"] == "estimate":
            self._estimator.told(worker, answer)
        else:
            self._hear_of_job(worker, answer)

    def _hear_of_job(self, worker: WorkerProcess, answer: Mapping[str, Any]) -> None:
        job = self._queue.running.get(answer["job"][0])
        if job is None or job.runner is not worker or list(job.key) != answer["job"]:
            return  # of an attempt that is over
        if answer["did"] == "step":
            job.pace.tell(int(answer["steps"]), float(answer["clock"]), float(answer["paused"]))
            if not job.has_stepped:
                with contextlib.suppress(*NOT_WRITTEN):  # the next step is written down instead
                    self._queue.database.stepped(*job.key, float(answer["at"]))
                    job.has_stepped = True
        elif answer["did"] == "end":
            if answer["outcome"] == "done" and not isinstance(answer["result"], dict):
                raise ValueError("a job that is done has results")
            self._queue.on_stage("end told")
            if answer["outcome"] == "device error":
                self._shared.error_seen()
            job.ending = answer

    def _lost(self, worker: WorkerProcess) -> None:
        """A worker has ended, by itself or by somebody."""
        if worker in self._estimator.pool.everyone():
            self._estimator.lost(worker)
            return
        code = self.pool.lost(worker)
        for job in self._queue.running.values():
            if job.runner is worker and job.ending is None:
                job.ending = {"outcome": "lost", "code": code}
