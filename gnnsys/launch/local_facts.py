"""What a host says of itself: versions, memory, GPUs, limits.

Uses only the standard library, so that an agent is up at once. `preflight` compares these facts between hosts and
with what a job needs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

MOST_FILES = 1 << 20  # programs that close all they may have open take long with more
PACKAGE = Path(__file__).resolve().parents[1]


def host_facts() -> dict[str, Any]:
    """Everything below in one mapping that JSON can hold."""
    return {
        "hostname": socket.gethostname(),
        "time": time.time(),
        "versions": versions(),
        "memory_free": free_memory(),
        "shared_memory_free": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "gpus": num_gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "limits": {"open_files": hard_limit(resource.RLIMIT_NOFILE), "locked": hard_limit(resource.RLIMIT_MEMLOCK)},
        "workdir": os.getcwd(),
        "python": sys.executable,
    }


def versions() -> dict[str, str]:
    """What must be the same on every host. Two checkouts of gnnsys are told apart by the contents of their files."""
    return {
        "python": platform.python_version(),
        "torch": installed_version("torch") or "missing",
        "gnnsys": f"{installed_version('gnnsys') or '0+checkout'} ({source_digest()})",
    }


def installed_version(name: str) -> str | None:
    """A package's version without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def source_digest(package: Path = PACKAGE) -> str:
    """Eight digits that differ where any Python file of the package does."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def free_memory() -> int | None:
    """Bytes that programs can still get, as the kernel estimates; None where it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) << 10


def num_gpus() -> int:
    """NVIDIA's GPUs that the kernel has, without the seconds that CUDA takes to start."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))


def hard_limit(which: int) -> int | None:
    """The most that this account may ask for; None for no limit."""
    most = resource.getrlimit(which)[1]
    return None if most == resource.RLIM_INFINITY else most


def raise_limits() -> None:
    """Open files and locked memory up to what is allowed, for this process and those that it starts."""
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        soft, hard = resource.getrlimit(which)
        wanted = hard
        if which == resource.RLIMIT_NOFILE and soft != resource.RLIM_INFINITY:
            wanted = max(soft, MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES))
        resource.setrlimit(which, (wanted, hard))
