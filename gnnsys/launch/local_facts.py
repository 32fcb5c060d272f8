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
from collections.abc import Mapping
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


def num_gpus(
    env: Mapping[str, str] = os.environ, devices: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia/gpus")
) -> int:
    """NVIDIA's GPUs that a process here may use, without the seconds that CUDA takes to start.

    Inside a Slurm job those of the allocation, else those whose devices can be opened: control groups and containers
    hide the others. CUDA_VISIBLE_DEVICES narrows both.
    """
    found = allocated_gpus(env)
    if found is None:
        found = usable_devices(devices, driver)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    named = [word.strip() for word in visible.split(",")]
    end = next((number for number, word in enumerate(named) if word in ("", "-1")), len(named))  # as CUDA reads it
    return end if visible.startswith("MIG-") else min(found, end)


def allocated_gpus(env: Mapping[str, str]) -> int | None:
    """GPUs that Slurm has given to this job on this node; None where it says nothing of GPUs."""
    if (count := env.get("SLURM_GPUS_ON_NODE", "")).isdecimal():
        return int(count)
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if name in env:
            return len([word for word in env[name].split(",") if word.strip()])
    return None


def usable_devices(devices: Path, driver: Path) -> int:
    """GPUs whose device can be opened; all of the driver where nobody has made their devices yet."""
    try:
        of_driver = len(os.listdir(driver))
    except OSError:
        of_driver = 0
    names = [name for name in os.listdir(devices) if re.fullmatch(r"nvidia\d+", name)]
    return sum(_can_open(devices / name) for name in names) if names else of_driver


def _can_open(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


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
