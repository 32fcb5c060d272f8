"""The search of the rows of `gnnsys bench plan`: several starts, one walk, then trial swaps. That of `gnnsys plan`
(`place_job.py`) has the same starts, two walks and no swaps.

ETP walks from what IFS finds, which knows nothing of links. Placements with the least busiest link are found without a
walk (`balanced_placements`); the walk goes on from the fastest start. What is left is what no cost sees: how flows of
one placement wait for each other. So the last tries are simulated one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gnnsys.planning.placement.balanced_placement import balanced_placements
from gnnsys.planning.placement.baselines import distdgl_placement
from gnnsys.planning.placement.explore import ExploreSettings, SimulatedPlacement, explore
from gnnsys.planning.placement.first_placement import first_placement
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import Ints

ANNEALED = ExploreSettings(beta=3.0, last_beta=1000.0)  # leaves what a good start has, and finds its way back
TRIES = 60  # placements that are simulated behind the walk
_PROPOSED = 50  # proposals for each of them: most do not fit, or cannot be faster


def starts_of(problem: PlacementProblem, seed: int = 0) -> list[tuple[str, Ints]]:
    """IFS's placement, DistDGL's and balanced ones, by name. `NoPlacement` where nothing fits."""
    first = first_placement(problem.resources, problem.counts, problem.store_machine, seed=seed)
    balanced = [("balanced", placement) for placement in balanced_placements(problem)]
    return [("ifs", first), ("distdgl", distdgl_placement(problem)), *balanced]


def search_placements(
    problem: PlacementProblem,
    settings: ExploreSettings | None = None,
    *,
    tries: int = TRIES,
    as_run: Callable[[Ints], Ints] = np.asarray,
) -> list[SimulatedPlacement]:
    """What was simulated, the fastest first: the starts, what ETP finds from the fastest of them, and `tries` more.
    Never slower than DistDGL's placement, which is a start. Without `settings` the walk is `ANNEALED`. `as_run`: see
    `explore`."""
    chosen = settings or ANNEALED
    found = []
    for name, start in starts_of(problem, chosen.seed):
        placement = as_run(start)
        found.append(SimulatedPlacement(placement, problem.simulate(placement).seconds, name))
    best = min(found, key=lambda each: each.seconds)
    walked = explore(problem, chosen, start=best.placement, as_run=as_run)
    found += [each for each in walked.best if each.name != "start"]
    best = min(found, key=lambda each: each.seconds)
    found += try_swaps(problem, best, tries, seed=chosen.seed, as_run=as_run)
    return sorted(found, key=lambda each: each.seconds)


def try_swaps(
    problem: PlacementProblem,
    start: SimulatedPlacement,
    tries: int,
    *,
    seed: int = 0,
    as_run: Callable[[Ints], Ints] = np.asarray,
) -> list[SimulatedPlacement]:
    """Moves one task or exchanges two, simulates, and goes on from what is faster; `tries` times at most. What does not
    fit, or has a bound above the best time, is not simulated."""
    generator = np.random.default_rng(seed)
    movable, num_machines = problem.movable, problem.machines.num_machines
    best = start
    found: list[SimulatedPlacement] = []
    if len(movable) < 2 or num_machines < 2:
        return []
    for _ in range(_PROPOSED * tries):
        if len(found) == tries:
            break
        placement = best.placement.copy()
        one, other = generator.choice(movable, 2, replace=False)
        if generator.random() < 0.5:
            placement[one], placement[other] = placement[other], placement[one]
        else:
            placement[one] = generator.integers(num_machines)
        placement = as_run(placement)
        if (placement == best.placement).all() or not problem.fits(placement):
            continue
        if problem.bounds(placement[None]).least[0] >= best.seconds:
            continue
        found.append(SimulatedPlacement(placement, problem.simulate(placement).seconds, "swaps"))
        best = min(best, found[-1], key=lambda each: each.seconds)
    return found
