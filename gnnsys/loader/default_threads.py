"""How many threads a loader has where nobody says: what this process may use, less what training needs, within what
pays. `choose_num_threads` is a pure function; the others look at this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")


class LoadingWork(Enum):
    """What loading threads do."""

    HOST = "samples and gathers on the host"
    IN_ORDER = "the same, and runs functions of the user's, which see batches in order as long as one thread calls them"
    DEVICE = "queues work for a device that has the graph in its memory"
    BUS = "queues work for a device that reads the graph from host memory: one samples while another's rows come"
    MACHINES = "samples and gathers where hops and rows are waited for, on other machines"


_LIMITS = {  # the fewest and the most threads that pay
    LoadingWork.HOST: (1, 6),  # measured on 16 cores: a step of 77 ms with one takes 16 with six
    LoadingWork.IN_ORDER: (1, 1),
    LoadingWork.DEVICE: (1, 1),
    LoadingWork.BUS: (2, 2),
    LoadingWork.MACHINES: (3, 6),
}


def choose_num_threads(work: LoadingWork, *, num_cores: int, num_local_ranks: int, num_training_threads: int) -> int:
    """The cores of this rank that training leaves free, within what pays for `work`."""
    fewest, most = _LIMITS[work]
    return max(fewest, min(most, num_cores // num_local_ranks - num_training_threads))


def default_num_threads(work: LoadingWork, device: torch.device | None = None) -> int:
    """For a loader that is made now, whose batches go to `device`, or stay on the host.

    Training on a GPU takes one core; on the CPU it takes as many as torch has threads. Batches that stay on the host
    are taken to be trained on there unless this process uses CUDA already.
    """
    on_gpu = (device is not None and device.type != "cpu") or torch.cuda.is_initialized()
    return choose_num_threads(
        work,
        num_cores=num_usable_cores(),
        num_local_ranks=num_local_ranks(os.environ),
        num_training_threads=1 if on_gpu else torch.get_num_threads(),
    )


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
