"""Samplers elsewhere: trainers on small hosts, beside hosts with more cores that have no trainer.

Trainers that sample for themselves are run, core time is fitted to that run, and `gnnsys plan` is asked: on links
without limits, where it should use samplers, and on slow ones, where it should not. What it says is then run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gnnsys.bench.case import OURS, Case, Versus, score
from gnnsys.bench.dist.run_job import PhaseFigures
from gnnsys.bench.lab_jobs import LabJobs, check_lab, job_case, say
from gnnsys.bench.plan.lab import SECONDS
from gnnsys.bench.plan.lab_job import LabJobSettings, counted_profile, fitted_profile, forecast, make_lab_parts
from gnnsys.bench.plan.lab_placements import LabPlacement, LabRates, run_placement
from gnnsys.bench.workload import Workload
from gnnsys.planning import Cluster, JobProfile, PlacementPlan, PlaceOptions, place_job

FREE, SLOW = "unlimited", "50mbit"
WARM = 4
FASTER = 1.3
USED = score("samplers")


@dataclass(frozen=True, kw_only=True)
class SamplersLabSettings(LabJobSettings):
    """A trainer on each of the first two hosts, which have `cpu`; two more hosts have `sampler_cpu` and the parts."""

    suite = "plan"

    num_nodes: int = 60_000
    num_classes: int = 8
    avg_degree: float = 12.0
    homophily: float = 0.9
    num_features: int = 64
    hosts: int = 4
    cpu: float = 0.3
    sampler_cpu: float = 0.6
    parts: int = 4
    trainers: int = 2
    batch_size: int = 100
    fanouts: tuple[int, ...] = (10, 10, 5)
    hidden: int = 16
    epochs: int = 3
    batches: int = 40
    train: float = 0.1

    @property
    def cpus(self) -> list[float]:
        return [self.cpu] * 2 + [self.sampler_cpu] * 2

    def alone(self) -> LabPlacement:
        """Trainers sample for themselves, the other hosts serve the parts."""
        half = self.parts // 2
        parts: list[list[int]] = [[], [], list(range(half)), list(range(half, self.parts))]
        return LabPlacement.of("alone", parts, [1, 1, 0, 0])

    def rates_of(self, name: str) -> LabRates:
        return LabRates(name=name, rates=(None if name == FREE else name,) * self.hosts)

    def cluster(self, rates: str) -> Cluster:
        return self.rates_of(rates).cluster(self.cpus, [1, 1, 0, 0])


QUICK = {"num_nodes": 8000, "num_classes": 4, "num_features": 16, "epochs": 1, "batches": 10, "fanouts": (5, 5)}


class SamplersLab(LabJobs[SamplersLabSettings]):
    """The jobs, each run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, SamplersLabSettings, QUICK)

    def alone(self, rates: str) -> PhaseFigures:
        found: dict[str, PhaseFigures] = self._once("lab/samplers/alone", lambda: self._run(self.settings.alone()))
        return found[rates]

    def with_samplers(self, rates: str) -> PhaseFigures:
        """The plan for links without limits, at these rates."""

        def run() -> dict[str, PhaseFigures]:
            return self._run(LabPlacement(name="samplers", hosts=self.plan(FREE).hosts))

        found: dict[str, PhaseFigures] = self._once("lab/samplers/run", run)
        return found[rates]

    def plan(self, rates: str) -> PlacementPlan:
        def make() -> PlacementPlan:
            plan = place_job(self.settings.cluster(rates), self.profile(), self.settings.trainers, PlaceOptions())
            said = plan.forecast
            say(f"  plan at {rates}: {plan.num_samplers} samplers, {said.seconds_per_epoch:.2f} s; {said.binds}")
            for host in plan.hosts:
                say(f"    {host.name}: {host.num_trainers} trainers, parts {host.parts}, samplers {host.samplers}")
            return plan

        found: PlacementPlan = self._once(f"lab/samplers/plan/{rates}", make)
        return found

    def without(self, rates: str) -> float:
        """Seconds that the best plan without samplers would take, predicted."""
        settings = self.settings
        plan = place_job(settings.cluster(rates), self.profile(), settings.trainers, PlaceOptions(samplers=0))
        return plan.forecast.seconds_per_epoch

    def profile(self) -> JobProfile:
        def make() -> JobProfile:
            settings = self.settings
            counted = counted_profile(make_lab_parts(self._workload.folder, settings), settings)
            used = np.array(list(self.alone(FREE).cpu_seconds.values()))
            said = forecast(counted, settings.cluster(FREE), settings.alone())
            return fitted_profile(counted, settings.alone(), said, used)

        found: JobProfile = self._once("lab/samplers/profile", make)
        return found

    def _run(self, placement: LabPlacement) -> dict[str, PhaseFigures]:
        check_lab()
        settings = self.settings
        found = run_placement(
            self._folder / f"lab-{placement.name}",
            make_lab_parts(self._workload.folder, settings),
            placement,
            [settings.rates_of(SLOW), settings.rates_of(FREE)],
            settings.task(),
            cpus=settings.cpus,
            warm=WARM,
            epochs=settings.epochs,
        )
        for figures in found.values():
            say(f"  {placement.name}, {figures.describe()}")
        return found


def samplers(workload: Workload) -> Iterator[Case]:
    """The plan beside trainers that sample for themselves, and whether it uses samplers where they pay."""
    jobs: SamplersLab = workload.once("plan/lab/samplers", lambda: SamplersLab(workload))
    alone = "trainers sample for themselves"
    for rates, target in ((FREE, FASTER), (SLOW, None)):
        sides: dict[str, Any] = {
            OURS: lambda rates=rates: jobs.with_samplers(rates).seconds,
            alone: lambda rates=rates: jobs.alone(rates).seconds,
        }
        yield job_case(
            f"lab/samplers elsewhere/{rates}", SECONDS, sides, Versus((alone,), target, required=target is not None)
        )
    predicted: dict[str, Any] = {
        OURS: lambda: jobs.plan(FREE).forecast.seconds_per_epoch,
        "measured": lambda: jobs.with_samplers(FREE).seconds,
    }
    yield job_case(
        f"lab/samplers elsewhere/{FREE}, predicted", SECONDS, predicted, Versus(("measured",), required=False)
    )
    sides = {OURS: lambda: jobs.plan(FREE).forecast.seconds_per_epoch, "without samplers": partial(jobs.without, FREE)}
    yield job_case(
        "lab/samplers elsewhere/the best plans, predicted",
        SECONDS,
        sides,
        Versus(("without samplers",), required=False),
    )
    used = {OURS: lambda: float(jobs.plan(FREE).num_samplers > 0), "wanted": lambda: 1.0}
    yield job_case(f"lab/samplers elsewhere/{FREE}, the plan uses them", USED, used, Versus(("wanted",), 1.0))
    unused = {OURS: lambda: float(jobs.plan(SLOW).num_samplers == 0), "wanted": lambda: 1.0}
    yield job_case(f"lab/samplers elsewhere/{SLOW}, the plan does not", USED, unused, Versus(("wanted",), 1.0))


BENCHMARKS = [samplers]
