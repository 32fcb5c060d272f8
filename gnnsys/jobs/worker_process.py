"""A worker as a child process, seen from the service that starts it (`gnnsys.jobs.work` is the process itself).

Orders and answers are lines of JSON through two pipes. It is in a session of its own, so that Ctrl-C is for the service
alone; it ends when its input closes, which the kernel sees to even when the service is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import gnnsys
from gnnsys.jobs.process_identity import ProcessIdentity, kill_descendants

_END_SECONDS = 10.0
_PIECE = 1 << 16
_MOST_BYTES = 1 << 26  # of one answer


class WorkerProcess:
    """The constructor returns at once; the answer `ready` comes when torch is warm. `fileno` can be waited for."""

    def __init__(self, device: str, threads: int, log: IO[bytes] | int, environment: Mapping[str, str]) -> None:
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gnnsys.jobs.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        self.identity = ProcessIdentity.of(self._process.pid)
        self._owner = os.getpid()
        self._partial = b""
        self._pipes: list[Any] = [self._process.stdin, self._process.stdout]
        _close_in_forks(self._pipes)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        is_main = threading.current_thread() is threading.main_thread()
        self.send({"device": device, "threads": threads, "parent": os.getpid(), "parent_death": is_main})

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, order: Mapping[str, Any]) -> None:
        """One that has ended is told nothing: `receive` tells that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The answers that are there, and whether it has ended. Never waits."""
        has_ended = False
        while True:
            try:
                piece = os.read(self.fileno(), _PIECE)
            except BlockingIOError:
                break
            if not piece:
                has_ended = True
                break
            self._partial += piece
            if len(self._partial) > _MOST_BYTES:
                self.kill()
        *lines, self._partial = self._partial.split(b"\n")
        return [answer for line in lines if (answer := _answer(line)) is not None], has_ended

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, though a child of its job may hold the pipe."""
        return self._process.poll() is not None

    def stopped(self) -> ProcessIdentity | None:
        """The process, where it is stopped."""
        return self.identity if self.identity is not None and self.identity.is_stopped() else None

    def kill(self) -> None:
        """With all that its job has started. In a process that was forked from its owner nothing is done."""
        if os.getpid() != self._owner:
            return
        if self._process.poll() is None:
            kill_descendants(self._process.pid)
        self._process.kill()
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, timeout: float = _END_SECONDS) -> int:
        """Closes its input, then SIGTERM, then SIGKILL where it still runs. Idempotent; its exit code. Nothing is
        done in a process that was forked from its owner."""
        if os.getpid() != self._owner:
            return 0
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.terminate()
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)
        self._kill_group()
        process.stdout.close()
        self._pipes.clear()
        return int(process.returncode if process.returncode is not None else -1)


def ending_words(code: int) -> str:
    """How a process has ended: "with exit code 3", or "by signal 9"."""
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _answer(line: bytes) -> dict[str, Any] | None:
    """None where a job has written to the pipe what is no answer."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("did"), str) else None


def _close_in_forks(pipes: list[Any]) -> None:
    from gnnsys.comm import close_in_forks

    close_in_forks(pipes)
