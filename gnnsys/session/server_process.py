"""The machine's graph server as a child process, seen from the trainer that starts it.

The child is in a session of its own, so Ctrl-C does not reach it before its trainers are done; it ends when the pipe to
it closes, which the kernel sees to even when this process is killed. Forked children of this process close their copy
of the pipe, so that they do not keep the server alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import gnnsys
from gnnsys.comm import Keys, close_in_forks

_END_SECONDS = 10.0


class ServerProcess:
    """The constructor and `order` return at once, `endpoints` waits for the child to listen, `close` ends it."""

    def __init__(self) -> None:
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gnnsys.session.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        pipes = [self._process.stdin, self._process.stdout]
        close_in_forks(pipes)  # which refers to the pipes alone, not to this object
        self._pipes = pipes

    def order(
        self, machine: int, *, bind: Sequence[str], keys: Keys | None, threads: int, lost_after: float = 30.0,
        life: int = 0, parts: tuple[str, Sequence[int]] | None = None, parent_death: bool | None = None,
        is_reserved: bool = False, io_threads: int | None = None, sampler: Mapping[str, Any] | None = None,
        rate_out: float | None = None, order: str = "auto",
    ) -> None:  # fmt: skip
        """What to serve and where. Keys go through the pipe, where no other process sees them.

        `parts`: a directory and what to open of it; `parent_death`: whether it ends with the thread that started it,
        which is then one that stays (None: where that is the main one); `io_threads`, `rate_out`, `order`: see
        `GraphServer`; `sampler`: path and number of a sampler (`SamplerServer`), which the process then is.
        """
        if parent_death is None:
            parent_death = threading.current_thread() is threading.main_thread()
        orders = {
            "machine": machine,
            "bind": list(bind),
            "keys": None if keys is None else keys.to_json(),
            "threads": threads,
            "lost_after": lost_after,
            "life": life,
            "open": None if parts is None else {"path": parts[0], "parts": list(parts[1])},
            "parent": os.getpid(),
            "parent_death": parent_death,
            "is_reserved": is_reserved,
            "io_threads": io_threads,
            "rate_out": rate_out,
            "order": order,
            "sampler": None if sampler is None else dict(sampler),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; `endpoints` tells
            self._process.stdin.write(json.dumps(orders).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

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

    def wait(self) -> int:
        """The exit code, once there is one: as long as the child lives, which `close` sees to."""
        return self._process.wait()

    def close(self, timeout: float = _END_SECONDS) -> None:
        """Ends it: closes its input and sends SIGTERM, then SIGKILL where it still runs after `timeout`. Idempotent."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.terminate()  # whoever else may hold the pipe
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._pipes.clear()  # forked children have nothing to close any more

    def _read_line(self, timeout: float) -> bytes | None:
        """One line from the child; b"" where it ended, None where the time is over."""
        assert self._process.stdout is not None
        source, deadline, line = self._process.stdout.fileno(), time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not wait([source], min(left, 1.0)):  # not select, which takes numbers below 1024 alone
                if left <= 0:
                    return None
                continue
            piece = os.read(source, 65536)
            if not piece:
                return b""
            line += piece
        return line
