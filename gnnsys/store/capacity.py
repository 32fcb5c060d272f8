"""How much a shard may be made to hold: who has the job's key creates tables, and memory is the machine's."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

_SHARE = 0.8  # of the machine's memory
_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_for_tables() -> int:
    """Bytes: four fifths of what this process may use, of the machine or of its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _CGROUP_FILES:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # another kind of cgroup, or "max"
            continue
    return int(_SHARE * min(limits))


def parts_of_tables() -> int:
    """How many parts of tables may be created: each holds two descriptors, and half are left to connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else max(16, soft // 4)


def table_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """What the rows of a part take, but for a few percent; Python's integers do not overflow."""
    return math.prod(shape) * itemsize
