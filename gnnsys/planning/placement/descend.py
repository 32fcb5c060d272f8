"""From a placement to its best neighbour, and on from there: for costs that a random walk cannot ask often enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import Ints

_BETTER = 0.999  # of the cost so far; less is no gain but noise of a simulation


def descend(
    problem: PlacementProblem,
    start: Ints,
    cost: Callable[[Ints], float],
    *,
    as_run: Callable[[Ints], Ints],
    most: int,
    seed: int = 0,
) -> Ints:
    """Where no neighbour costs less than 0.999 times as much, or after `most` costs. `as_run` says what becomes of a
    placement in a run. A neighbour has one task elsewhere, or two tasks of one kind in each other's place."""
    generator = np.random.default_rng(seed)
    best, least, asked = start, cost(start), 1
    seen = {start.tobytes()}
    while True:
        for neighbour in _neighbours(problem, best, generator):
            found = as_run(neighbour)
            if found.tobytes() in seen:
                continue
            if asked >= most:
                return best
            seen.add(found.tobytes())
            asked += 1
            if (taken := cost(found)) < _BETTER * least:
                best, least = found, taken
                break
        else:
            return best


def _neighbours(problem: PlacementProblem, placement: Ints, generator: np.random.Generator) -> Iterator[Ints]:
    """Those that fit, in a random order."""
    kinds, machines = problem.counts.kind(), problem.machines.num_machines
    moves = [(int(task), machine, -1) for task in problem.movable for machine in range(machines)]
    swaps = [
        (int(task), int(placement[other]), int(other))
        for task in problem.movable
        for other in problem.movable
        if task < other and kinds[task] == kinds[other]
    ]
    changes = moves + swaps
    for number in generator.permutation(len(changes)):
        task, machine, other = changes[number]
        if placement[task] == machine:
            continue
        made = placement.copy()
        made[task] = machine
        if other >= 0:
            made[other] = placement[task]
        if problem.fits(made):
            yield made
