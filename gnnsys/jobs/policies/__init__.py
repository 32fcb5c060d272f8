"""Which jobs start next, as pure functions (CoGNN, IV-D).

`base`, `lmcf` and `bmc` are the paper's, in groups; `fifo` is first come, first served; `continuous` has no barrier.
"""

from __future__ import annotations

from collections.abc import Callable

from gnnsys.jobs.policies.continuous import ContinuousPolicy, expected_lengths
from gnnsys.jobs.policies.fifo import FifoPolicy
from gnnsys.jobs.policies.groups import GroupedPolicy, Grouping, base_groups, bmc_groups, lmcf_groups
from gnnsys.jobs.policies.replay_queue import ReplayedJob, ReplayedQueue, replay_queue, undisturbed
from gnnsys.jobs.policies.sharing import (
    EndedRun,
    SharingRecord,
    predict_seconds,
    relative_speeds,
    steps_per_second,
    to_be_parted,
)
from gnnsys.jobs.policies.sharing_watch import SharingWatch, WatchedPace
from gnnsys.jobs.policies.waiting_jobs import Policy, Room, WaitingJob, by_arrival, fits, memory_of

_POLICIES: dict[str, Callable[[], Policy]] = {
    "base": lambda: GroupedPolicy(base_groups),
    "bmc": lambda: GroupedPolicy(bmc_groups),
    "continuous": ContinuousPolicy,
    "fifo": FifoPolicy,
    "lmcf": lambda: GroupedPolicy(lmcf_groups),
}


def find_policy(name: str) -> Policy:
    """A new policy by its name, with its own settings."""
    if name not in _POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of: {', '.join(_POLICIES)}")
    return _POLICIES[name]()


__all__ = [
    "ContinuousPolicy",
    "EndedRun",
    "FifoPolicy",
    "GroupedPolicy",
    "Grouping",
    "Policy",
    "ReplayedJob",
    "ReplayedQueue",
    "Room",
    "SharingRecord",
    "SharingWatch",
    "WaitingJob",
    "WatchedPace",
    "base_groups",
    "bmc_groups",
    "by_arrival",
    "expected_lengths",
    "find_policy",
    "fits",
    "lmcf_groups",
    "memory_of",
    "predict_seconds",
    "relative_speeds",
    "replay_queue",
    "steps_per_second",
    "to_be_parted",
    "undisturbed",
]
