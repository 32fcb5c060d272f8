"""Which steps bring their rows in sweeps over sources, and which bin by bin, by the bytes that each way brings.

Bins bring a row for each bin that reads it, sweeps every row for each group of nodes; what is fewer is done. How a
budget is shared where a step is in sweeps:

    sums of a group's nodes, and those of the next step's where they stay     as they are, two thirds of it at most
    of the rest: two bins of nodes                                            two fifths each
                 structure through which bins pull, two pieces of it          a tenth each
    or, while rows are swept: three pieces of them                            a third each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gnnsys.fullgraph.offload.source_sweeps import NODE_BYTES, SweepCosts, piece_cuts
from gnnsys.fullgraph.plan.bins import Costs, Packing, bin_bounds
from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.neighbor_sums import NeighborSums
from gnnsys.fullgraph.plan.stage_halves import SumStage
from gnnsys.ops import CSC

_SUMS_SHARE = 2 / 3  # of a budget, for the sums of a group
_LEFT_SHARE = 1 / 4  # of a budget, which must be left for bins where gradients of sums stay
_PIECES = 6  # of rows where nothing limits them: one comes while another is added
_SEVERAL_RANKS = 2  # bins begin before all rows have come from other ranks, sweeps do not: they must bring so much less
Shape = tuple[int, torch.dtype]


@dataclass(frozen=True)
class SweepChoice:
    """A step that will be in sweeps: where its groups of nodes and its pieces of rows begin."""

    groups: list[int]
    cuts: list[int]
    costs: SweepCosts
    sums_bytes: int  # of a group
    swept_bytes: int
    binned_bytes: int
    stays: bool = False


@dataclass(frozen=True)
class SweepLimits:
    """What a budget leaves beside sums: for a bin, for a piece of rows, for a piece of structure to pull through."""

    bin: int
    piece: int
    pull: int

    @classmethod
    def of(cls, left: int) -> SweepLimits:
        left = max(0, left)
        return cls(left * 2 // 5, left // 3, left // 10)


def choose_sweeps(
    stages: Sequence[ModelStage], views: Sequence[NeighborSums | None], plan: HaloPlan, shapes: Sequence[Shape],
    binned: Sequence[Sequence[int]], budget: int | None, features_stay: bool,
) -> list[SweepChoice | None]:  # fmt: skip
    """The steps that are to be in sweeps; `binned` are the bounds that bins of all steps would have.

    With `features_stay` the first step's input needs no gradient.
    """
    found: list[SweepChoice | None] = []
    for view, shape, bounds in zip(views, shapes, binned, strict=False):
        found.append(None if view is None or plan.num_core == 0 else _choice(view, plan, *shape, bounds, budget))
    for index in range(1, len(stages)):
        here, before = found[index], found[index - 1]
        stage = stages[index - 1]
        if here is None or stage.norm is not None or len(here.groups) != 2:
            continue
        if budget is not None:
            own = 0 if before is None or (index == 1 and features_stay) else before.sums_bytes
            is_small = stage.conv is None or (before is not None and isinstance(stage, SumStage))
            if not is_small or budget - here.sums_bytes - own < _LEFT_SHARE * budget:
                continue
        found[index] = replace(here, stays=True)
    if budget is not None:
        found = [
            None if each is None else replace(each, costs=_limited(each, found, index, budget, features_stay))
            for index, each in enumerate(found)
        ]
    return found


def _choice(
    view: NeighborSums, plan: HaloPlan, width: int, dtype: torch.dtype, bounds: Sequence[int], budget: int | None
) -> SweepChoice | None:
    """A step in sweeps, if that brings no more bytes than its bins do."""
    row, num_core, csc = width * dtype.itemsize, plan.num_core, view.csc
    num_groups = 1 if budget is None else -(-num_core * (row + NODE_BYTES) // max(1, int(_SUMS_SHARE * budget)))
    each = -(-num_core // min(num_groups, num_core))
    groups = [*range(0, num_core, each), num_core]
    sums_bytes = each * (row + NODE_BYTES)
    costs = SweepCosts.of(view, width, dtype)
    if budget is not None:
        limits = SweepLimits.of(budget - sums_bytes)
        costs = replace(costs, limit=limits.piece, pull_limit=limits.pull)
    cuts = piece_cuts(csc, each, costs, _PIECES, num_core)
    if cuts is None:
        return None
    edges = csc.num_edges * csc.indices.itemsize
    indptr = csc.indptr.itemsize
    swept = (len(groups) - 1) * csc.num_src * row
    swept += 0 if budget is None else edges + (len(cuts) - 1) * num_core * indptr
    limit = swept * (_SEVERAL_RANKS if plan.world_size > 1 else 1)
    structure = 0 if budget is None else edges + num_core * indptr
    found = bytes_of_bins(csc, bounds, row, limit - structure) + structure
    return SweepChoice(groups, cuts, costs, sums_bytes, swept, found) if found >= limit else None


def bytes_of_bins(csc: CSC, bounds: Sequence[int], row: int, enough: int) -> int:
    """Bytes of the rows that bins between bounds read, each row once for every bin; or some number from `enough` on."""
    total, is_read = 0, torch.zeros(csc.num_src, dtype=torch.bool)
    for first, end in pairwise(bounds):
        is_read.zero_()
        is_read[csc.indices[int(csc.indptr[first]) : int(csc.indptr[end])].long()] = True
        total += int(is_read.sum()) * row
        if total >= enough:
            break
    return total


def left_for_bins(choices: Sequence[SweepChoice | None], index: int, budget: int, features_stay: bool) -> int:
    """What a budget leaves for the bins of a step beside sums that lie on the device, there and back."""
    here, after = choices[index], choices[index + 1] if index + 1 < len(choices) else None
    own = 0 if here is None else here.sums_bytes
    later = after.sums_bytes if after is not None and after.stays else 0
    if index == 0 and features_stay:  # whose sums come from the host on the way back
        return budget - max(own, later)
    return budget - own - later


def _limited(
    here: SweepChoice, choices: Sequence[SweepChoice | None], index: int, budget: int, features_stay: bool
) -> SweepCosts:
    """What bins of the step before pull through is part of what is left for those."""
    left = left_for_bins(choices, index - 1, budget, features_stay) if here.stays else budget - here.sums_bytes
    return replace(here.costs, pull_limit=max(1, SweepLimits.of(left).pull))


def sweep_bounds(plan: HaloPlan, choice: SweepChoice, packing: Packing, costs: Costs) -> list[int]:
    """Where the bins of a step in sweeps begin: none has nodes of two groups."""
    return sorted({*choice.groups, *bin_bounds(plan, packing, costs, False)})


def groups_of(bounds: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The group of every bin between bounds."""
    starts: Tensor = torch.tensor(bounds[:-1], dtype=torch.int64)
    return (torch.bucketize(starts, torch.tensor(groups), right=True) - 1).tolist()
