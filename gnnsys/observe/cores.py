"""How many cores this process may use, and how many ranks share them: what defaults are chosen from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def num_local_ranks(environment: Mapping[str, str]) -> int:
    """Ranks that share this machine, as torchrun says; 1 where nothing is said."""
    said = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1


def num_usable_cores() -> int:
    """Cores that this process may run on, and no more than its control groups give it the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_quotas(_CGROUPS, Path("/proc/self/cgroup"))]))


def _cgroup_quotas(root: Path, own: Path) -> Sequence[int]:
    """Whole cores that this process's control group (version 2) and those around it may use, where they are limited."""
    quotas = []
    try:
        inside = next(line[4:] for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return []
    folder = root / inside
    for each in (folder, *folder.parents):
        try:
            quota, period = (each / "cpu.max").read_text().split()
            quotas.append(max(1, int(quota) // int(period)))
        except (OSError, ValueError):  # no such file, or "max"
            pass
        if each == root:
            break
    return quotas
