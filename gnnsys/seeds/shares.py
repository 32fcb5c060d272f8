"""Which seeds are whose: contiguous ranges of the chosen ids, each for the machine that owns most of it.

Chosen ids are numbered in ascending order. Pure functions of counts and placement, the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from gnnsys.partition import Placement


@runtime_checkable
class Share(Protocol):
    """A rank's share of the seeds, such as `gnnsys.split` returns: `ids` has a length and is indexed by a tensor.

    Ids are the graph's own, global ids on parts. `Seeds` has a `numbering` by which loaders check that.
    """

    ids: Any
    type: Any  # node or edge type
    largest: int  # the size of the largest share that any rank has


def assign_shares(counts: Sequence[int], placement: Placement, trainers_per_part: int) -> list[range]:
    """Which of the chosen ids, counted in ascending order, each rank gets. `counts[s]`: chosen ids of subpart s.

    Ranges are given out by falling overlap with the machine's parts, while the machine has ranks left.

    >>> assign_shares([4, 6], Placement(0, (1, 0), (0, 1)), 1)
    [range(5, 10), range(0, 5)]
    """
    world_size, total = placement.world_size, sum(counts)
    cuts = [total * i // world_size for i in range(world_size + 1)]
    wishes = []
    for i in range(world_size):
        overlap: dict[int, int] = {}
        for machine, numbers in owners(counts, placement, trainers_per_part, range(cuts[i], cuts[i + 1])):
            overlap[machine] = overlap.get(machine, 0) + len(numbers)
        wishes += [(-common, i, machine) for machine, common in overlap.items()]
    free: dict[int, list[int]] = {}
    for rank, machine in enumerate(placement.machine_of_rank):
        free.setdefault(machine, []).append(rank)
    given: dict[int, list[int]] = {machine: [] for machine in free}
    left = set(range(world_size))
    for _, i, machine in sorted(wishes):
        if i in left and machine in free and len(given[machine]) < len(free[machine]):
            given[machine].append(i)
            left.discard(i)
    rest = sorted(left, reverse=True)
    shares = [range(0)] * world_size
    for machine, ranks in sorted(free.items()):
        while len(given[machine]) < len(ranks):
            given[machine].append(rest.pop())
        for rank, i in zip(ranks, sorted(given[machine]), strict=True):
            shares[rank] = range(cuts[i], cuts[i + 1])
    return shares


def owners(
    counts: Sequence[int], placement: Placement, trainers_per_part: int, numbers: range
) -> list[tuple[int, range]]:
    """The chosen ids with these numbers, in order, by the machine that owns them; empty where nobody serves parts."""
    ends, out = [0, *accumulate(counts)], list[tuple[int, range]]()
    if not placement.machine_of_part:
        return out
    for s in range(bisect_right(ends, numbers.start) - 1, bisect_left(ends, numbers.stop)):
        common = range(max(ends[s], numbers.start), min(ends[s + 1], numbers.stop))
        if len(common):
            out.append((placement.machine_of_part[s // trainers_per_part], common))
    return out
