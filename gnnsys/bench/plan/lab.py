"""An epoch predicted from one profile, beside the same job on hosts of the lab: placements and rates of links.

The profile is counted without a run. One placement is run: it says how much core time the machine takes beside what
was timed, and how long queues are. From these every other placement is predicted at every rate as `gnnsys plan` does.
That one placement is never among those that are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from gnnsys.bench.case import OURS, Case, Versus, score, value
from gnnsys.bench.dist.run_job import PhaseFigures
from gnnsys.bench.lab_jobs import NOTHING, LabJobs, SideFigures, check_lab, job_case, say
from gnnsys.bench.plan.lab_job import (
    LabForecast,
    LabJobSettings,
    counted_profile,
    fit_queues,
    fitted_profile,
    forecast,
    make_lab_parts,
)
from gnnsys.bench.plan.lab_placements import LabPlacement, LabRates, run_placement
from gnnsys.bench.workload import Workload
from gnnsys.planning import Cluster, JobProfile, PlaceOptions, place_job

FREE, UNEQUAL, SLOW = "unlimited", "unequal", "slow"
PLAN = "plan"
SECONDS, MEGABYTES, PERCENT = value("s"), value("MB"), value("%")
WARM = 4
MEDIAN_ERROR, WORST_ERROR, LINK_ERROR, LEAST_KENDALL = 10.0, 20.0, 3.0, 0.8
APART = 0.05  # of the longer one's seconds: a phase that is run again differs by up to that much
LESS_THAN_EVEN, NEAR_BEST, NEAR_EVEN = 1 / 0.8, 1 / 1.05, 1 / 1.02  # least ratios of others' seconds and the plan's


@dataclass(frozen=True, kw_only=True)
class PlanLabSettings(LabJobSettings):
    """`rates`: of the hosts in turn. `epochs` of a phase are measured. `seed`: of the placements that are drawn,
    `num_even` orders of hosts for `even` and `num_drawn` others: nobody has chosen them."""

    suite = "plan"

    num_nodes: int = 60_000
    num_classes: int = 8
    avg_degree: float = 12.0
    homophily: float = 0.9
    num_features: int = 512
    hosts: int = 4
    cpu: float = 0.3
    parts: int = 8
    trainers: int = 6
    batch_size: int = 100
    fanouts: tuple[int, ...] = (10, 5)
    hidden: int = 64
    rates: tuple[str, ...] = ("250mbit", "250mbit", "50mbit", "50mbit")
    slow: str = "50mbit"
    epochs: int = 2
    batches: int = 40
    train: float = 0.1
    num_even: int = 3
    num_drawn: int = 3
    seed: int = 10

    def __post_init__(self) -> None:
        if len(self.rates) != self.hosts:
            raise ValueError(f"rates must be of {self.hosts} hosts, got {len(self.rates)}")
        if not self.hosts <= self.trainers <= 2 * self.hosts or self.parts < self.hosts:
            raise ValueError(
                f"trainers must be from {self.hosts} to {2 * self.hosts} and parts at least {self.hosts}, got "
                f"{self.trainers} and {self.parts}"
            )

    @property
    def cpus(self) -> list[float]:
        return [self.cpu] * self.hosts

    def calibrating(self) -> LabPlacement:
        """Parts in blocks, two trainers on the first hosts."""
        extra = self.trainers - self.hosts
        blocks = np.array_split(np.arange(self.parts), self.hosts)
        ranks = [2 if host < extra else 1 for host in range(self.hosts)]
        return LabPlacement.of("calibrating", [block.tolist() for block in blocks], ranks)

    def even(self) -> list[LabPlacement]:
        """A rendezvous numbers machines as it likes, so `even` depends on the order."""
        orders = [np.random.default_rng([self.seed, n]).permutation(self.hosts) for n in range(self.num_even)]
        return [
            LabPlacement.even(f"even {n}", self.parts, self.trainers, order.tolist())
            for n, order in enumerate(orders, start=1)
        ]

    def held_out(self) -> list[LabPlacement]:
        """What errors are counted of: none of them was run before the model was written down."""
        drawn = [
            LabPlacement.drawn(f"drawn {n}", self.parts, self.trainers, self.hosts, self.seed + n)
            for n in range(1, self.num_drawn + 1)
        ]
        return [*self.even(), *drawn]

    def all_rates(self) -> list[LabRates]:
        return [
            LabRates(name=FREE, rates=(None,) * self.hosts),
            LabRates(name=UNEQUAL, rates=tuple(self.rates)),
            LabRates(name=SLOW, rates=(self.slow,) * self.hosts),
        ]

    def rates_of(self, name: str) -> LabRates:
        return next(rates for rates in self.all_rates() if rates.name == name)

    def cluster(self, rates: str, queues: float = 1.0) -> Cluster:
        return self.rates_of(rates).cluster(self.cpus, [2] * self.hosts, queues)


QUICK = {
    "num_nodes": 8000,
    "num_classes": 4,
    "num_features": 16,
    "hosts": 2,
    "cpu": 0.6,
    "parts": 4,
    "trainers": 3,
    "rates": ("100mbit", "20mbit"),
    "slow": "20mbit",
    "epochs": 1,
    "batches": 10,
    "num_even": 1,
    "num_drawn": 1,
}


class PlanLab(LabJobs[PlanLabSettings]):
    """The jobs, each run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, PlanLabSettings, QUICK)

    def measured(self, placement: LabPlacement, rates: str) -> PhaseFigures:
        """Of a placement that is judged, at one of all rates."""
        found: dict[str, PhaseFigures] = self._once(
            f"lab/{placement.name}", lambda: self._run(placement, self.settings.all_rates())
        )
        return found[rates]

    def said(self, placement: LabPlacement, rates: str) -> LabForecast:
        cluster, profile = self.cluster(rates), self.profile()
        found: LabForecast = self._once(
            f"lab/forecast/{placement.name}/{rates}", lambda: forecast(profile, cluster, placement)
        )
        return found

    def plan(self, rates: str) -> LabPlacement:
        """What `gnnsys plan` chooses where trainers sample for themselves."""

        def make() -> LabPlacement:
            settings = self.settings
            plan = place_job(self.cluster(rates), self.profile(), settings.trainers, PlaceOptions(samplers=0))
            say(f"  plan for {rates} links: {plan.forecast.seconds_per_epoch:.2f} s; {plan.forecast.binds}")
            for host in plan.hosts:
                say(f"    {host.name}: {host.num_trainers} trainers, parts {' '.join(map(str, host.parts)) or '-'}")
            return LabPlacement(name=f"{PLAN} {rates}", hosts=plan.hosts)

        found: LabPlacement = self._once(f"lab/plan/{rates}", make)
        return found

    def plan_seconds(self, rates: str) -> float:
        """Of the plan for these rates, measured."""
        found: dict[str, PhaseFigures] = self._once(
            f"lab/run/{PLAN}/{rates}", lambda: self._run(self.plan(rates), [self.settings.rates_of(rates)])
        )
        return found[rates].seconds

    def profile(self) -> JobProfile:
        """Counted without a run, with core-seconds as many times as many as the calibrating placement took."""
        return self._calibrated()[0]

    def cluster(self, rates: str) -> Cluster:
        """The lab at these rates, with queues as long as those that the calibrating placement met."""
        return self.settings.cluster(rates, self._calibrated()[1])

    def _calibrated(self) -> tuple[JobProfile, float]:
        found: tuple[JobProfile, float] = self._once("lab/calibrated", self._calibrate)
        return found

    def _calibrate(self) -> tuple[JobProfile, float]:
        """Core time is fitted on links without limits, the length of queues on the others."""
        settings, first = self.settings, self.settings.calibrating()
        counted = counted_profile(self._parts(), settings)
        took = self._run(first, settings.all_rates())
        used = np.array(list(took[FREE].cpu_seconds.values()))
        profile = fitted_profile(counted, first, forecast(counted, settings.cluster(FREE), first), used)

        def ratio(times: float) -> float:
            said = [forecast(profile, settings.cluster(rates, times), first).seconds for rates in (UNEQUAL, SLOW)]
            return mean(one / took[rates].seconds for one, rates in zip(said, (UNEQUAL, SLOW), strict=True))

        queues = fit_queues(ratio)
        say(f"  queues are {queues:.2f} times as long as full buckets would be; without the factor {ratio(1.0):.2f}")
        return profile, queues

    def _parts(self) -> Path:
        return make_lab_parts(self._workload.folder, self.settings)

    def _run(self, placement: LabPlacement, rates: Sequence[LabRates]) -> dict[str, PhaseFigures]:
        check_lab()
        settings = self.settings
        folder = self._folder / f"lab-{placement.name.replace(' ', '-')}"
        found = run_placement(
            folder, self._parts(), placement, rates, settings.task(), cpus=settings.cpus, warm=WARM,
            epochs=settings.epochs,
        )  # fmt: skip
        for figures in found.values():
            say(f"  {placement.name}, {figures.describe()}")
        return found

    def pairs(self) -> list[tuple[str, float, float]]:
        """Name, seconds that were predicted, and that were measured, of every placement that was held out."""
        return [
            (
                f"{place.name}/{rates.name}",
                self.said(place, rates.name).seconds,
                self.measured(place, rates.name).seconds,
            )
            for place in self.settings.held_out()
            for rates in self.settings.all_rates()
        ]

    def errors(self) -> np.ndarray:
        """Percent of the epoch's seconds, of every pair of placement and rates."""
        return np.array([100 * abs(said - took) / took for _, said, took in self.pairs()])

    def link_errors(self) -> np.ndarray:
        """Percent of the bytes into every host, of every pair."""
        found = []
        for placement in self.settings.held_out():
            for rates in self.settings.all_rates():
                figures = self.measured(placement, rates.name)
                took = np.array([t.bytes_in for t in figures.traffic.values()]) / figures.phase.epochs
                found.append(100 * np.abs(self.said(placement, rates.name).bytes_in - took) / took)
        return np.concatenate(found)

    def kendall(self, apart: float) -> float:
        return kendall(self.pairs(), apart)

    def even_seconds(self, rates: str) -> float:
        """The mean of what `even` takes in several orders of hosts."""
        return mean(self.measured(placement, rates).seconds for placement in self.settings.even())

    def best_seconds(self, rates: str) -> float:
        """Of all that were measured at these rates, the plan too."""
        others = [self.measured(placement, rates).seconds for placement in self.settings.held_out()]
        return min(self.plan_seconds(rates), *others)


def lab(workload: Workload) -> Iterator[Case]:
    """Predicted beside measured: epochs, their order, and bytes of links, of placements that were held out."""
    jobs = _jobs(workload)
    for placement in jobs.settings.held_out():
        for rates in jobs.settings.all_rates():
            yield from _pair(jobs, placement, rates.name)
    bounds: Sequence[tuple[str, Any, float]] = (
        ("error in the median", lambda: median(jobs.errors()), MEDIAN_ERROR),
        ("error at worst", lambda: float(jobs.errors().max()), WORST_ERROR),
        ("bytes into a host, error in the median", lambda: median(jobs.link_errors()), LINK_ERROR),
        ("bytes into a host, error at worst", lambda: float(jobs.link_errors().max()), LINK_ERROR),
    )
    for name, figure, bound in bounds:
        sides = {OURS: figure, "bound": lambda bound=bound: bound}
        yield job_case(f"lab/{name}", PERCENT, sides, Versus(("bound",), 1.0))
    for name, apart in (("Kendall of the order", 0.0), (f"Kendall of those {100 * APART:g}% apart", APART)):
        order: SideFigures = {OURS: partial(jobs.kendall, apart), "bound": lambda: LEAST_KENDALL}
        yield job_case(f"lab/{name}", score("tau"), order, Versus(("bound",), 1.0 if not apart else None))


def _pair(jobs: PlanLab, placement: LabPlacement, rates: str) -> Iterator[Case]:
    figures = {
        OURS: lambda: jobs.said(placement, rates).seconds,
        "measured": lambda: jobs.measured(placement, rates).seconds,
    }
    yield job_case(f"lab/{placement.name}/{rates}", SECONDS, figures, Versus(("measured",), required=False))
    moved = {OURS: lambda: jobs.measured(placement, rates).busiest_bytes / 1e6}
    yield job_case(f"lab/{placement.name}/{rates}/bytes of the busiest link", MEGABYTES, moved, NOTHING)


def plans(workload: Workload) -> Iterator[Case]:
    """What the plan takes, measured, beside `even` placements and the best of all; on unequal links and equal ones."""
    jobs = _jobs(workload)
    for rates, name, figure, target in (
        (UNEQUAL, "the mean of even", jobs.even_seconds, LESS_THAN_EVEN),
        (UNEQUAL, "the best measured", jobs.best_seconds, NEAR_BEST),
        (SLOW, "the mean of even", jobs.even_seconds, NEAR_EVEN),
    ):
        figures = {OURS: partial(jobs.plan_seconds, rates), name: partial(figure, rates)}
        yield job_case(f"lab/plan for {rates} links beside {name}", SECONDS, figures, Versus((name,), target))
    said = {
        OURS: lambda: jobs.said(jobs.plan(UNEQUAL), UNEQUAL).seconds,
        "measured": lambda: jobs.plan_seconds(UNEQUAL),
    }
    yield job_case("lab/plan for unequal links, predicted", SECONDS, said, Versus(("measured",), required=False))


def _jobs(workload: Workload) -> PlanLab:
    jobs: PlanLab = workload.once("plan/lab", lambda: PlanLab(workload))
    return jobs


def kendall(pairs: Sequence[tuple[str, float, float]], apart: float = 0.0) -> float:
    """Kendall's tau of predicted and measured seconds; a pair that is equal in one of them counts as neither. Only of
    those whose measured seconds differ by more than the share `apart`.

    >>> kendall([("a", 1.0, 2.0), ("b", 2.0, 3.0), ("c", 3.0, 2.5)])
    0.3333333333333333
    """
    signs = [
        np.sign((one[1] - other[1]) * (one[2] - other[2]))
        for one, other in combinations(pairs, 2)
        if abs(one[2] - other[2]) >= apart * max(one[2], other[2])
    ]
    return float(np.mean(signs)) if signs else 1.0


BENCHMARKS = [lab, plans]
