"""ETP (Algorithm 3 of DGTP): a random walk over placements, of which those that cost little are simulated.

The walk does not depend on what is simulated, so it is walked first and natively, and what it found is simulated then.
The listing simulates only placements that cost less than all before; we follow the text, which simulates every one that
was accepted, fits, and costs at most (1 + gamma) of the least. A placement whose bound from below is no less than the
best time so far cannot be better: it is passed over, and the result is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gnnsys.ops import WALK_COSTS
from gnnsys.planning.placement.first_placement import first_placement
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import Ints

PAPER_BETA, RELATIVE_BETA = 0.1, 100.0
_KEPT = 16  # best placements that a result has


@dataclass(frozen=True, kw_only=True)
class ExploreSettings:
    """The paper's hyperparameters, I = 10,000, mu = 100% and gamma = 0.1 among them.

    `cost` "bound": busiest link, busiest cores and full-rate path, the largest; "path": Eq. 27 as it is written;
    "load": links and cores alone. `relative`: costs are divided by the first one before `beta` multiplies them, so that
    it does not depend on the length of an iteration: 100 then, unless it is given. The paper's 0.1 multiplies seconds;
    with costs around 1 it would accept everything. With `last_beta` it grows evenly in its logarithm, as in annealing:
    slow, but it leaves a hollow that many tasks share. `simulate_all`: nothing
    is passed over. `most_simulated`: those with the least bounds, where a long walk found more.
    """

    steps: int = 10_000
    beta: float | None = None
    last_beta: float | None = None
    relative: bool = True
    mu: float = 1.0
    gamma: float = 0.1
    cost: str = "bound"
    simulate_all: bool = False
    most_simulated: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cost not in WALK_COSTS:
            raise ValueError(f"cost is one of {', '.join(WALK_COSTS)}, got {self.cost!r}")
        if self.beta is None:
            object.__setattr__(self, "beta", RELATIVE_BETA if self.relative else PAPER_BETA)
        for name in ("steps", "beta", "mu", "gamma"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class SimulatedPlacement:
    """A placement and the seconds that its iterations took in the simulator."""

    placement: Ints
    seconds: float
    name: str


@dataclass(frozen=True)
class Exploration:
    """`best` are the simulated placements with the least times, `start` is the first one. `num_found` is how many the
    walk found worth simulating, `num_simulated` how many were; the others had bounds above the best time."""

    best: tuple[SimulatedPlacement, ...]
    start: SimulatedPlacement
    num_found: int
    num_simulated: int
    num_accepted: int
    walk_seconds: float
    simulate_seconds: float

    @property
    def placement(self) -> Ints:
        return self.best[0].placement

    @property
    def seconds(self) -> float:
        return self.best[0].seconds


def explore(
    problem: PlacementProblem,
    settings: ExploreSettings | None = None,
    *,
    start: Ints | None = None,
    as_run: Callable[[Ints], Ints] | None = None,
) -> Exploration:
    """Searches from `start`, or from what IFS finds (`NoPlacement` where nothing fits).

    `as_run` makes of a placement what a run would do of it, before it is simulated: which trainer gets which seeds is
    not a planner's choice in gnnsys.
    """
    chosen = settings or ExploreSettings()
    if start is None:
        start = first_placement(problem.resources, problem.counts, problem.store_machine, seed=chosen.seed)
    begin = time.perf_counter()
    walk = problem.walk(
        start,
        cost=chosen.cost,
        steps=chosen.steps,
        beta=chosen.beta,
        last_beta=chosen.last_beta,
        relative=chosen.relative,
        relaxed=chosen.mu,
        near=chosen.gamma,
        key=chosen.seed,
    )
    found = walk.found.numpy()
    walked = time.perf_counter()
    if as_run is not None:
        start = as_run(start)
        found = np.array([as_run(one) for one in found], dtype=np.int64).reshape(found.shape)
    candidates = np.unique(found[(found != start).any(axis=1)], axis=0)
    first = SimulatedPlacement(start, problem.simulate(start).seconds, "start")
    ranked = simulate_best(problem, candidates, first, simulate_all=chosen.simulate_all, most=chosen.most_simulated)
    done = time.perf_counter()
    return Exploration(
        best=tuple(ranked[:_KEPT]),
        start=first,
        num_found=len(candidates) + 1,
        num_simulated=len(ranked),
        num_accepted=int(walk.moves[:, 2].sum()),
        walk_seconds=walked - begin,
        simulate_seconds=done - walked,
    )


def simulate_best(
    problem: PlacementProblem,
    candidates: Ints,
    first: SimulatedPlacement,
    *,
    name: str = "etp",
    simulate_all: bool = False,
    most: int | None = None,
) -> list[SimulatedPlacement]:
    """`first` and simulated candidates, the fastest in front. Those whose bound is no less than the best time are not
    simulated: no schedule of theirs is faster."""
    simulated = [first]
    best = first.seconds
    bounds = problem.bounds(candidates).least if len(candidates) else np.zeros(0)
    for number in np.argsort(bounds, kind="stable")[:most]:
        if bounds[number] >= best and not simulate_all:
            break
        seconds = problem.simulate(candidates[number]).seconds
        simulated.append(SimulatedPlacement(candidates[number], seconds, name))
        best = min(best, seconds)
    return sorted(simulated, key=lambda each: each.seconds)
