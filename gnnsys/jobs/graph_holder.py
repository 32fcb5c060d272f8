"""The process that keeps graphs for jobs, seen from the service that starts it; `holder_process` is the process itself.

It has its own context on the device, so that no job's failure takes the graphs along, and it ends when the pipe to it
closes, which the kernel sees to even when the service is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import gnnsys
from gnnsys.comm import close_in_forks
from gnnsys.jobs.holder_messages import receive, send, short_path

HOLDER, JOB_DEVICE = "GNNSYS_GRAPH_HOLDER", "GNNSYS_JOB_DEVICE"  # in the environment of jobs
_SOCKET = "graphs.socket"
_START_SECONDS = 120.0
_ANSWER_SECONDS = 60.0
_END_SECONDS = 10.0
_LISTEN_SECONDS = 2.0  # between a name and who listens to it


class GraphHolderLost(RuntimeError):
    """The process that keeps the graphs of a queue has ended, and what it kept with it."""


class HeldGraph(NamedTuple):
    """A graph that is kept: its bytes on `device` and the processes that use it now."""

    name: str
    device: str
    bytes: int
    is_ready: bool
    users: tuple[int, ...]


class GraphHolder:
    """Keeps every graph once for all jobs of a queue. The constructor returns at once; jobs that ask wait for it.

    `folder` is the queue's, of mode 700. `device`: where jobs train. `environment` is what makes a process one of those
    that share the device (`DeviceSharing.environment()`): the holder must be one, too.
    """

    def __init__(
        self, folder: Path | str, *, device: str = "cpu", environment: Mapping[str, str] | None = None
    ) -> None:
        self._path = Path(folder).resolve() / _SOCKET
        self._path.unlink(missing_ok=True)  # of a holder that was killed: a folder has one service
        self._device = device
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gnnsys.jobs.holder_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipes: list[Any] = [self._process.stdin, self._process.stdout]
        close_in_forks(self._pipes)
        self._connection: socket.socket | None = None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; whoever asks is told
            self._process.stdin.write(json.dumps({"socket": str(self._path), "device": device}).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs. Jobs that have a graph of one that does not are to be ended and begun again."""
        return self._process.poll() is None

    def environment(self, device: str | None = None) -> dict[str, str]:
        """For processes in which `shared_graph` is to find this holder. `device`: another one than where jobs train,
        "cpu" for a process that estimates."""
        return {HOLDER: str(self._path), JOB_DEVICE: self._device if device is None else device}

    def graphs(self) -> list[HeldGraph]:
        """What is kept, or being made (`is_ready` is False then), in the order in which it was first asked for."""
        listed = self._ask({"do": "graphs"})["graphs"]
        return [HeldGraph(**{**each, "users": tuple(each["users"])}) for each in listed]

    def drop(self, names: Iterable[str] | None = None) -> list[str]:
        """Frees graphs that nobody uses, all of them or those named; the names of those that were freed. Nothing is
        freed without this, so that the next job finds the graph of the last one."""
        return list(self._ask({"do": "drop", "names": None if names is None else list(names)})["dropped"])

    def close(self) -> None:
        """Ends the process, and with it every graph. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self._pipes.clear()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._path.unlink(missing_ok=True)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._connection is None:
                self._await_start()
                self._connection = connect(self._path, _ANSWER_SECONDS)
            send(self._connection, message)
            answer, _ = receive(self._connection, _ANSWER_SECONDS)
        except OSError as error:
            raise GraphHolderLost(lost(str(self._path), error)) from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _await_start(self) -> None:
        """Until it listens; RuntimeError where it says that it cannot, or nothing."""
        assert self._process.stdout is not None
        if not wait([self._process.stdout.fileno()], _START_SECONDS):
            raise RuntimeError(f"the holder of graphs (process {self.pid}) did not start within {_START_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(_END_SECONDS)
            raise GraphHolderLost(
                f"the holder of graphs ended with {code} before it listened; what it printed says why"
            )
        if "error" in (said := json.loads(line)):
            raise RuntimeError(f"the holder of graphs did not start: {said['error']}")


def connect(path: Path, timeout: float) -> socket.socket:
    """A connection to a holder, which may be about to listen. OSError where there is none."""
    end, refused_end = time.monotonic() + timeout, time.monotonic() + min(timeout, _LISTEN_SECONDS)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            with short_path(path) as name:
                connection.connect(name)
            return connection
        except (FileNotFoundError, ConnectionRefusedError) as error:  # its name is there before it listens
            connection.close()
            if time.monotonic() >= (end if isinstance(error, FileNotFoundError) else refused_end):
                raise
            time.sleep(0.02)
        except BaseException:
            connection.close()
            raise


def lost(path: str, error: BaseException) -> str:
    """One line for people."""
    why = "does not answer" if isinstance(error, TimeoutError) else "has ended"
    return f"the process that keeps graphs for jobs {why} ({path}): start the job again, the service keeps them anew"
