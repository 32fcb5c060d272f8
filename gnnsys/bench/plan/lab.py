"""An epoch predicted from one profile, beside the same job on hosts of the lab: placements and rates of links.

The profile is counted without a run; one run on links without limits says how much core time the machine takes beside
what was timed. From these two every placement is predicted at every rate, before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gnnsys.bench.case import OURS, Case, Versus, score, value
from gnnsys.bench.communities import CommunitySettings, make_graph, task_folder
from gnnsys.bench.dist.run_job import PhaseFigures
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import NOTHING, LabJobs, check_lab, job_case, say
from gnnsys.bench.plan.lab_placements import LabPlacement, LabRates, run_placement
from gnnsys.bench.workload import Workload
from gnnsys.graph import MANIFEST, load
from gnnsys.observe import UNLIMITED
from gnnsys.partition import partition_graph
from gnnsys.planning import Cluster, JobProfile, fit_work, machines_of, queue_delays, simulate
from gnnsys.profiling import DryJob, profile_parts

FREE = "unlimited"
SECONDS, MEGABYTES, PERCENT = value("s"), value("MB"), value("%")
ITERATIONS = 60  # that are simulated
QUEUE = 0.025  # seconds; the lab's buckets hold 50 ms. Set from earlier runs of these placements, not measured here
_TURNS = 3
MEDIAN_ERROR, WORST_ERROR, LINK_ERROR, LEAST_KENDALL = 10.0, 20.0, 3.0, 0.8


@dataclass(frozen=True, kw_only=True)
class PlanLabSettings(CommunitySettings):
    """`rates`: of the hosts in turn, fast ones first. `epochs` of a phase are measured."""

    suite = "plan"

    num_nodes: int = 60_000
    num_classes: int = 8
    avg_degree: float = 12.0
    homophily: float = 0.9
    num_features: int = 64
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

    def __post_init__(self) -> None:
        if len(self.rates) != self.hosts:
            raise ValueError(f"rates must be of {self.hosts} hosts, got {len(self.rates)}")
        if not self.hosts <= self.trainers <= 2 * self.hosts or self.parts < self.hosts:
            raise ValueError(
                f"trainers must be from {self.hosts} to {2 * self.hosts} and parts at least {self.hosts}, got "
                f"{self.trainers} and {self.parts}"
            )

    @property
    def graph(self) -> dict[str, Any]:
        return super().graph | {"train": 0.2}

    def task(self) -> Task:
        return Task(
            graph=self.graph, num_hosts=self.hosts, trainers_per_host=1, batch_size=self.batch_size,
            fanouts=self.fanouts, hidden=self.hidden,
        )  # fmt: skip

    def placements(self) -> list[LabPlacement]:
        """Two trainers on fast hosts or on slow ones, parts in blocks, scattered, or most of them on fast hosts."""
        hosts, extra = self.hosts, self.trainers - self.hosts
        first = tuple(2 if host < extra else 1 for host in range(hosts))
        blocks = [[p for p in range(self.parts) if p * hosts // self.parts == host] for host in range(hosts)]
        scattered = [list(range(host, self.parts, hosts)) for host in range(hosts)]
        few = [self.parts - 1 - host for host in range(hosts // 2)]  # one part for each slow host
        rest = [part for part in range(self.parts) if part not in few]
        fast = hosts - len(few)
        most = [[part for part in rest if part * fast // len(rest) == host] for host in range(fast)]
        most += [[part] for part in reversed(few)]
        made = [
            ("blocks", blocks, first),
            ("trainers on slow hosts", blocks, first[::-1]),
            ("scattered", scattered, first),
            ("parts on fast hosts", most, first),
        ]
        return [LabPlacement(name=name, parts=tuple(map(tuple, parts)), ranks=ranks) for name, parts, ranks in made]

    def all_rates(self) -> list[LabRates]:
        hosts = self.hosts
        return [
            LabRates(name=FREE, rates=(None,) * hosts),
            LabRates(name="unequal", rates=tuple(self.rates)),
            LabRates(name="slow", rates=(self.slow,) * hosts),
        ]

    def cluster(self, rates: LabRates) -> Cluster:
        told = [
            {"name": f"h{host + 1}", "cores": self.cpu, "rate": rate or UNLIMITED}
            for host, rate in enumerate(rates.rates)
        ]
        return Cluster.from_json(told)


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
}


@dataclass(frozen=True)
class Forecast:
    """Of an epoch: seconds, bytes into each host, core-seconds of each host, and what binds."""

    seconds: float
    bytes_in: np.ndarray
    core_seconds: np.ndarray
    binds: str


def forecast(profile: JobProfile, cluster: Cluster, placement: LabPlacement) -> Forecast:
    """What the simulator says of a placement, with seeds dealt as a run deals them.

    Links have queues, which a ring's small messages wait in for as long as others fill them: how full they are is known
    when it was simulated, so it is simulated again with what was found.
    """
    trainers, num_hosts = sum(placement.ranks), len(cluster)
    machine_of_part = placement.machine_of_part
    machine_of_worker, shares = profile.dealt(machine_of_part, placement.ranks)
    placed, machines = [*machine_of_part, *machine_of_worker], machines_of(cluster)
    limits = np.array([host.rate_in for host in cluster])
    delays: list[float] | None = None
    for _ in range(_TURNS):
        tasks, demands = profile.as_tasks(
            trainers, iterations=ITERATIONS, sync="ring", placement=(machine_of_part, machine_of_worker),
            shares=shares, step_delays=delays,
        )  # fmt: skip
        run = simulate(machines, tasks, placed, demands, "maxmin")
        ends = np.maximum.accumulate(run.times.task_end[:, tasks.ids("worker")].max(1))
        edge = min(profile.ahead, ITERATIONS // 4)  # where samplers begin, and have ended before the workers
        step = float(ends[-1 - edge] - ends[edge]) / (ITERATIONS - 1 - 2 * edge)
        carried = run.link_bytes()[num_hosts : 2 * num_hosts] / ITERATIONS
        delays = queue_delays(machine_of_worker, np.minimum(1.0, carried / limits / step), QUEUE)
    steps = profile.batches_per_epoch(trainers)
    cores = np.bincount(
        tasks.machine_of(placed, num_hosts), (demands.seconds * demands.threads).mean(0), minlength=num_hosts
    )
    return Forecast(step * steps, carried * steps, cores * steps, run.binding().lines()[0])


class PlanLab(LabJobs[PlanLabSettings]):
    """The jobs, each run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, PlanLabSettings, QUICK)

    def measured(self, placement: LabPlacement) -> dict[str, PhaseFigures]:
        found: dict[str, PhaseFigures] = self._once(f"lab/{placement.name}", lambda: self._run(placement))
        return found

    def forecasts(self, placement: LabPlacement) -> dict[str, Forecast]:
        settings, profile = self.settings, self.profile()
        found: dict[str, Forecast] = self._once(
            f"lab/forecast/{placement.name}",
            lambda: {each.name: forecast(profile, settings.cluster(each), placement) for each in settings.all_rates()},
        )
        return found

    def profile(self) -> JobProfile:
        """Counted without a run, with core-seconds as many times as many as the first placement took without limits."""
        found: JobProfile = self._once("lab/profile", self._profile)
        return found

    def _profile(self) -> JobProfile:
        settings, first = self.settings, self.settings.placements()[0]
        job = DryJob(
            fanouts=settings.fanouts, batch_size=settings.batch_size, fetch=("x", "y"), num_threads=1, prefetch=1,
            sample_depth=1,
        )  # fmt: skip  # as the trainers' loader
        counted = profile_parts(
            self._parts(), job, hidden=settings.hidden, trainers=settings.trainers, num_batches=settings.batches
        )
        said = forecast(counted, settings.cluster(settings.all_rates()[0]), first).core_seconds
        used = np.array(list(self.measured(first)[FREE].cpu_seconds.values()))
        steps = counted.batches_per_epoch(settings.trainers) * np.array(first.ranks)
        work, step = fit_work(used, said, steps)
        say(
            f"  core-seconds of an epoch: {said.sum():.2f} by the profile, {used.sum():.2f} used: {work:.2f} times "
            f"what was timed, and {1e3 * step:.1f} ms more in a step"
        )
        return counted.scaled(work=work, step=step)

    def _parts(self) -> Path:
        settings = self.settings
        out = task_folder(self._workload.folder, settings) / f"parts-{settings.parts}"
        if not (out / MANIFEST).exists():
            graph = load(make_graph(self._workload.folder, settings))
            partition_graph(graph, settings.parts, out, balance=["train", "edges"], edge_ids=False)
        return out

    def _run(self, placement: LabPlacement) -> dict[str, PhaseFigures]:
        check_lab()
        settings = self.settings
        folder = self._folder / f"lab-{placement.name.replace(' ', '-')}"
        found = run_placement(
            folder, self._parts(), placement, settings.all_rates(), settings.task(),
            cpus=[settings.cpu] * settings.hosts, warm=4, epochs=settings.epochs,
        )  # fmt: skip
        for figures in found.values():
            say(f"  {placement.name}, {figures.describe()}")
        return found

    def errors(self) -> np.ndarray:
        """Percent of the epoch's seconds, of every pair of placement and rates."""
        pairs = self.pairs()
        return np.array([100 * abs(said - took) / took for _, said, took in pairs])

    def pairs(self) -> list[tuple[str, float, float]]:
        """Name, seconds that were predicted, and that were measured."""
        return [
            (f"{placement.name}/{name}", said.seconds, self.measured(placement)[name].seconds)
            for placement in self.settings.placements()
            for name, said in self.forecasts(placement).items()
        ]

    def link_errors(self) -> np.ndarray:
        """Percent of the bytes into every host, of every pair."""
        found = []
        for placement in self.settings.placements():
            for name, said in self.forecasts(placement).items():
                figures = self.measured(placement)[name]
                took = np.array([t.bytes_in for t in figures.traffic.values()]) / figures.phase.epochs
                found.append(100 * np.abs(said.bytes_in - took) / took)
        return np.concatenate(found)


def lab(workload: Workload) -> Iterator[Case]:
    """Predicted beside measured: epochs, their order, and bytes of links."""
    jobs = PlanLab(workload)
    for placement in jobs.settings.placements():
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
    order = {OURS: lambda: kendall(jobs.pairs()), "bound": lambda: LEAST_KENDALL}
    yield job_case("lab/Kendall of the order", score("tau"), order, Versus(("bound",), 1.0))


def _pair(jobs: PlanLab, placement: LabPlacement, rates: str) -> Iterator[Case]:
    figures = {
        OURS: lambda: jobs.forecasts(placement)[rates].seconds,
        "measured": lambda: jobs.measured(placement)[rates].seconds,
    }
    yield job_case(f"lab/{placement.name}/{rates}", SECONDS, figures, Versus(("measured",), required=False))
    moved = {OURS: lambda: jobs.measured(placement)[rates].busiest_bytes / 1e6}
    yield job_case(f"lab/{placement.name}/{rates}/bytes of the busiest link", MEGABYTES, moved, NOTHING)


def kendall(pairs: Sequence[tuple[str, float, float]]) -> float:
    """Kendall's tau of predicted and measured seconds; a pair that is equal in one of them counts as neither.

    >>> kendall([("a", 1.0, 2.0), ("b", 2.0, 3.0), ("c", 3.0, 2.5)])
    0.3333333333333333
    """
    agreed = total = 0
    for number, (_, said, took) in enumerate(pairs):
        for _, other_said, other_took in pairs[:number]:
            agreed += int(np.sign((said - other_said) * (took - other_took)))
            total += 1
    return agreed / total if total else 1.0


BENCHMARKS = [lab]
