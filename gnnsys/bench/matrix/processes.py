"""A command that has a deadline, and of which nothing is left when it ends: ranks, servers and loaders neither.

torchrun gives its ranks sessions of their own, so a signal to a process group would miss them. Everything that the
command starts inherits a mark in its environment; what still has it at the end is killed. A command ends with the
process that runs it, too, even if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "GNNSYS_BENCH_CELL"
_TIED = """import ctypes, os, signal, sys
getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; it outlives exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])"""
_ERROR = re.compile(r"^(?:\[\w+\]:\s*)*([A-Za-z_][\w.]*(?:Error|Exception|Exceeded|Lost|Interrupt)\b.*)$")
_AGENT = re.compile(r"torch\.distributed|ChildFailedError|elastic")
_REASON_CHARS = 300
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """How a command ended: None for one that was killed at its deadline. `output`: what it printed."""

    code: int | None
    output: str


def run_with_deadline(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    heard: Callable[[str], None] | None = None,
    *,
    end_seconds: float = _END_SECONDS,
) -> Ended:
    """Runs a command; `heard` gets each line of its output as it comes. `end_seconds`: to end by itself if told to."""
    mark = secrets.token_hex(8)
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
        env={**os.environ, **environment, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if heard is not None:
                heard(line.rstrip("\n"))

    reader = threading.Thread(target=read, name="cell-output", daemon=True)
    reader.start()
    code: int | None = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(end_seconds)
    finally:
        kill_marked(mark)
        process.kill()
        process.wait()
        reader.join(_END_SECONDS)
    return Ended(code, "".join(lines))


def kill_marked(mark: str) -> int:
    """Kills all processes that have the mark, until there is none; how many there were."""
    wanted = f"{MARK}={mark}".encode()
    killed: set[int] = set()
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end:
        left = [pid for pid in _processes() if wanted in _environment(pid)]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
    return len(killed)


def reason_of_output(ended: Ended, seconds: float) -> str:
    """One line: why a cell has no figures. The first error of a rank, not what the agent says of it."""
    if ended.code is None:
        return f"ran past its deadline of {seconds:g} s"
    errors = [m[1] for line in ended.output.splitlines() if (m := _ERROR.match(line)) and not _AGENT.search(m[1])]
    said = errors[0] if errors else next((line for line in reversed(ended.output.splitlines()) if line.strip()), "")
    return f"ended with {ended.code}: {said[:_REASON_CHARS]}" if said else f"ended with {ended.code}"


def _processes() -> list[int]:
    try:
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    except OSError:
        return []  # no /proc: torchrun has ended its ranks


def _environment(pid: int) -> bytes:
    """Nothing of a process that has ended, a zombie or one of somebody else."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
