"""`gnnsys bench plan --only search`: how long a search takes, and what guides it best (Fig. 9 of DGTP).

Costs are Eq. 27's path, `bound` and `load`. `every step` simulates each placement that is proposed, in the place of a
cost; it is timed on fewer steps, and its seconds are of as many as the others have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from statistics import fmean

import numpy as np

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.plan.paper_jobs import PAPERS, PRODUCTS, PaperJob, fitting_draws, testbed
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.planning import (
    ANNEALED,
    ExploreSettings,
    PlacementProblem,
    balanced_placements,
    distdgl_placement,
    explore,
    first_placement,
    placement_floor,
    search_placements,
)

LIMIT, EVERY_STEP = "limit", "every step"
LIMITS = {"testbed": 10.0, "16 machines": 60.0}
COSTS = ("bound", "path", "load")
_TRIED, _SAMPLED = 20, 17


def search_time(work: Workload) -> Iterator[Case]:
    """Seconds of 10,000 steps with everything that is simulated of them."""
    for name in LIMITS if work.sizes == FULL else ("testbed",):
        settings = ExploreSettings(steps=10_000 if work.sizes == FULL else 500)

        def sides(name: str = name, settings: ExploreSettings = settings) -> dict[str, Side]:
            problem = _problem(name)
            found = {cost: Side(partial(_timed, problem, settings, cost)) for cost in COSTS[1:]}
            return {
                OURS: Side(lambda: _timed(problem, settings, "bound")),
                **found,
                EVERY_STEP: Side(lambda: _every_step(problem, settings.steps)),
                LIMIT: Side(lambda: LIMITS[name]),
            }

        versus = (Versus((LIMIT,), 1.0), Versus(("path",)), Versus(("load",)), Versus((EVERY_STEP,), 1.0))
        yield Case(f"plan/search time, {name}", value("s"), sides, versus, repeats=1)


def search_guides(work: Workload) -> Iterator[Case]:
    """What 10,000 steps from IFS's start find, by cost, and how costs rank placements (Kendall)."""
    jobs = (("8 machines", PaperJob(PRODUCTS, 16, 2), 8), ("16 machines", PaperJob(PAPERS, 20, 4), 16))
    steps = 10_000 if work.sizes == FULL else 300
    for name, job, size in jobs if work.sizes == FULL else jobs[:1]:
        count = 6 if work.sizes == FULL else 1

        @cache
        def problems(job: PaperJob = job, size: int = size, count: int = count) -> list[PlacementProblem]:
            return fitting_draws(job, size, count, SEED + 1)[0]

        @cache
        def ratios(cost: str, problems=problems) -> list[float]:  # type: ignore[no-untyped-def]
            found = [explore(problem, ExploreSettings(cost=cost, steps=steps)) for problem in problems()]
            return [each.seconds / each.start.seconds for each in found]

        @cache
        def mine(ratios=ratios, problems=problems, name: str = name) -> float:  # type: ignore[no-untyped-def]
            for cost in COSTS:
                ranked = fmean(_kendall(problem, cost) for problem in problems())
                say(
                    f"plan/guides, {name}: {cost} ends at {fmean(ratios(cost)):.2f} of IFS's time, Kendall {ranked:.2f}"
                )
            return fmean(ratios("bound"))

        def sides(ratios=ratios, mine=mine) -> dict[str, Side]:  # type: ignore[no-untyped-def]
            others = {cost: Side(partial(_mean, ratios, cost)) for cost in COSTS[1:]}
            return {OURS: Side(mine), **others}

        versus = (Versus(("path",), label="Eq. 27's path"), Versus(("load",)))
        yield Case(f"plan/search guided by bound, {name}", value("of IFS's time"), sides, versus, repeats=1)


def search_starts(work: Workload) -> Iterator[Case]:
    """Where a search begins beside how long it is: seconds of DistDGL's placement that are left, and processor seconds.
    No placement is under the floor."""
    job, size = (PaperJob(PAPERS, 20, 4), 16) if work.sizes == FULL else (PaperJob(PRODUCTS, 16, 2), 8)
    count, steps = (4, 10_000) if work.sizes == FULL else (1, 300)

    @cache
    def problems() -> list[PlacementProblem]:
        return fitting_draws(job, size, count, SEED + 1)[0]

    def from_ifs(problem: PlacementProblem, steps: int, starts: int) -> float:
        chosen = [ExploreSettings(steps=steps, most_simulated=60, seed=seed) for seed in range(starts)]
        return min(explore(problem, settings).seconds for settings in chosen)

    ways: dict[str, Callable[[PlacementProblem], float]] = {
        "starts, a walk, swaps": lambda problem: (
            search_placements(problem, replace(ANNEALED, steps=steps, most_simulated=40))[0].seconds
        ),
        "ETP from IFS": lambda problem: from_ifs(problem, steps, 1),
        "ETP from IFS, 10 times as long, 4 starts": lambda problem: from_ifs(problem, 10 * steps, 4),
        "balanced starts alone": lambda problem: min(
            problem.simulate(place).seconds for place in balanced_placements(problem)
        ),
        "floor": placement_floor,
    }

    @cache
    def figure(way: str) -> float:
        began = time.process_time()
        ratios = [ways[way](problem) / problem.simulate(distdgl_placement(problem)).seconds for problem in problems()]
        each = (time.process_time() - began) / len(ratios)
        say(f"  {way}: {fmean(ratios):.3f} of DistDGL's time, {each:.2f} processor seconds each")
        return fmean(ratios)

    def sides() -> dict[str, Side]:
        first, *others = ways
        return {OURS: Side(partial(figure, first)), **{way: Side(partial(figure, way)) for way in others}}

    versus = tuple(Versus((way,)) for way in list(ways)[1:])
    name = f"plan/search starts, {size} machines"
    yield Case(name, value("of DistDGL's time"), sides, versus, repeats=1)


def _mean(figures: Callable[[str], list[float]], cost: str) -> float:
    return fmean(figures(cost))


@cache
def _problem(name: str) -> PlacementProblem:
    if name == "testbed":
        return PaperJob(PRODUCTS, 6, 2).problem(testbed())
    return fitting_draws(PaperJob(PAPERS, 20, 4), 16, 1, SEED)[0][0]


def _timed(problem: PlacementProblem, settings: ExploreSettings, cost: str) -> float:
    began = time.perf_counter()
    found = explore(problem, ExploreSettings(steps=settings.steps, cost=cost))
    seconds = time.perf_counter() - began
    say(f"  {cost}: {found.num_found} worth simulating, {found.num_simulated} simulated, {found.seconds:.2f} s")
    return seconds


def _every_step(problem: PlacementProblem, steps: int) -> float:
    """Seconds of a search whose cost is the simulated time: some proposals, times as many steps."""
    start = first_placement(problem.resources, problem.counts, problem.store_machine)
    generator = np.random.default_rng(SEED)
    began = time.perf_counter()
    for _ in range(_TRIED):
        moved = start.copy()
        moved[generator.choice(problem.movable)] = generator.integers(problem.machines.num_machines)
        problem.simulate(moved)
    return (time.perf_counter() - began) * steps / _TRIED


def _kendall(problem: PlacementProblem, cost: str) -> float:
    """How well a cost ranks placements: (pairs in order - pairs in disorder) / pairs. They are those of IFS with other
    orders of machines: where machines are nearly full, none that is drawn task by task fits."""
    found = [first_placement(problem.resources, problem.counts, problem.store_machine, seed=s) for s in range(_SAMPLED)]
    placements = np.array(found)
    times = np.array([problem.simulate(place).seconds for place in placements])
    bounds = problem.bounds(placements)
    load = np.maximum(bounds.busiest_link, bounds.busiest_cores)
    costs = {"bound": bounds.least, "path": bounds.sharing_path, "load": load}[cost]
    first, second = np.triu_indices(_SAMPLED, 1)
    return float(np.mean(np.sign(times[first] - times[second]) * np.sign(costs[first] - costs[second])))


BENCHMARKS: list[Benchmark] = [search_time, search_guides, search_starts]
