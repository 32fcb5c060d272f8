"""The machine's graph server as a child process, seen from the trainer that starts it.

The child is in a session of its own, so Ctrl-C does not reach it before its trainers are done; it ends when the pipe to
it closes, which the kernel sees to even when this process is killed. Forked children of this process let go of the
pipe, so that they do not keep the server alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gnnsys
from gnnsys.comm import Keys

_END_SECONDS = 10.0


class ServerProcess:
    """The constructor and `order` return at once, `endpoints` waits for the child to listen, `close` ends it."""

    def __init__(self) -> None:
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gnnsys.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        self._watcher: threading.Thread | None = None
        self._is_closing = False
        _started.add(self)

    def order(self, machine: int, *, bind: Sequence[str], keys: Keys | None, threads: int) -> None:
        """What to serve and where. Keys go through the pipe, where no other process sees them."""
        orders = {
            "machine": machine,
            "bind": list(bind),
            "keys": None if keys is None else keys.to_json(),
            "threads": threads,
            "parent": os.getpid(),
            "parent_death": threading.current_thread() is threading.main_thread(),  # the kernel means the thread
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; `endpoints` tells
            self._process.stdin.write(json.dumps(orders).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def endpoints(self, timeout: float) -> list[str]:
        """Where it listens; RuntimeError where it ended or does not say so in time."""
        answer = self._read_line(timeout)
        if answer is None:
            raise RuntimeError(f"the graph server (process {self.pid}) did not start within {timeout:g} s")
        if not answer:
            self._process.wait(_END_SECONDS)
            code = self._process.returncode
            raise RuntimeError(f"the graph server ended with {code} before it listened; what it printed says why")
        values: dict[str, Any] = json.loads(answer)
        if "error" in values:
            raise RuntimeError(f"the graph server did not start: {values['error']}")
        return list(values["endpoints"])

    def watch(self, on_end: Callable[[int], None]) -> None:
        """Has `on_end` called with the exit code, in a thread, should the child end before `close`."""

        def wait() -> None:
            code = self._process.wait()  # as long as the child lives, which `close` sees to
            if not self._is_closing:
                on_end(code)

        self._watcher = threading.Thread(target=wait, name="gnnsys-server-watch", daemon=True)
        self._watcher.start()

    def close(self, timeout: float = _END_SECONDS) -> None:
        """Ends it: closes its input and says so, and if it does not heed that in time, by force. Idempotent."""
        process, self._is_closing = self._process, True
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.terminate()  # whoever else may hold the pipe
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._watcher is not None:
            self._watcher.join(timeout)
        process.stdout.close()

    def _read_line(self, timeout: float) -> bytes | None:
        """One line from the child; b"" where it ended, None where the time is over."""
        assert self._process.stdout is not None
        source, deadline, line = self._process.stdout.fileno(), time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([source], [], [], min(left, 1.0))[0]:
                if left <= 0:
                    return None
                continue
            piece = os.read(source, 65536)
            if not piece:
                return b""
            line += piece
        return line


_started: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def _let_go() -> None:
    for server in list(_started):
        for pipe in (server._process.stdin, server._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()


os.register_at_fork(after_in_child=_let_go)
