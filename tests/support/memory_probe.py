"""How much memory a program takes: it runs in a process of its own, which is watched from here.

The process is forked where one can be, and gives back first what its imports have left free.

`anonymous` is the largest RssAnon seen above what the program had when it said "ready": what it allocated, without the
pages of mapped files, which the kernel takes back when it needs them. Watched every few milliseconds: a peak that is
shorter may be missed, which `resident` (the kernel's own high-water mark, mapped pages included) bounds from above.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.forked_popen import ForkedPopen
from tests.support.nursery import forks_ranks

TRIM = "import ctypes; ctypes.CDLL(None).malloc_trim(0)\n"
INTERVAL_SECONDS = 0.002


@dataclass(frozen=True)
class Peak:
    anonymous: int
    resident: int
    output: str


def peak_memory(program: str, *arguments: object, timeout: float = 120) -> Peak:
    """Runs Python code that prints "ready" when its imports are done; fails with its output where it fails."""
    with tempfile.NamedTemporaryFile() as errors:
        return _watch(
            _start([sys.executable, "-c", TRIM + program, *map(str, arguments)], errors.name), errors, timeout
        )


def _start(command: list[str], errors: str) -> subprocess.Popen[bytes] | ForkedPopen:
    if forks_ranks():
        return ForkedPopen(command, err=errors)
    with open(errors, "wb") as file:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)


def _watch(process: subprocess.Popen[bytes] | ForkedPopen, errors: IO[bytes], timeout: float) -> Peak:
    assert process.stdout is not None
    killer = threading.Timer(timeout, process.kill)
    killer.start()
    try:
        first = process.stdout.readline()
        if first != b"ready\n":
            process.kill()
            process.wait()
            raise RuntimeError(f"the program did not say ready: {first.decode()}{errors.read().decode()}")
        base = current = read_status(process.pid)
        peak = base
        finished = threading.Event()
        while process.poll() is None and current is not None:
            peak = {name: max(peak[name], current[name]) for name in peak}
            finished.wait(INTERVAL_SECONDS)
            current = read_status(process.pid)
        output = process.stdout.read().decode()
        process.wait()
    finally:
        killer.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"the program ended with {process.returncode}: {output}{errors.read().decode()}")
    return Peak(peak["RssAnon"] - base["RssAnon"], peak["VmHWM"] - base["VmRSS"], output)


def read_status(pid: int) -> dict[str, int] | None:
    """Bytes by name from /proc, None once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "RssAnon" not in fields:
        return None
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS", "VmHWM")}
