"""Who gets which seeds: contiguous ranges of the chosen ids, each for the machine that owns most of it.

Chosen ids are numbered in ascending order. Pure functions of counts and placement, the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from gnnsys.partition.placement import Placement


def assign_shares(counts: Sequence[int], placement: Placement, trainers_per_part: int) -> list[range]:
    """Which of the chosen ids, counted in ascending order, each rank gets. `counts[s]`: chosen ids of subpart s.

    >>> assign_shares([4, 6], Placement(0, (1, 0), (0, 1)), 1)
    [range(5, 10), range(0, 5)]
    """
    world_size, total = placement.world_size, sum(counts)
    cuts = [total * i // world_size for i in range(world_size + 1)]
    ranges = [range(first, end) for first, end in pairwise(cuts)]
    where = NumbersOnMachines(counts, placement, trainers_per_part)
    return [ranges[i] for i in assign_pieces([where.of(numbers) for numbers in ranges], placement.machine_of_rank)]


def assign_pieces(overlaps: Sequence[Mapping[int, int]], machine_of_rank: Sequence[int]) -> list[int]:
    """The piece of each rank. `overlaps[i]`: how much of piece i each machine owns.

    Pieces are given out by falling overlap, while the machine has ranks left, and the rest to whoever has none. On a
    machine they go to its ranks in order.
    """
    wishes = [(-common, i, machine) for i, overlap in enumerate(overlaps) for machine, common in overlap.items()]
    free: dict[int, list[int]] = {}
    for rank, machine in enumerate(machine_of_rank):
        free.setdefault(machine, []).append(rank)
    given: dict[int, list[int]] = {machine: [] for machine in free}
    left = set(range(len(machine_of_rank)))
    for _, i, machine in sorted(wishes):
        if i in left and machine in free and len(given[machine]) < len(free[machine]):
            given[machine].append(i)
            left.discard(i)
    rest = sorted(left, reverse=True)
    pieces = [0] * len(machine_of_rank)
    for machine, ranks in sorted(free.items()):
        while len(given[machine]) < len(ranks):
            given[machine].append(rest.pop())
        for rank, i in zip(ranks, sorted(given[machine])):
            pieces[rank] = i
    return pieces


class NumbersOnMachines:
    """Where chosen ids live, by their numbers."""

    def __init__(self, counts: Sequence[int], placement: Placement, trainers_per_part: int) -> None:
        self._ends = [0, *accumulate(counts)]
        self._machine_of_part = placement.machine_of_part
        self._trainers = trainers_per_part

    def of(self, numbers: range) -> dict[int, int]:
        """How many of them are on each machine; nothing where nobody serves parts."""
        ends, overlap = self._ends, dict[int, int]()
        if not self._machine_of_part:
            return overlap
        for s in range(bisect_right(ends, numbers.start) - 1, bisect_left(ends, numbers.stop)):
            common = min(ends[s + 1], numbers.stop) - max(ends[s], numbers.start)
            if common > 0:
                machine = self._machine_of_part[s // self._trainers]
                overlap[machine] = overlap.get(machine, 0) + common
        return overlap
