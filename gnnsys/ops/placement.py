"""Where tasks of a training job go: typed faces of csrc/cpu/planning/walk_placements.cpp.

`gnnsys.planning` makes the tensors: `job` is host, kind, seconds, threads, source, target, lag, mode, volume; `cluster`
is link rates, uplinks, cores, speeds; `limits` is capacity, room, demand, allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native

WALK_COSTS = ("path", "bound", "load")


class PlacementWalk(NamedTuple):
    """`moves` int64 [steps, 3]: task (-1: no machine can take it), machine, whether it was accepted. `costs` [steps]:
    of where the walk is behind each step. `found` [count, placed]: what is worth simulating, once each, with
    `found_costs` and the step of each, -1 for the start."""

    moves: Tensor
    costs: Tensor
    found: Tensor
    found_costs: Tensor
    found_steps: Tensor


def placement_bounds(job: Sequence[Tensor], cluster: Sequence[Tensor], placements: Tensor) -> Tensor:
    """float64 [count, 4]: seconds of full-rate path, busiest link, busiest cores and path with shared links."""
    return native.placement_bounds(list(job), list(cluster), placements)


def walk_placements(
    job: Sequence[Tensor],
    cluster: Sequence[Tensor],
    limits: Sequence[Tensor],
    start: Tensor,
    movable: Tensor,
    *,
    cost: str,
    steps: int,
    beta: float,
    last_beta: float | None = None,
    relative: bool,
    relaxed: float,
    near: float,
    key: int,
) -> PlacementWalk:
    """The walk of Algorithm 3 from `start`. With `relative` costs are divided by the first one before `beta`,
    which grows to `last_beta` where one is given."""
    found = native.walk_placements(
        list(job), list(cluster), list(limits), start[None], movable, WALK_COSTS.index(cost), steps, beta,
        beta if last_beta is None else last_beta, relative, relaxed, near, key,
    )  # fmt: skip
    return PlacementWalk(*found)


@torch.library.register_fake("gnnsys::placement_bounds")
def _placement_bounds(job: list[Tensor], cluster: list[Tensor], placements: Tensor) -> Tensor:
    return placements.new_empty(placements.shape[0], 4, dtype=torch.float64)


@torch.library.register_fake("gnnsys::walk_placements")
def _walk_placements(
    job: list[Tensor], cluster: list[Tensor], limits: list[Tensor], start: Tensor, movable: Tensor, cost: int,
    steps: int, *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    count = torch.library.get_ctx().new_dynamic_size()
    real = {"dtype": torch.float64}
    return (
        start.new_empty(steps, 3),
        start.new_empty(steps, **real),
        start.new_empty(count, start.shape[1]),
        start.new_empty(count, **real),
        start.new_empty(count),
    )
