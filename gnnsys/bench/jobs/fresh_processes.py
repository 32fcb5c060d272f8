"""Functions called in processes that have run nothing before, several at a time as far as a device has room.

What torch reserves depends on what a process had before: so each job is measured in one of its own. They are forked
from a process that has imported torch and has not touched the device. torch-geometric takes long to import too, but it
imports what else it finds installed, and some of that makes the device unusable in forks: that is tried, and left out.
"""

from __future__ import annotations

import atexit
import contextlib
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
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from gnnsys.bench.case import NotHere
from gnnsys.bench.jobs.imports_off_device import LIST

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
        start_forking()  # once, and not by each thread
        self._lock, self._running, self._has_ended = threading.Lock(), set[BaseProcess](), False

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns, or the error that it raises; RuntimeError where its process ends without a word."""
        context = get_context("forkserver")
        start_forking()
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
def start_forking() -> list[str]:
    """Starts the process that others are forked from, and lists what that imports beside this package: of PyG whatever
    does not touch the device."""
    os.environ.update(_LOOKS_ONLY)  # the process that is forked from has what this one has
    names: list[str] = []
    descriptor, file_name = tempfile.mkstemp(prefix="gnnsys-imports-", suffix=".json")
    atexit.register(Path(file_name).unlink, missing_ok=True)
    if importlib.util.find_spec("torch_geometric") is not None:
        names = _names_told(_PYG)
        if names and names[-1] != _PYG:
            Path(file_name).write_text(json.dumps(names))
            names = _names_told("--listed", file_name)
    with os.fdopen(descriptor, "w") as file:
        file.truncate()
        json.dump(names, file)
    os.environ[LIST] = file_name
    try:
        forkserver.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
    finally:
        del os.environ[LIST]  # no other process is to import them
    return names


def _names_told(*words: str) -> list[str]:
    """What `imports_off_device` prints; nothing where it does not come to its end."""
    command = [sys.executable, "-m", _TRIAL, *words]
    with contextlib.suppress(subprocess.SubprocessError, ValueError, IndexError):
        tried = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_SECONDS, check=True)
        return [str(name) for name in json.loads(tried.stdout.splitlines()[-1])]
    return []


def _call(answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        said = function(*args)
    except NotHere as error:
        said = error
    except Exception as error:
        said = RuntimeError(f"{type(error).__name__}: {error}")
    answer.send(said)
    answer.close()
