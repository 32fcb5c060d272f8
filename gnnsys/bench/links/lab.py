"""Negatives of several kinds on hosts of the lab: bytes by the kernel's counters, seconds and look-ups of a batch.

One job with a phase for each kind: GraphSAGE on links of a block model, cut by `partition_graph`'s default method, each
host's share its own edges. A batch is made when it is asked for and rows of other hosts are not kept for the next one,
so that bytes, messages and seconds are those of the batches alone. A minute. Needs root: where there is no lab, its
rows are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gnnsys.bench.case import Case, Versus, value
from gnnsys.bench.communities import CommunitySettings, task_folder
from gnnsys.bench.dist.phase import SYNCHRONOUS, Phase
from gnnsys.bench.dist.run_job import PhaseFigures, run_job
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import LabJobs, check_lab, say
from gnnsys.bench.links.lab_train import EDGES, NAMES
from gnnsys.bench.samplers.outcome import figure_case
from gnnsys.bench.workload import Workload
from gnnsys.graph import sbm
from gnnsys.lab import parse_rate
from gnnsys.partition import partition_graph

MODULE = "gnnsys.bench.links.lab_train"
UNIFORM = "uniform"
KINDS = (UNIFORM, "joint", "local", "local_joint", "in_batch")


@dataclass(frozen=True, kw_only=True)
class LinkLabSettings(CommunitySettings):
    """An epoch is `steps` batches of every host's trainer; one epoch of every kind is measured."""

    suite = "links"

    num_nodes: int = 20_000
    num_classes: int = 16
    avg_degree: float = 15.0
    homophily: float = 0.9
    num_features: int = 128
    hosts: int = 2
    cpu: float = 0.9
    batch_size: int = 256
    fanouts: tuple[int, ...] = (10, 5)
    hidden: int = 32
    steps: int = 10
    rate: str = "200mbit"

    def __post_init__(self) -> None:
        parse_rate(self.rate)


QUICK = {"num_nodes": 2_000, "num_features": 16, "batch_size": 32, "fanouts": (3, 2), "hidden": 8, "steps": 3}


class LinkLab(LabJobs[LinkLabSettings]):
    """The one job, run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, LinkLabSettings, QUICK)

    def phase(self, kind: str) -> PhaseFigures:
        found: dict[str, PhaseFigures] = self._once("lab job", self._run)
        return found[kind]

    def megabytes(self, kind: str) -> float:
        """Into all hosts together, of a batch."""
        figures = self.phase(kind)
        return sum(traffic.bytes_in for traffic in figures.traffic.values()) / 1e6 / batches(figures)

    def milliseconds(self, kind: str) -> float:
        """Of a step, in which every host trains on a batch."""
        figures = self.phase(kind)
        return 1e3 * figures.seconds * len(figures.ranks) / batches(figures)

    def look_ups(self, kind: str) -> float:
        """Messages of a batch that ask for names, edges or their ends."""
        figures = self.phase(kind)
        return sum(rank["counts"].get(what, 0) for rank in figures.ranks for what in (NAMES, EDGES)) / batches(figures)

    def inputs(self, kind: str) -> float:
        """Rows of a batch."""
        figures = self.phase(kind)
        return sum(rank["input_nodes"] for rank in figures.ranks) / batches(figures)

    def _run(self) -> dict[str, PhaseFigures]:
        check_lab()
        settings = self.settings
        folder = task_folder(self._workload.folder, settings)
        parts = make_parts(folder, settings)
        task = Task(
            num_hosts=settings.hosts,
            trainers_per_host=1,
            batch_size=settings.batch_size,
            fanouts=settings.fanouts,
            hidden=settings.hidden,
            max_steps=settings.steps,
        )
        found = run_job(
            folder / "links-job", parts, phases(settings), task, cpu=settings.cpu, module=MODULE, timeout=600.0
        )
        for figures in found.values():
            say(f"  {figures.describe()}")
        return found


def batches(figures: PhaseFigures) -> int:
    """Of all hosts together."""
    return sum(rank["steps"] for rank in figures.ranks)


def phases(settings: LinkLabSettings) -> list[Phase]:
    return [Phase(name=kind, mode=SYNCHRONOUS, rate=settings.rate, warm=2) for kind in KINDS]


def make_parts(folder: Path, settings: LinkLabSettings) -> Path:
    """Half of all edges are links to train on."""
    out = folder / f"links-parts-{settings.hosts}"
    if not out.exists():
        graph = sbm(**settings.graph)
        random = torch.rand(graph.num_edges(), generator=torch.Generator().manual_seed(0))
        graph.set_edge_data("train_mask", random < 0.5)
        partition_graph(graph, settings.hosts, out, balance=["edges", "train_edges"])
    return out


def lab(work: Workload) -> Iterator[Case]:
    """Each kind beside uniform negatives."""
    job = work.once("links/lab", lambda: LinkLab(work))
    figures: dict[str, tuple[str, Callable[[str], float]]] = {
        "bytes of a batch": ("MB", job.megabytes),
        "time of a step": ("ms", job.milliseconds),
        "look-ups of a batch": ("messages", job.look_ups),
        "rows of a batch": ("rows", job.inputs),
    }
    for kind in KINDS[1:]:
        for name, (unit, of) in figures.items():
            sides = {each: partial(of, each) for each in (kind, UNIFORM)}
            yield figure_case(f"lab/{kind}/{name}", value(unit), kind, sides, Versus((UNIFORM,), required=False))
