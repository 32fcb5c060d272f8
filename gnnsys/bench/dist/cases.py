"""The rows of `gnnsys bench dist`: what a job took, beside the bound it cannot beat and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Versus, score, value
from gnnsys.bench.dist.inputs import METIS, RANDOM
from gnnsys.bench.dist.run_job import PhaseFigures
from gnnsys.bench.dist.jobs import UNLIMITED, DistJobs
from gnnsys.bench.dist.phase import ASYNCHRONOUS, COMPUTE, KEEPING, NON_STOP, SYNCHRONOUS
from gnnsys.bench.lab_jobs import NOTHING, SideFigures, job_case
from gnnsys.bench.workload import Workload

LINK = "busiest link"
NETWORK_SHARE = 0.75  # of an epoch with random parts, at the rate of the ablation
SECONDS, MEGABYTES, SHARE, SAMPLES = value("s"), value("MB"), value("% of epoch"), score("samples/s")
Run: TypeAlias = Callable[[], PhaseFigures]


def rates(workload: Workload) -> Iterator[Case]:
    """An epoch on slower and slower links beside the same job on unlimited ones, or what the busiest link must carry."""
    jobs = _jobs(workload)
    for rate in jobs.settings.rates:
        yield from _at_rate(jobs, rate)


def _at_rate(jobs: DistJobs, rate: str) -> Iterator[Case]:
    figures: SideFigures = {
        OURS: lambda: jobs.two_level(rate).seconds,
        "unlimited links": lambda: jobs.two_level(UNLIMITED).seconds,
        LINK: lambda: jobs.two_level(rate).link_seconds(rate),
    }
    versus = Versus(("unlimited links", LINK), 1 / 1.2, pick="worst")
    yield job_case(f"rates/{rate}/epoch", SECONDS, figures, versus, limit=LINK)
    yield job_case(f"rates/{rate}/bytes", MEGABYTES, {OURS: lambda: jobs.two_level(rate).busiest_bytes / 1e6}, NOTHING)
    yield job_case(f"rates/{rate}/waiting", SHARE, {OURS: lambda: 100 * jobs.two_level(rate).waited_share}, NOTHING)


def ablation(workload: Workload) -> Iterator[Case]:
    """DistDGLv2's steps, each with the ones before: an epoch's seconds beside random parts and synchronous loading.

    The last step is ours: rows of other machines are kept for batches to come, as loaders do by default. The limit beside each is the larger of its busiest link's seconds and the same parts' epoch on unlimited links.
    """
    jobs = _jobs(workload)
    rate = jobs.settings.rate
    steps: dict[str, tuple[Run, Run]] = {
        "1 random": (lambda: jobs.flat(RANDOM, SYNCHRONOUS), lambda: jobs.flat(RANDOM, UNLIMITED)),
        "2 METIS": (lambda: jobs.flat(METIS, SYNCHRONOUS), lambda: jobs.flat(METIS, UNLIMITED)),
        "3 two-level": (lambda: jobs.two_level(SYNCHRONOUS), lambda: jobs.two_level(UNLIMITED)),
        "4 asynchronous": (lambda: jobs.two_level(ASYNCHRONOUS), lambda: jobs.two_level(UNLIMITED)),
        "5 non-stop": (lambda: jobs.two_level(NON_STOP), lambda: jobs.two_level(UNLIMITED)),
        "6 keeping": (lambda: jobs.two_level(rate), lambda: jobs.two_level(UNLIMITED)),
    }
    random, random_unlimited = steps["1 random"]
    off_network: SideFigures = {
        OURS: lambda: 100 * random_unlimited().seconds / random().seconds,
        "bound": lambda: 100 * (1 - NETWORK_SHARE),
    }
    yield job_case("ablation/off the network with random", SHARE, off_network, Versus(("bound",), 1.0))
    for name, (run, unlimited) in steps.items():
        target = 3.0 if name in list(steps)[-2:] else None
        yield from _step(f"ablation/{name}", run, unlimited, random, rate, target)


def _step(name: str, run: Run, unlimited: Run, random: Run, rate: str, target: float | None) -> Iterator[Case]:
    seconds: SideFigures = {
        OURS: lambda: run().seconds,
        "random": lambda: random().seconds,
        "bound": lambda: max(run().link_seconds(rate), unlimited().seconds),
    }
    yield job_case(f"{name}/epoch", SECONDS, seconds, Versus(("random",), target), limit="bound")
    moved: SideFigures = {OURS: lambda: run().busiest_bytes / 1e6, "random": lambda: random().busiest_bytes / 1e6}
    yield job_case(f"{name}/bytes", MEGABYTES, moved, Versus(("random",)))


def scaling(workload: Workload) -> Iterator[Case]:
    """All hosts beside as many times one of them, and beside what the links could carry; a fixed quota per host."""
    jobs = _jobs(workload)
    hosts, rate = jobs.settings.hosts, jobs.settings.rates[0]
    times, links = f"{hosts} x one host", "link bound"
    figures: SideFigures = {
        OURS: lambda: jobs.two_level(rate).samples_per_s,
        times: lambda: hosts * jobs.one_host().samples_per_s,
        links: lambda: jobs.two_level(rate).seeds / jobs.two_level(rate).link_seconds(rate),
    }
    yield job_case(f"scaling/{hosts} hosts", SAMPLES, figures, Versus((times, links), 0.8, pick="worst"), limit=links)


def against_distdgl(workload: Workload) -> Iterator[Case]:
    """Two hosts, the same graph, model, fanouts and batch, beside DistDGL with the best of its sampler settings.

    DistDGL encrypts nothing: the second row is what ours does without it.
    """
    jobs = _jobs(workload)
    for name, encrypt in (("two hosts/DistDGL", True), ("two hosts/DistDGL, in the clear", False)):
        yield _beside_distdgl(jobs, name, encrypt)


def _beside_distdgl(jobs: DistJobs, name: str, encrypt: bool) -> Case:
    threefold, allowed = "3 x DistDGL", "0.85 x compute alone"
    figures: SideFigures = {
        OURS: lambda: jobs.two_hosts(KEEPING, encrypt=encrypt).samples_per_s,
        "DistDGL": jobs.distdgl,
        "compute alone": lambda: jobs.two_hosts(COMPUTE, encrypt=encrypt).samples_per_s,
        threefold: lambda: 3 * jobs.distdgl(),
        allowed: lambda: 0.85 * jobs.two_hosts(COMPUTE, encrypt=encrypt).samples_per_s,
    }
    missing = {side: reason for side in ("DistDGL", threefold) for reason in peers.missing("dgl").values()}
    present = {name: call for name, call in figures.items() if name not in missing}
    versus = (Versus((threefold, allowed), 1.0, pick="worst"), Versus(("DistDGL",)), Versus(("compute alone",)))
    theirs = ("DistDGL", threefold)
    return job_case(name, SAMPLES, present, *versus, limit="compute alone", missing=missing, foreign=theirs)


BENCHMARKS = [rates, ablation, scaling, against_distdgl]


def _jobs(workload: Workload) -> DistJobs:
    return workload.once("dist/jobs", lambda: DistJobs(workload))
