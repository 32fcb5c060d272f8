"""How much a shard may be made to hold: who has the job's key creates tables, and memory is the machine's.

A process may use what the machine has, and what each of the cgroups it is in, one inside the other, allows: a
container's limit, a batch system's, a user's slice.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gnnsys.store.spec import TableSpec

_SHARE = 0.8  # of the machine's memory
_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_UNLIMITED = 1 << 60  # version 1 says "no limit" as a number near 2^63
_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")  # what the kernel frees for who needs memory

# The files of a cgroup, by version: limits, what is in use, and the names in memory.stat that count its children too.
_LIMITS = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}
_IN_USE = {2: "memory.current", 1: "memory.usage_in_bytes"}
_STAT_PREFIX = {2: "", 1: "total_"}


def memory_for_tables() -> int:
    """Bytes: four fifths of what this process may use, of the machine or of its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += [limit for version, folder in _cgroups() if (limit := _limit(version, folder)) is not None]
    return int(_SHARE * min(limits))


def free_memory() -> int:
    """Bytes that this process could still take: of the machine, and below the limit of every cgroup it is in."""
    free = [_entries(_PROC / "meminfo", " kB", 1024).get("MemAvailable:", _UNLIMITED)]
    for version, folder in _cgroups():
        limit, used = _limit(version, folder), _number(folder / _IN_USE[version])
        if limit is not None and used is not None:
            stat, prefix = _entries(folder / "memory.stat"), _STAT_PREFIX[version]
            free.append(limit - used + sum(stat.get(f"{prefix}{name}", 0) for name in _GIVEN_BACK))
    return max(0, min(free))


def free_device_memory(device: torch.device) -> int:
    """Bytes that this process could still take of a device: what nobody has, and what torch's allocator keeps ready,
    below the limit of `torch.cuda.set_per_process_memory_fraction` where one was set. Of the CPU, `free_memory`."""
    if device.type != "cuda":
        return free_memory()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    ready = torch.cuda.memory_reserved(device) - allocated
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return max(0, min(free + ready, allowed))


def parts_of_tables() -> int:
    """How many parts of tables may be created: each holds two descriptors, and half are left to others."""
    return max(16, _max_descriptors() // 4)


def pieces_of_lent_memory() -> int:
    """How many a server keeps mapped: each holds two descriptors, and three eighths of all are left to connections."""
    return max(4, min(1024, _max_descriptors() // 16))


def _max_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 18 if soft == resource.RLIM_INFINITY else soft


def table_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """What the rows of a part take, but for a few percent; Python's integers do not overflow."""
    return math.prod(shape) * itemsize


def _cgroups() -> Iterator[tuple[int, Path]]:
    """The cgroups that account this process's memory, from its own up to the root: (version, folder).

    In a container the path that /proc tells may lie outside of what is mounted: what is there of it is looked at, and
    the root of the mount always, which is the container's own.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {1: "/", 2: "/"}
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0":
            paths[2] = path
    for version, root in ((2, _CGROUPS), (2, _CGROUPS / "unified"), (1, _CGROUPS / "memory")):
        own = [step for step in paths[version].split("/") if step not in ("", ".", "..")]
        for depth in range(len(own), -1, -1):
            yield version, root.joinpath(*own[:depth])


def _limit(version: int, folder: Path) -> int | None:
    limits = [_number(folder / name) for name in _LIMITS[version]]
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # another kind of cgroup, or "max"
        return None


def _entries(file: Path, unit: str = "", scale: int = 1) -> dict[str, int]:
    """Lines of a name and a number."""
    found = {}
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.removesuffix(unit).partition(" ")
            if value.strip().isdigit():
                found[name] = int(value) * scale
    except OSError:
        pass
    return found


def check_room(
    spec: TableSpec, parts: Sequence[int], created: Sequence[int], max_bytes: int, max_created: int, machine: int
) -> None:
    """ValueError where a new table would be more than may be created; before anything is allocated.

    `created` has the bytes of every part that was.
    """
    taken = sum(created)
    wanted = sum(table_bytes(spec.part_shape(part), spec.dtype.itemsize) for part in parts)
    if taken + wanted > max_bytes:
        raise ValueError(
            f"table {spec.name!r} needs {wanted} bytes on machine {machine}, where tables take {taken} and "
            f"may take {max_bytes}: use more machines, or a smaller table"
        )
    if len(created) + len(parts) > max_created:
        raise ValueError(
            f"table {spec.name!r} is one too many: machine {machine} has {len(created)} parts of tables and "
            f"may have {max_created} (a quarter of `ulimit -n`): drop some"
        )
