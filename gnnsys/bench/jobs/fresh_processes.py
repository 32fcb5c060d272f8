"""Functions called in processes that have run nothing before, several at a time as far as a device has room.

What torch reserves depends on what a process had before: so each job is measured in one of its own. They are forked
from a process that has imported torch and has not touched the device. torch-geometric takes long to import too, but it
imports what else it finds installed, and some of that makes the device unusable in forks: what does is tried.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from gnnsys.bench.case import NotHere
from gnnsys.bench.jobs.import_listed import LIST

T = TypeVar("T")
MOST_AT_ONCE = 12
_IMPORTED = ["gnnsys.bench.jobs.estimates", "gnnsys.bench.jobs.import_listed"]
_PYG = "torch_geometric.nn"
_SECONDS, _END_SECONDS = 300.0, 10.0
_LOOKS_ONLY = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # so torch says whether there is a device without touching it
_TRIAL = "gnnsys.bench.jobs.imports_off_device"


class DeviceRoom:
    """Bytes of a device. Who asks for more than is left waits; who asks for more than there are is told so."""

    def __init__(self, num_bytes: int) -> None:
        self._all = self._left = num_bytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        if num_bytes > self._all:
            raise NotHere(f"{num_bytes / 1e9:.1f} GB are needed, and {self._all / 1e9:.1f} GB of the device are free")
        with self._changed:
            self._changed.wait_for(lambda: num_bytes <= self._left)
            self._left -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._left += num_bytes
                self._changed.notify_all()


class FreshProcesses:
    """Calls functions in processes, in as many threads as ask for it, until `end`."""

    def __init__(self) -> None:
        imported_before()  # once, and not by each thread
        self._lock, self._running, self._has_ended = threading.Lock(), set[BaseProcess](), False

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns, or the error that it raises; RuntimeError where its process ends without a word."""
        context = get_context("forkserver")
        imported_before()
        context.set_forkserver_preload(_IMPORTED)
        answers, there = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(there, function, args), daemon=True)
        with self._lock:
            if self._has_ended:
                raise RuntimeError("no process is started any more")
            process.start()
            self._running.add(process)
        there.close()
        with answers:
            try:
                said = answers.recv() if answers.poll(_SECONDS) else RuntimeError(f"no answer within {_SECONDS:g} s")
            except EOFError:
                process.join()
                said = RuntimeError(f"a process of {function.__name__} ended with {process.exitcode}")
        process.join(0.0 if isinstance(said, Exception) else _END_SECONDS)
        process.kill()
        process.join()
        with self._lock:
            self._running.discard(process)
        if isinstance(said, Exception):
            raise said
        return said  # type: ignore[no-any-return]

    def end(self) -> None:
        """Those that run now: who waits for one is told that it has ended, and no other one is started."""
        with self._lock:
            self._has_ended = True
            for process in self._running:
                process.kill()


def call_in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """In one process, as `FreshProcesses.call`."""
    return FreshProcesses().call(function, *args)


@functools.cache
def imported_before() -> list[str]:
    """What processes are forked with, beside this package: of PyG all that leaves the device alone."""
    os.environ.update(_LOOKS_ONLY)  # the process that is forked from has what this one has
    names: list[str] = []
    if importlib.util.find_spec("torch_geometric") is not None:
        tried = subprocess.run([sys.executable, "-m", _TRIAL, _PYG], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        names = json.loads(tried.stdout.splitlines()[-1]) if tried.returncode == 0 else []
    descriptor, file_name = tempfile.mkstemp(prefix="gnnsys-imports-", suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        json.dump(names, file)
    os.environ[LIST] = file_name
    atexit.register(Path(file_name).unlink, missing_ok=True)
    return names


def _call(answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        said = function(*args)
    except NotHere as error:
        said = error
    except Exception as error:
        said = RuntimeError(f"{type(error).__name__}: {error}")
    answer.send(said)
    answer.close()
