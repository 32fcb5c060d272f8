"""The process of a worker: `python -m gnnsys.jobs.work`, which a service starts.

It imports torch, makes the device warm, and runs one job after another as its input says. One thread reads orders, so
that a job can be cancelled or paused between two steps; it ends the process when the input closes.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnnsys.comm import end_with_parent
from gnnsys.jobs.fresh_state import FreshState
from gnnsys.jobs.graph_holder import GraphHolderLost
from gnnsys.jobs.job_memory import check_call, estimate_spec, has_profile, too_large
from gnnsys.jobs.job_record import SpecEstimate
from gnnsys.jobs.job_spec import JobSpec
from gnnsys.jobs.memory_cap import MemoryCap
from gnnsys.jobs.process_identity import adopt_orphans, kill_descendants
from gnnsys.jobs.queue_folder import NO_ROOM
from gnnsys.jobs.shared_graphs import check_holder, release_graphs
from gnnsys.jobs.train_job import JobCancelled, JobFiles, train

_TELL_SECONDS = 0.25  # between two messages about a job's pace
_WAIT_SECONDS = 3600.0
_MOST_NAMED = 5
_AGAIN = "gnnsys: the job failed in a process that had run other jobs. It runs once more in a fresh one."
_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class JobControl:
    """What the service wants of the job that runs: read between two steps."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._job: list[int] | None = None
        self._is_cancelled = self._is_paused = False

    def begin(self, job: list[int]) -> None:
        with self._condition:
            self._job, self._is_cancelled, self._is_paused = job, False, False

    def take(self, order: Mapping[str, Any]) -> None:
        """An order that names another job comes too late."""
        with self._condition:
            if order["job"] == self._job:
                self._is_cancelled |= order["do"] == "cancel"
                self._is_paused = order["do"] == "pause" or (self._is_paused and order["do"] != "go_on")
                self._condition.notify_all()

    def between_steps(self) -> float:
        """Waits while the job is paused; the seconds of that. Raises JobCancelled."""
        began = time.monotonic()
        with self._condition:
            while self._is_paused and not self._is_cancelled:
                self._condition.wait(_WAIT_SECONDS)
            if self._is_cancelled:
                raise JobCancelled
        return time.monotonic() - began


class JobWorker:
    """Runs orders in the main thread, and answers through `answers`."""

    def __init__(self, answers: int, device: str, threads: int) -> None:
        self._answers, self._device = answers, device
        self.control = JobControl()
        self.orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._threads = threads
        self._is_broken = False
        self._num_jobs = 0

    def tell(self, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        try:
            while data:  # a pipe takes large messages in pieces
                data = data[os.write(self._answers, data) :]
        except BrokenPipeError:  # the service has gone: what reads orders may not know it yet
            os._exit(0)

    def serve(self) -> int:
        """Called when the thread that reads orders is there: it is no leftover of a job."""
        warm(self._device, self._threads)
        self._fresh = FreshState(self._threads, release=_release_graphs)
        self.tell({"did": "ready"})
        while True:
            order = self.orders.get()
            run = {"run": self._run, "estimate": self._estimate}[order["do"]]
            contextvars.copy_context().run(run, order)
            why = "an error of the device" if self._is_broken else self._put_back()
            if why is not None:
                self.tell({"did": "leave", "why": why})
                return 0
            self._num_jobs += 1
            self.tell({"did": "ready"})

    def _put_back(self) -> str | None:
        """Why this process can run no other job; None if it is as it was when it was ready."""
        if (left := self._fresh.leftovers()) is not None:
            kill_descendants(os.getpid())
            return f"the job left {left} running"
        try:
            self._fresh.restore()
            changed = self._fresh.changes()
        except Exception as error:  # a mode or a limit that the job has left
            return f"what the job changed cannot be put back ({_one_line(error)})"
        return f"the job changed {', '.join(changed[:_MOST_NAMED])}" if changed else None

    def _estimate(self, order: Mapping[str, Any]) -> None:
        spec = JobSpec.from_json(order["spec"])
        found, refusal, needed = SpecEstimate(), "", 0
        factor, capacity = float(order["factor"]), int(order["capacity"])
        try:
            self._fresh.enter(spec.folder, spec.environment)
            check_call(spec)
            if has_profile(order["kind"]):
                found = estimate_spec(spec, order["kind"])
        except ValueError as error:
            refusal = " ".join(str(error).split())[:2000]
        except OSError as error:  # its folder is gone
            found = SpecEstimate(how="unknown", why=_one_line(error))
        if found.num_bytes is not None and found.how == "traced":
            needed = int(found.num_bytes * factor) + sum(found.graphs.values())
        if needed > capacity:
            refusal = too_large(spec, needed, capacity, order["kind"], factor)
        self.tell({"did": "estimate", "number": order["number"], "found": asdict(found), "refusal": refusal})

    def _run(self, order: Mapping[str, Any]) -> None:
        job, spec = list(order["job"]), JobSpec.from_json(order["spec"])
        kept = os.dup(1), os.dup(2)
        answer: dict[str, Any] = {"did": "end", "job": job}
        cap = MemoryCap(self._device, int(order["cap"]))
        try:
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            self._fresh.enter(spec.folder, spec.environment)
            self.control.begin(job)
            self.tell({"did": "begin", "job": job})
            with cap:
                answer |= self._outcome(job, spec, order)
            if self._num_jobs and answer["outcome"] == "failed":
                answer["is_used"] = True
                print(_AGAIN, file=sys.__stderr__)
        except OSError as error:  # the folder is gone, or the disk is full
            if "outcome" not in answer:
                lost = error.errno in NO_ROOM
                answer |= {"outcome": "lost" if lost else "failed", "code": 1, "error": _one_line(error)}
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # a job may have closed it
                    stream.flush()
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
        self.tell(answer | {"measured": cap.measured})

    def _outcome(self, job: list[int], spec: JobSpec, order: Mapping[str, Any]) -> dict[str, Any]:
        told, paused = 0.0, 0.0

        def on_step(steps: int) -> None:
            nonlocal told, paused
            now = time.monotonic()
            if now - told >= _TELL_SECONDS:
                at = {"at": time.time(), "clock": now}  # a clock that is set would make it slow for good
                self.tell({"did": "step", "job": job, "steps": steps, "paused": paused, **at})
                told = now
            paused += self.control.between_steps()
            check_holder()

        def on_wait() -> None:
            self.control.between_steps()

        files = JobFiles(results=Path(order["results"]), checkpoints=Path(order["checkpoints"]))
        try:
            return {"outcome": "done", "result": train(spec, self._device, files, on_step, on_wait)}
        except JobCancelled:
            return {"outcome": "cancelled"}
        except GraphHolderLost as error:
            return {"outcome": "lost", "code": 1, "error": _one_line(error)}
        except BaseException as error:  # KeyboardInterrupt and its like are of the job: no signal is meant for it
            with contextlib.suppress(Exception):  # a job may have closed its output
                traceback.print_exc()
            if isinstance(error, OSError) and error.errno in NO_ROOM:  # it goes on from its checkpoint
                return {"outcome": "lost", "code": 1, "error": _one_line(error)}
            traceback.clear_frames(error.__traceback__)  # which hold the job's tensors
            kind = "no memory" if is_out_of_memory(error) else "failed"
            if is_device_error(error):  # nothing more can be done with the device in this process
                kind, self._is_broken = "device error", True
            return {"outcome": kind, "error": _one_line(error)}


def _release_graphs() -> None:
    with contextlib.suppress(GraphHolderLost):
        release_graphs()


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # of a map that the cap has no room for
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def is_device_error(error: BaseException) -> bool:
    """An illegal address and its like: the process's context on the GPU is gone."""
    return isinstance(error, RuntimeError) and not is_out_of_memory(error) and "CUDA error" in str(error)


def warm(device: str, threads: int) -> None:
    """What the first job would wait for: imports, and on a GPU its context and cuBLAS."""
    import importlib

    import torch

    importlib.import_module("torch._dynamo")  # what the first optimizer of a process loads
    for name in ("planning", "checkpoint", "loader", "nn"):
        importlib.import_module(f"gnnsys.{name}")
    torch.set_num_threads(threads)
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if device != "cpu":
        torch.cuda.synchronize()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000]


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")  # a program that a job runs must not read orders
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    first = json.loads(source.readline() or b"{}")
    if not first:
        return 1
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not for the pipe
    if first["parent_death"]:
        end_with_parent(int(first["parent"]))
    os.environ.pop("PYTHONSAFEPATH", None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    adopt_orphans()
    worker = JobWorker(answers, first["device"], int(first["threads"]))

    def read() -> None:
        for line in source:
            order = json.loads(line)
            if order["do"] in ("run", "estimate"):
                worker.orders.put(order)
            else:
                worker.control.take(order)
        os._exit(0)

    threading.Thread(target=read, name="gnnsys-orders", daemon=True).start()
    return worker.serve()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
