"""What the lab's rows of `gnnsys bench plan` have in common: the job, its profile, and what is said of a placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnsys.bench.communities import CommunitySettings, make_graph, task_folder
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.plan.lab_placements import LabPlacement
from gnnsys.graph import MANIFEST, load
from gnnsys.partition import partition_graph
from gnnsys.planning import Cluster, JobPlacer, JobProfile, PlaceOptions, fit_work
from gnnsys.profiling import DryJob, profile_parts


@dataclass(frozen=True, kw_only=True)
class LabJobSettings(CommunitySettings):
    """A job on parts. `train`: the share of nodes that are trained on. `epochs` of a phase are measured, `batches` of
    each trainer counted for the profile."""

    parts: int
    trainers: int
    batch_size: int
    fanouts: tuple[int, ...]
    hidden: int
    epochs: int
    batches: int
    train: float

    @property
    def graph(self) -> dict[str, Any]:
        return super().graph | {"train": self.train}

    def task(self) -> Task:
        return Task(
            graph=self.graph, num_hosts=self.hosts, trainers_per_host=1, batch_size=self.batch_size,
            fanouts=self.fanouts, hidden=self.hidden,
        )  # fmt: skip


def make_lab_parts(folder: Path, settings: LabJobSettings) -> Path:
    out = task_folder(folder, settings) / f"parts-{settings.parts}"
    if not (out / MANIFEST).exists():
        graph = load(make_graph(folder, settings))
        partition_graph(graph, settings.parts, out, balance=["train", "edges"], edge_ids=False)
    return out


def dry_job(fanouts: tuple[int, ...], batch_size: int) -> DryJob:
    """With the loader of `gnnsys.bench.dist.train`."""
    return DryJob(fanouts=fanouts, batch_size=batch_size, fetch=("x", "y"), num_threads=1, prefetch=1, sample_depth=1)


def counted_profile(parts: Path, settings: LabJobSettings) -> JobProfile:
    """Without a run."""
    job = dry_job(settings.fanouts, settings.batch_size)
    return profile_parts(parts, job, hidden=settings.hidden, trainers=settings.trainers, num_batches=settings.batches)


@dataclass(frozen=True)
class LabForecast:
    """Of an epoch: seconds, bytes into each host, core-seconds of each host, and what binds."""

    seconds: float
    bytes_in: np.ndarray
    core_seconds: np.ndarray
    binds: str


def forecast(profile: JobProfile, cluster: Cluster, placement: LabPlacement) -> LabForecast:
    """What `gnnsys plan` says of a placement."""
    samplers = sum(len(host.samplers) for host in placement.hosts) // placement.num_trainers
    placer = JobPlacer(cluster, profile, placement.num_trainers, samplers, PlaceOptions())
    run = placer.simulate(placer.placement_of(placement.hosts))
    steps, num_hosts = profile.batches_per_epoch(placement.num_trainers), len(cluster)
    work = (run.demands.seconds * run.demands.threads).mean(0)
    cores = np.bincount(run.given.machine, work, minlength=num_hosts)
    carried = run.link_bytes()[num_hosts : 2 * num_hosts] / run.demands.iterations
    return LabForecast(placer.seconds_per_epoch(run), carried * steps, cores * steps, run.binding().lines()[0])


def fitted_profile(
    counted: JobProfile, placement: LabPlacement, said: LabForecast, used: np.ndarray, steps: int | None = None
) -> JobProfile:
    """The profile with the core time that one run of a placement took: `used` [hosts] core-seconds, of an epoch of
    `steps` steps where that is not all batches."""
    every = counted.batches_per_epoch(placement.num_trainers)
    taken = every if steps is None else steps
    predicted = said.core_seconds * taken / every
    ranks = np.zeros(len(used))
    for host in placement.hosts:
        ranks[int(host.name[1:]) - 1] = host.num_trainers
    work, step = fit_work(used, predicted, taken * ranks)
    say(
        f"  core-seconds of an epoch: {predicted.sum():.2f} by the profile, {used.sum():.2f} used: {work:.2f} times "
        f"what was timed, and {1e3 * step:.1f} ms more in a step"
    )
    return counted.scaled(work=work, step=step)


def fit_queues(ratio: Callable[[float], float]) -> float:
    """How many times as long queues are as full buffers say, so that `ratio(times)`, of predicted and measured seconds,
    is 1; from a quarter to four times. It grows with them.

    >>> round(fit_queues(lambda times: times / 2), 1)
    2.0
    """
    low, high = 0.25, 4.0
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    return (low * high) ** 0.5
