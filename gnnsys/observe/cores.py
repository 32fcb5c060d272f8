"""How many cores this process may use, how many ranks share them, and how its threads wait for work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_SPIN_COUNT = "10000"  # half a millisecond, where GNU's OpenMP spins for ten: loops of a training step follow sooner
_QUOTA_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # of version 1


def num_local_ranks(environment: Mapping[str, str]) -> int:
    """Ranks that share this machine, as torchrun says; 1 where nothing is said."""
    said = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1


def num_usable_cores() -> int:
    """Cores that this process may run on, and no more than its control groups give it the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_quotas(_CGROUPS, Path("/proc/self/cgroup"))]))


def usable_core_time() -> float:
    """Core-seconds in a second that this process gets at most: as `num_usable_cores`, with fractions of a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cores), *_exact_quotas(_CGROUPS, Path("/proc/self/cgroup"))])


def shorten_spinning() -> None:
    """Has torch's OpenMP threads give up their cores soon after each loop, in this process and those it starts.

    OpenMP reads its settings when torch is loaded, so later calls change nothing. A user's own settings are kept.
    """
    settings = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    if "torch" not in sys.modules and not any(name in os.environ for name in settings):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def _cgroup_quotas(root: Path, own: Path) -> Sequence[int]:
    """Whole cores that this process's control group (version 2) and those around it may use, where they are limited."""
    return [max(1, int(quota)) for quota in _exact_quotas(root, own, versions=(2,))]


def _exact_quotas(root: Path, own: Path, versions: Sequence[int] = (1, 2)) -> Sequence[float]:
    """Cores that control groups of these versions give this process, from its own group to the outermost."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    quotas: list[float] = []
    for controllers, inside in [(line[1], line[2].lstrip("/")) for line in lines if len(line) == 3]:
        if not controllers and 2 in versions:
            quotas += _quotas_around(root, inside, lambda folder: (folder / "cpu.max").read_text().split())
        elif "cpu" in controllers.split(",") and 1 in versions:
            quotas += _quotas_around(
                root / controllers, inside, lambda folder: [(folder / name).read_text() for name in _QUOTA_FILES]
            )
    return quotas


def _quotas_around(root: Path, inside: str, read: Callable[[Path], Sequence[str]]) -> Iterator[float]:
    folder = root / inside
    for each in (folder, *folder.parents):
        try:
            quota, period = (int(text) for text in read(each))
            if quota > 0:  # -1 is no limit
                yield quota / period
        except (OSError, ValueError):  # no such file, or "max"
            pass
        if each == root:
            break
