"""`gnnsys bench plan`: DGTP's placements beside DistDGL's, on the paper's testbed and on clusters drawn as in §VI-B.

Everything is simulated. How many seconds an iteration takes is made of assumptions (`paper_jobs`), so ratios are what
can be compared. Where the paper has a figure it is the target of the row: `--check` fails where ours is below it, as it
is in most rows (docs/cluster_figures.md says why). Rows without one inform.

Where ours differ from the paper's:

- DistDGL's placement does not see links. Whether what it separates is joined by slow ones depends on the order of
  machines: ours is the mean over all orders.
- Graph stores stay where they are (constraint 3). With unequal GPUs the stores behind slow links bind wherever workers
  go; a row shows what is gained where parts may move.
- The paper does not say whether a flow that waits in a FIFO blocks its port. Both readings are rows.
- Tasks ask for logical cores (line 491), machines have cores (line 542): `readings` has both.
- Under OES a flow that is held back at one end leaves its share of the other end unused; max-min does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import permutations
from statistics import fmean, stdev

import numpy as np

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.plan.paper_jobs import (
    PAPERS,
    PRODUCTS,
    REDDIT,
    PaperCluster,
    PaperJob,
    fitting_draws,
    testbed,
    unequal_testbed,
)
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.planning import (
    ANNEALED,
    TRIES,
    ExploreSettings,
    PlacementProblem,
    distdgl_placement,
    placement_floor,
    search_placements,
)

PAPER_OF_TESTBED = {
    ("ogbn-products", "ps"): 28.45, ("Reddit", "ps"): 26.54, ("ogbn-products", "ring"): 26.11,
    ("Reddit", "ring"): 24.00,
}  # fmt: skip
PAPER_UNEQUAL = 48.0
DRAWS = {  # name: job, machines, the paper's percent, percent beside OMCoflow
    "8 machines": (PaperJob(PRODUCTS, 16, 2), 8, 9.0, 18.0),
    "16 machines": (PaperJob(PAPERS, 20, 4), 16, 29.0, 23.0),
}
MRTF, MOST_BESIDE_MRTF = ("mrtf", "mrtf-blocking"), 67.0
NUM_DRAWS, QUICK_DRAWS = 20, 1
QUICK = ExploreSettings(steps=500, most_simulated=4)
USUAL = replace(ANNEALED, most_simulated=40)
DISTDGL = "DistDGL's placement"


def beside(peer: str, percent: float, most: str = "") -> Versus:
    """A row whose target is the paper's: so many percent less time than the peer's."""
    return Versus((peer,), 1 / (1 - percent / 100), label=f"{peer} (paper: {most}{percent:g}% less)")


def search(problem: PlacementProblem, settings: ExploreSettings | None = None) -> np.ndarray:
    """What `search_placements` finds: IFS's start, DistDGL's and balanced ones, ETP from the fastest, and swaps."""
    return search_placements(problem, settings, tries=4 if settings is QUICK else TRIES)[0].placement


def on_testbed(work: Workload) -> Iterator[Case]:
    """ETP + OES beside DistDGL's placement + FIFO in both readings: mean seconds of 20 iterations over the orders of
    machines."""
    rows = list(PAPER_OF_TESTBED.items())
    for logical in (True, False):
        for (name, sync), paper in rows if work.sizes == FULL else rows[:1]:
            what = f"plan/testbed of {'16 logical' if logical else '8'} cores, {name}, {sync}"
            job = PaperJob(PRODUCTS if name == PRODUCTS.name else REDDIT, 6, 2, sync)
            yield _testbed_case(work, what, job, testbed(logical=logical), paper)
    job = PaperJob(PRODUCTS, 8, 2, "ring")
    yield _testbed_case(work, "plan/testbed, unequal GPUs, ring", job, unequal_testbed(), PAPER_UNEQUAL)
    name = "plan/testbed, unequal GPUs, ring, parts move"
    yield _testbed_case(work, name, job, unequal_testbed(), PAPER_UNEQUAL, moves=True)


def _testbed_case(
    work: Workload, name: str, job: PaperJob, cluster: PaperCluster, paper: float, *, moves: bool = False
) -> Case:
    @cache
    def problems() -> list[PlacementProblem]:
        orders = {cluster.in_order(np.array(order)).gbit: order for order in permutations(range(cluster.size))}
        picked = list(orders.values()) if work.sizes == FULL else list(orders.values())[:1]
        return [job.problem(cluster.in_order(np.array(order))) for order in picked]

    @cache
    def theirs(policy: str) -> list[float]:
        return [problem.simulate(distdgl_placement(problem), policy).seconds for problem in problems()]

    @cache
    def ours() -> list[float]:
        settings = USUAL if work.sizes == FULL else QUICK
        allowed = np.ones((cluster.size, cluster.size), dtype=bool) if moves else None
        given = [replace(problem, store_allowed=allowed) for problem in problems()]
        return [problem.simulate(search(problem, settings)).seconds for problem in given]

    @cache
    def mine() -> float:
        say(f"{name}: ETP + OES {_spread(ours())}, of all orders of machines")
        for policy in ("oes", "maxmin", "fifo", "fifo-blocking"):
            say(f"  DistDGL + {policy} {_spread(theirs(policy))}: ours takes {_less(ours(), theirs(policy))} less")
        return fmean(ours())

    def sides() -> dict[str, Side]:
        return {
            OURS: Side(mine),
            "DistDGL, FIFO": Side(lambda: fmean(theirs("fifo"))),
            "DistDGL, FIFO that blocks": Side(lambda: fmean(theirs("fifo-blocking"))),
            "DistDGL, OES": Side(lambda: fmean(theirs("oes"))),
        }

    versus = (
        beside("DistDGL, FIFO", paper), beside("DistDGL, FIFO that blocks", paper), Versus(("DistDGL, OES",)),
    )  # fmt: skip
    return Case(name, value("s"), sides, versus, repeats=1)


def on_draws(work: Workload) -> Iterator[Case]:
    """§VI-B: machines drawn as printed; draws where IFS finds nothing are drawn again."""
    for name, (_, _, paper, _) in _chosen(work):
        yield from _draw_cases(work, name, paper)


@cache
def _draws(name: str, count: int) -> tuple[list[PlacementProblem], int]:
    job, size, *_ = DRAWS[name]
    return fitting_draws(job, size, count, SEED)


@cache
def _placements(name: str, count: int) -> list[np.ndarray]:
    settings = QUICK if count == QUICK_DRAWS else USUAL
    return [search(problem, settings) for problem in _draws(name, count)[0]]


def _chosen(work: Workload) -> list[tuple[str, tuple[PaperJob, int, float, float]]]:
    return list(DRAWS.items())[: None if work.sizes == FULL else 1]


def _count(work: Workload) -> int:
    return NUM_DRAWS if work.sizes == FULL else QUICK_DRAWS


def _draw_cases(work: Workload, name: str, paper: float) -> Iterator[Case]:
    count = _count(work)

    @cache
    def times(placement: str, policy: str) -> list[float]:
        problems, _ = _draws(name, count)
        if placement == "distdgl":
            return [problem.simulate(distdgl_placement(problem), policy).seconds for problem in problems]
        places = _placements(name, count)
        return [problem.simulate(place, policy).seconds for problem, place in zip(problems, places, strict=True)]

    @cache
    def mine() -> float:
        refused = _draws(name, count)[1]
        say(f"plan/{name}: {count} draws that IFS finds a placement for, {refused} that it does not")
        for policy in ("oes", "maxmin"):
            before, after = times("distdgl", policy), times("etp", policy)
            worst = max(mine / theirs for mine, theirs in zip(after, before, strict=True))
            say(f"  {policy}: DistDGL {_spread(before)}, ETP {_spread(after)}, {_less(after, before)} less on average, "
                f"at worst {worst:.2f} times as long")  # fmt: skip
        return fmean(_ratios(times("etp", "oes"), times("distdgl", "oes")))

    def sides() -> dict[str, Side]:
        return {
            OURS: Side(mine),
            DISTDGL: Side(lambda: 1.0),
        }

    unit = value("of DistDGL's time")
    yield Case(f"plan/{name}, placement", unit, sides, (beside(DISTDGL, paper),), repeats=1)


def policies(work: Workload) -> Iterator[Case]:
    """OES beside other policies on ETP's placements."""
    others = ("maxmin", "omcoflow", "mrtf", "mrtf-blocking", "fifo", "fifo-blocking")
    for name, (_, _, _, paper) in _chosen(work):
        count = _count(work)

        @cache
        def times(policy: str, name: str = name, count: int = count) -> list[float]:
            places = _placements(name, count)
            problems, _ = _draws(name, count)
            return [problem.simulate(place, policy).seconds for problem, place in zip(problems, places, strict=True)]

        @cache
        def mine(times=times, name: str = name) -> float:  # type: ignore[no-untyped-def]
            for policy in others:
                most = max(1 - ratio for ratio in _ratios(times("oes"), times(policy)))
                less = _less(times("oes"), times(policy))
                say(f"plan/{name}: OES takes {less} less than {policy}, {most:.0%} at most")
            return fmean(times("oes"))

        def sides(times=times, mine=mine) -> dict[str, Side]:  # type: ignore[no-untyped-def]
            rest = {policy: Side(partial(_mean, times, policy)) for policy in others}
            return {OURS: Side(mine), **rest}

        def at_most(policy: str, times=times) -> float:  # type: ignore[no-untyped-def]
            return 1 / min(_ratios(times("oes"), times(policy)))

        def sides_at_most(at_most=at_most) -> dict[str, Side]:  # type: ignore[no-untyped-def]
            return {OURS: Side(lambda: 1.0), **{policy: Side(partial(at_most, policy)) for policy in MRTF}}

        versus = tuple(beside(policy, paper) if policy == "omcoflow" else Versus((policy,)) for policy in others)
        yield Case(f"plan/{name}, OES", value("s"), sides, versus, repeats=1)
        most = tuple(beside(policy, MOST_BESIDE_MRTF, "up to ") for policy in MRTF)
        yield Case(f"plan/{name}, OES at best", value("of OES's time"), sides_at_most, most, repeats=1)


def readings(work: Workload) -> Iterator[Case]:
    """§VI-B, 16 machines, by several readings of what is not printed. The floor is under every placement."""
    job, size, paper, _ = DRAWS["16 machines"] if work.sizes == FULL else DRAWS["8 machines"]
    count = 6 if work.sizes == FULL else 1
    ring, bounded = replace(job, sync="ring"), replace(job, ahead=4)
    for what, chosen, logical, pack, policy in (
        ("cores as printed", job, False, False, "oes"),
        ("cores as printed, ring", ring, False, False, "oes"),
        ("cores as printed, 4 batches ahead", bounded, False, False, "oes"),
        ("logical cores", job, True, False, "oes"),
        ("logical cores, ring", ring, True, False, "oes"),
        ("logical cores, 4 batches ahead", bounded, True, False, "oes"),
        ("logical cores, DistDGL fills machines", job, True, True, "oes"),
        ("logical cores, max-min", job, True, False, "maxmin"),
    )[: None if work.sizes == FULL else 1]:

        @cache
        def figures(  # type: ignore[no-untyped-def]
            chosen=chosen, logical=logical, pack=pack, policy=policy, what=what
        ) -> tuple[list[float], list[float]]:
            problems, refused = fitting_draws(chosen, size, count, SEED, logical=logical)
            settings = USUAL if work.sizes == FULL else QUICK
            ours, floors, before = [], [], []
            for problem in problems:
                given = replace(problem, policy=policy)
                theirs = given.simulate(distdgl_placement(given, pack=pack)).seconds
                before.append(theirs)
                ours.append(given.simulate(search(given, settings)).seconds / theirs)
                floors.append(placement_floor(given) / theirs)
            say(
                f"plan/readings, {what}: {refused} drawn again, DistDGL {_spread(before)}, ours takes "
                f"{1 - fmean(ours):.1%} less, no placement takes more than {1 - fmean(floors):.1%} less"
            )
            return ours, floors

        def sides(figures=figures) -> dict[str, Side]:  # type: ignore[no-untyped-def]
            return {
                OURS: Side(lambda: fmean(figures()[0])),
                DISTDGL: Side(lambda: 1.0),
                "floor": Side(lambda: fmean(figures()[1])),
            }

        versus = (beside(DISTDGL, paper), Versus(("floor",), label="no placement"))
        yield Case(f"plan/readings, {what}", value("of DistDGL's time"), sides, versus, repeats=1)


def batches_and_peaks(work: Workload) -> Iterator[Case]:
    """Fig. 10 and 11: other batch sizes per sampler, other ratios of the largest flow to the mean one; DistDGL's
    placement, and other policies on ours."""
    others = ("omcoflow", "mrtf", "mrtf-blocking", "fifo", "fifo-blocking", "maxmin")
    count = 3 if work.sizes == FULL else 1
    for name, (job, size, *_) in _chosen(work):
        changes: list[tuple[str, PaperJob, float | None]] = [
            (f"Fig. 10, {batch} seeds per sampler", job.with_batch(batch), None) for batch in (250, 500, 1000, 2000)
        ]
        changes += [(f"Fig. 11, largest flow {ratio} of the mean", job, ratio) for ratio in (1.0, 1.2, 1.5, 2.0, 3.0)]
        for what, changed, ratio in changes if work.sizes == FULL else changes[:1]:

            @cache
            def problems(changed=changed, ratio=ratio, size=size) -> list[PlacementProblem]:  # type: ignore[no-untyped-def]
                return fitting_draws(changed, size, count, SEED, peak_to_mean=ratio)[0]

            @cache
            def places(problems=problems) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
                return [search(problem, USUAL if work.sizes == FULL else QUICK) for problem in problems()]

            @cache
            def times(policy: str, problems=problems, places=places) -> list[float]:  # type: ignore[no-untyped-def]
                return [p.simulate(place, policy).seconds for p, place in zip(problems(), places(), strict=True)]

            @cache
            def theirs(problems=problems) -> list[float]:  # type: ignore[no-untyped-def]
                return [problem.simulate(distdgl_placement(problem)).seconds for problem in problems()]

            @cache
            def mine(name=name, what=what, times=times, theirs=theirs) -> float:  # type: ignore[no-untyped-def]
                told = ", ".join(f"{_less(times('oes'), times(policy))} than {policy}" for policy in others)
                say(f"plan/{name}, {what}: takes {_less(times('oes'), theirs())} less than DistDGL's placement, {told}")
                return fmean(times("oes"))

            def sides(mine=mine, times=times, theirs=theirs) -> dict[str, Side]:  # type: ignore[no-untyped-def]
                rest = {policy: Side(partial(_mean, times, policy)) for policy in others}
                return {OURS: Side(mine), DISTDGL: Side(lambda: fmean(theirs())), **rest}

            versus = tuple(Versus((side,)) for side in (DISTDGL, *others))
            yield Case(f"plan/{name}, {what}", value("s"), sides, versus, repeats=1)


def _mean(figures: Callable[[str], list[float]], policy: str) -> float:
    return fmean(figures(policy))


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _less(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{1 - fmean(_ratios(ours, theirs)):.1%}"


def _spread(times: Sequence[float]) -> str:
    around = f" ± {stdev(times):.2f}" if len(times) > 1 else ""
    return f"{fmean(times):.2f}{around} s ({min(times):.2f} to {max(times):.2f})"


BENCHMARKS: list[Benchmark] = [on_testbed, on_draws, readings, policies, batches_and_peaks]
