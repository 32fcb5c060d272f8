"""How much memory a program takes: it runs in a process of its own, which is watched from here.

`anonymous` is the largest RssAnon seen above what the program had when it said "ready": what it allocated, without the
pages of mapped files, which the kernel takes back when it needs them. Watched every few milliseconds: a peak that is
shorter may be missed, which `resident` (the kernel's own high-water mark, mapped pages included) bounds from above.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

INTERVAL_SECONDS = 0.002


@dataclass(frozen=True)
class Peak:
    anonymous: int
    resident: int
    output: str


def peak_memory(program: str, *arguments: object, timeout: float = 120) -> Peak:
    """Runs Python code that prints "ready" when its imports are done; fails with its output where it fails."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    killer = threading.Timer(timeout, process.kill)
    killer.start()
    try:
        first = process.stdout.readline()
        if first != "ready\n":
            process.kill()
            raise RuntimeError(f"the program did not say ready: {first}{process.communicate()[1]}")
        base = current = read_status(process.pid)
        peak = base
        finished = threading.Event()
        while process.poll() is None and current is not None:
            peak = {name: max(peak[name], current[name]) for name in peak}
            finished.wait(INTERVAL_SECONDS)
            current = read_status(process.pid)
        output, errors = process.communicate()
    finally:
        killer.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"the program ended with {process.returncode}: {output}{errors}")
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
