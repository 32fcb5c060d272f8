"""The rates of `gnnsys bench dist`, predicted: one profile and one run on links without limits, then slower links."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from gnnsys.bench.case import OURS, Case, Versus
from gnnsys.bench.dist.inputs import TWO_LEVEL, make_parts
from gnnsys.bench.dist.phase import Phase
from gnnsys.bench.dist.run_job import PhaseFigures, run_job
from gnnsys.bench.dist.settings import QUICK, DistSettings
from gnnsys.bench.lab_jobs import LabJobs, SideFigures, check_lab, job_case, say
from gnnsys.bench.plan.lab import FREE, PERCENT, SECONDS
from gnnsys.bench.plan.lab_job import LabForecast, dry_job, fitted_profile, forecast
from gnnsys.bench.plan.lab_placements import LabPlacement, LabRates
from gnnsys.bench.workload import Workload
from gnnsys.lab import parse_rate
from gnnsys.planning import Cluster, JobProfile
from gnnsys.profiling import profile_parts

WARM = 4
BATCHES = 12  # of each trainer, for the profile
MOST_ERROR = 10.0


class DistLab(LabJobs[DistSettings]):
    """The job of `bench dist` on its own parts, which `--cache` shares with it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, DistSettings, QUICK)

    def measured(self, rate: str) -> PhaseFigures:
        found: dict[str, PhaseFigures] = self._once("lab/dist", self._run)
        return found[rate]

    def said(self, rate: str) -> LabForecast:
        found: LabForecast = self._once(
            f"lab/dist/forecast/{rate}", lambda: forecast(self._profile(), self._cluster(rate), self._placement())
        )
        return found

    def seconds(self, rate: str) -> float:
        """Predicted, of an epoch of so many steps as the suite has."""
        profile, settings = self._profile(), self.settings
        return self.said(rate).seconds * settings.steps / profile.batches_per_epoch(settings.hosts * settings.trainers)

    def took(self, rate: str) -> float:
        return self.measured(rate).seconds

    def error(self, rate: str) -> float:
        """Percent."""
        return 100 * abs(self.seconds(rate) - self.took(rate)) / self.took(rate)

    def _placement(self) -> LabPlacement:
        hosts = self.settings.hosts
        return LabPlacement.of("dist", [[host] for host in range(hosts)], [self.settings.trainers] * hosts)

    def _cluster(self, rate: str) -> Cluster:
        settings = self.settings
        rates = LabRates(name=rate, rates=(None if rate == FREE else rate,) * settings.hosts)
        return rates.cluster([settings.cpu] * settings.hosts, [settings.trainers] * settings.hosts)

    def _parts(self) -> Path:
        return make_parts(self._workload.folder, self.settings, TWO_LEVEL, self.settings.hosts)

    def _profile(self) -> JobProfile:
        def make() -> JobProfile:
            settings, placement = self.settings, self._placement()
            counted = profile_parts(
                self._parts(), dry_job(settings.fanouts, settings.batch_size), hidden=settings.hidden,
                trainers=placement.num_trainers, num_batches=BATCHES,
            )  # fmt: skip
            used = np.array(list(self.measured(FREE).cpu_seconds.values()))
            said = forecast(counted, self._cluster(FREE), placement)
            return fitted_profile(counted, placement, said, used, settings.steps)

        found: JobProfile = self._once("lab/dist/profile", make)
        return found

    def _run(self) -> dict[str, PhaseFigures]:
        """From slow links to fast ones, as `bench dist` does."""
        check_lab()
        settings = self.settings
        phases = [Phase(name=rate, rate=rate, warm=WARM) for rate in sorted(settings.rates, key=parse_rate)]
        found = run_job(
            self._folder / "lab-dist", self._parts(), [*phases, Phase(name=FREE, warm=WARM)],
            settings.task(settings.hosts), cpu=settings.cpu,
        )  # fmt: skip
        for figures in found.values():
            say(f"  dist, {figures.describe()}")
        return found


def dist_rates(workload: Workload) -> Iterator[Case]:
    """Seconds of an epoch, predicted beside measured, and by how many percent they differ."""
    jobs: DistLab = workload.once("plan/lab/dist", lambda: DistLab(workload))
    for rate in jobs.settings.rates:
        sides: SideFigures = {OURS: partial(jobs.seconds, rate), "measured": partial(jobs.took, rate)}
        yield job_case(f"lab/dist at {rate}", SECONDS, sides, Versus(("measured",), required=False))
        error: SideFigures = {OURS: partial(jobs.error, rate), "bound": lambda: MOST_ERROR}
        yield job_case(f"lab/dist at {rate}, error", PERCENT, error, Versus(("bound",), 1.0))


BENCHMARKS = [dist_rates]
