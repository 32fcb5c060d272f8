"""A command on a host of the lab. It runs in the host's control groups and namespaces; its output is read line by line.

When it ends, everything that it started, daemons included, is killed with its control group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gnnsys.lab import control_groups

_JOIN = (
    'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1/cgroup.procs" || exit 125; shift; n=$((n-1)); done; exec "$@"'
)
_IN_FOLDER = 'cd -- "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Result:
    """How a command ended. `code` is negative for a signal, None if it was killed at its deadline."""

    host: int
    code: int | None
    output: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0

    def describe(self, lines: int = 15) -> str:
        how = "ran out of time" if self.code is None else f"ended with {self.code}"
        tail = self.output.splitlines()[-lines:] if lines else []
        return "\n".join([f"host {self.host} {how} after {self.seconds:.1f} s", *(f"    {line}" for line in tail)])


class Command:
    """A running command, made by `Lab.start`. It is appended to `known` before its process is started.

    So an interrupted caller that kills every command in `known` leaves no process behind.
    """

    def __init__(
        self,
        host: int,
        argv: Sequence[str],
        host_groups: control_groups.HostGroups,
        first_pid: int,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        heard: Callable[[str], None] | None = None,
        known: list[Command] | None = None,
    ) -> None:
        self.host = host
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        name = f"command-{secrets.token_hex(4)}"
        self._leaves = [path / name for path in host_groups.paths]
        self._heard = heard
        self._lines: list[str] = []
        self._begin = time.monotonic()
        self._result: Result | None = None
        self._lock = threading.Lock()
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        inside = ["sh", "-c", _IN_FOLDER, "sh", cwd or os.getcwd(), *argv]
        entering = ["nsenter", f"--target={first_pid}", *spaces, "--", *inside]
        if known is not None:
            known.append(self)
        try:
            host_groups.leaf(name)
            self._process = subprocess.Popen(
                ["sh", "-c", _JOIN, "sh", str(len(self._leaves)), *map(str, self._leaves), *entering],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
            self._reader = threading.Thread(target=self._listen, name=f"lab-host-{host}", daemon=True)
            self._reader.start()
        except BaseException:
            self.kill()
            raise

    @property
    def output(self) -> str:
        """Its output so far, stdout and stderr together."""
        return "".join(self._lines)

    def done(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Sends a signal to its foreground processes, as a terminal would on Ctrl-C."""
        assert self._process is not None
        for pid in self.pids():
            try:
                if os.getpgid(pid) == self._process.pid:
                    os.kill(pid, number)
            except ProcessLookupError:
                continue

    def pids(self) -> set[int]:
        """Pids of all its processes, as seen from outside the lab."""
        return control_groups.processes(self._leaves) - {0 if self._process is None else self._process.pid}

    def wait(self, timeout: float) -> Result:
        """Its result. At the deadline it is killed, and the result has no code."""
        with self._lock:
            if self._result is None:
                code: int | None = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = None if self._process is None else self._process.wait(timeout)
                self._finish(code)
            assert self._result is not None
            return self._result

    def kill(self) -> Result:
        """Kills it and everything that it started."""
        if self._process is not None:
            self._process.kill()  # it may not have joined its groups yet
        control_groups.kill(self._leaves)
        return self.wait(10.0)

    def _finish(self, code: int | None) -> None:
        """Removes its groups. A process that has not joined them yet then fails to, and ends."""
        seconds = time.monotonic() - self._begin
        control_groups.remove(self._leaves)
        if self._process is not None:
            self._process.kill()
            self._process.wait(10.0)
        if self._reader is not None and self._reader.ident is not None:
            self._reader.join(10.0)  # all writers are dead, so the stream has ended
        self._result = Result(self.host, code, self.output, seconds)

    def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.append(line)
                if self._heard is not None:
                    self._heard(line)
