"""Placements to compare with: `distdgl`, `even`, `random`, and all of them where they can be counted.

Each is a function of a problem, and keeps its resources or raises `NoPlacement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gnnsys.planning.placement.explore import SimulatedPlacement, simulate_best
from gnnsys.planning.placement.first_placement import NoPlacement, first_counts, what_lacks, with_identities
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import SAMPLER, WORKER, Ints

MOST_EXHAUSTIVE = 100_000
_TRIES = 200  # random placements that do not fit, before it is given up


class _Groups:
    """Workers that are seated with all their samplers, one after another; the others are left to IFS."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, self.counts = problem, problem.counts
        self.demand = problem.resources.demand
        self.left = problem.resources.behind_stores(problem.store_machine)
        self.machine: list[int] = []  # of each group
        self.takes = self.demand[WORKER] + self.counts.samplers_per_worker * self.demand[SAMPLER]

    def seat(self, machine: int) -> bool:
        """Whether a group fits a machine, and what remains still fits somewhere. If so, it is seated."""
        if (self.left[machine] < self.takes).any():
            return False
        self.left[machine] -= self.takes
        self.machine.append(machine)
        if self._rest() is None:
            self.left[machine] += self.takes
            self.machine.pop()
            return False
        return True

    def _rest(self) -> Ints | None:
        remaining = replace(self.counts, num_workers=self.counts.num_workers - len(self.machine))
        return first_counts(self.left, self.demand, remaining, np.arange(len(self.left)))

    def placement(self) -> Ints:
        """Groups, then the rest with as many samplers beside their worker as can be."""
        rest = self._rest()
        if rest is None:
            raise NoPlacement(what_lacks(self.problem.resources, self.counts, self.problem.store_machine))
        remaining = replace(self.counts, num_stores=0, num_workers=self.counts.num_workers - len(self.machine))
        others = with_identities(rest, remaining, np.zeros(0, dtype=np.int64))
        samplers, workers = others[: remaining.num_samplers], others[remaining.num_samplers :]
        own = np.array(self.machine, dtype=np.int64)
        stores = self.problem.store_machine
        return np.concatenate([stores, np.repeat(own, self.counts.samplers_per_worker), samplers, own, workers])


def distdgl_placement(problem: PlacementProblem, *, pack: bool = False) -> Ints:
    """Each worker with its samplers on the machine with the fewest workers that has room; with `pack`, on the first one
    that has. Where no machine has, workers and samplers are separated, as few as can be this way."""
    groups = _Groups(problem)
    num_workers = np.zeros(problem.machines.num_machines, dtype=np.int64)
    while len(groups.machine) < problem.counts.num_workers:
        for machine in np.arange(len(num_workers)) if pack else np.argsort(num_workers, kind="stable"):
            if groups.seat(int(machine)):
                num_workers[machine] += 1
                break
        else:
            break
    return groups.placement()


def even_placement(problem: PlacementProblem) -> Ints:
    """What torchrun and `place_parts` do: as many trainers on every machine, in blocks, with their samplers. Those that
    their machine has no room for go where there is some."""
    groups = _Groups(problem)
    num_workers, num_machines = problem.counts.num_workers, problem.machines.num_machines
    for worker in range(num_workers):
        groups.seat(worker * num_machines // num_workers)
    return groups.placement()


def random_placement(problem: PlacementProblem, seed: int = 0) -> Ints:
    """Every task on a machine that is drawn from those with room for it, tasks in a random order."""
    generator = np.random.default_rng(seed)
    demand = problem.resources.of_each_task(problem.counts)
    for _ in range(_TRIES):
        left = problem.resources.behind_stores(problem.store_machine)
        placement = np.full(problem.counts.num_placed, -1, dtype=np.int64)
        placement[: problem.counts.num_stores] = problem.store_machine
        for task in problem.counts.num_stores + generator.permutation(sum(problem.counts.by_kind)):
            able = np.flatnonzero((left >= demand[task]).all(axis=1))
            if not len(able):
                break
            placement[task] = generator.choice(able)
            left[placement[task]] -= demand[task]
        else:
            return placement
    why = what_lacks(problem.resources, problem.counts, problem.store_machine)
    raise NoPlacement(f"none of {_TRIES} random placements fits: {why}")


def all_placements(problem: PlacementProblem, most: int = MOST_EXHAUSTIVE) -> Ints:
    """Every placement that fits, [count, num_placed]. ValueError where there are more than `most`."""
    demand = problem.resources.of_each_task(problem.counts)
    placement = np.full(problem.counts.num_placed, -1, dtype=np.int64)
    fixed = np.setdiff1d(np.arange(len(placement)), problem.movable)
    placement[fixed] = problem.store_machine[fixed]
    left = problem.resources.room()
    np.subtract.at(left, placement[fixed], demand[fixed])

    def fill(number: int) -> Iterator[Ints]:
        if number == len(problem.movable):
            yield placement.copy()
            return
        task = problem.movable[number]
        for machine in np.flatnonzero(problem.allowed[task] & (left >= demand[task]).all(axis=1)):
            placement[task] = machine
            left[machine] -= demand[task]
            yield from fill(number + 1)
            left[machine] += demand[task]

    found: list[Ints] = []
    for one in fill(0) if (left >= 0).all() else ():
        if len(found) == most:
            raise ValueError(f"there are more than {most:,} placements: search them with explore()")
        found.append(one)
    return np.array(found, dtype=np.int64).reshape(len(found), problem.counts.num_placed)


def exhaustive(problem: PlacementProblem, most: int = MOST_EXHAUSTIVE) -> SimulatedPlacement:
    """The fastest of all placements. `NoPlacement` where nothing fits."""
    found = all_placements(problem, most)
    if not len(found):
        raise NoPlacement(what_lacks(problem.resources, problem.counts, problem.store_machine))
    order = np.argsort(problem.bounds(found).least, kind="stable")
    first = SimulatedPlacement(found[order[0]], problem.simulate(found[order[0]]).seconds, "exhaustive")
    return simulate_best(problem, found[order[1:]], first, name="exhaustive")[0]


BASELINES = {"distdgl": distdgl_placement, "even": even_placement, "random": random_placement}
