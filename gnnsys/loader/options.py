"""How a loader's pipeline is laid out: threads and depth of each stage, and how its rows are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import RequestContext, user_priority
from gnnsys.store import Policy, check_policy

STAGES = ("schedule", "sample", "fetch", "copy", "compact")


def check_count(name: str, value: Any, least: int) -> int:
    """A whole number that is not less than `least`; ValueError for anything else."""
    try:
        count = index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}") from None
    if count < least or isinstance(value, bool):
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return count


def as_values(values: Any, name: str) -> Tensor | None:
    """An argument with one value per input, such as labels or times, as a tensor; ValueError for what is none."""
    if values is None or isinstance(values, Tensor):
        return values
    try:
        found = torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.dim() == 0:
        raise ValueError(f"{name} must be a tensor with one entry per input, got {type(values).__name__}")
    return found


def check_seed(seed: Any, name: str = "seed") -> int:
    """A whole number of any size and sign; ValueError for anything else."""
    try:
        return index(seed)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {seed!r}") from None


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Threads and depths by stage name; what is left out follows from `num_threads` and `prefetch` of the loader.

    `threads`: 0 lets the thread of the stage behind run a stage as well. `depths`: how many finished batches may wait
    behind a stage that has threads; behind `sample` they wait with their rows already asked for, so its depth is how
    many batches are on the network besides those that are being sampled. `share`: rows that a batch in flight has asked
    for are copied from it instead of asked for again; rows from other machines, if they never change, are also kept for
    batches to come, as many as `keep` batches have. `trace`: of how many batches the record is kept.

    `policy` chooses which of the candidates for a table's rows serves them (see `gnnsys.store.Policy`); None is what
    `gnnsys.open` was given. `priority` (smaller is served first) and `path` are said in every message of the loader's
    batches; None is what `gnnsys.open` was given.

    `group`: so many batches are sampled before the rows of the first of them are fetched, and the next ones when the
    rows of the last were. Sampling and training then take turns, each with all loading threads, in place of going on
    beside each other (0). What waits is structure alone; a group is smaller where it would take a quarter of the memory
    that is left. The batches are the same.

    >>> PipelineOptions(threads={"sample": 4}, keep=3).threads
    {'sample': 4}
    """

    threads: Mapping[str, int] = field(default_factory=dict)
    depths: Mapping[str, int] = field(default_factory=dict)
    share: bool = True
    keep: int = 2
    trace: int = 256
    policy: Policy | None = None
    priority: int | str | None = None
    path: int | None = None
    group: int = 0

    def __post_init__(self) -> None:
        for option in fields(self)[:2]:
            for stage, value in getattr(self, option.name).items():
                if stage not in STAGES:
                    raise ValueError(f"{option.name}: there is no stage {stage!r}, only {', '.join(STAGES)}")
                check_count(f"{option.name}: {stage}", value, 0)
        check_count("keep", self.keep, 0)
        check_count("trace", self.trace, 0)
        check_count("group", self.group, 0)
        check_policy(self.policy)
        RequestContext(
            priority=user_priority(self.priority), path=self.path
        )  # ValueError where the header has no room for them
