"""DGS on hosts of the lab, by the kernel's counters: bytes of nodes, columns and both, and throughput on slow links.

One job with a phase for each sampler: GraphSAGE on the planted graph of 512 columns, loaders as a user has them (rows
of other machines are kept for the next batches). A run is its first epochs, measured from a new loader on, so that they
include filling the pipeline, and then as many as a run has left: of guided ones the first have uniform draws, rows
fetched to explain and the first masks. Needs root, and some minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench.case import Case, Versus, score, value
from gnnsys.bench.communities import CommunitySettings, task_folder
from gnnsys.bench.dist.phase import Phase
from gnnsys.bench.dist.run_job import PhaseFigures, run_job
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import NOTHING, LabJobs, check_lab, say
from gnnsys.bench.samplers.draws import open_alone
from gnnsys.bench.samplers.lab_train import FROZEN, LAYER_WISE, START
from gnnsys.bench.samplers.outcome import figure_case
from gnnsys.bench.samplers.wide import LEAST
from gnnsys.bench.workload import Workload
from gnnsys.graph import NODE, planted_noise
from gnnsys.lab import parse_rate
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph, NeighborSampler, SampleKey, Sampler

MODULE = "gnnsys.bench.samplers.lab_train"
UNIFORM, BOTH = "uniform", "both"


@dataclass(frozen=True, kw_only=True)
class SamplerLabSettings(CommunitySettings):
    """An epoch is `steps` batches of every trainer, a run `run_epochs` of them; `epochs` of a phase are measured."""

    suite = "samplers"

    num_nodes: int = 20_000
    num_classes: int = 8
    avg_degree: float = 20.0
    homophily: float = 0.5
    num_features: int = 512
    hosts: int = 4
    cpu: float = 0.45
    batch_size: int = 64
    fanouts: tuple[int, ...] = (8, 8)
    hidden: int = 16
    steps: int = 20
    epochs: int = 3
    run_epochs: int = 12
    rate: str = "200mbit"

    def __post_init__(self) -> None:
        parse_rate(self.rate)
        if self.hosts < 2 or self.run_epochs < self.epochs:
            raise ValueError(
                f"hosts must be at least 2 and run_epochs at least epochs, got {self.hosts}, {self.run_epochs} and "
                f"{self.epochs}"
            )


QUICK = {
    "num_nodes": 3000,
    "num_features": 32,
    "hosts": 2,
    "cpu": 0.9,
    "batch_size": 16,
    "fanouts": (3, 3),
    "steps": 8,
    "epochs": 5,
}


class SamplerLab(LabJobs[SamplerLabSettings]):
    """The one job, run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, SamplerLabSettings, QUICK)

    def phase(self, name: str) -> PhaseFigures:
        found: dict[str, PhaseFigures] = self._once("lab job", self._run)
        return found[name]

    def megabytes(self, name: str) -> float:
        """Of an epoch of a whole run, into all hosts together."""
        steady = _megabytes(self.phase(name))
        start, settings = self.phase(name + START), self.settings
        first = settings.epochs * _megabytes(start)
        return (first + (settings.run_epochs - settings.epochs) * steady) / settings.run_epochs

    def nodes_per_s(self, name: str) -> float:
        figures = self.phase(name)
        inputs = sum(rank["input_nodes"] for rank in figures.ranks) / figures.phase.epochs
        return inputs / figures.seconds

    def _run(self) -> dict[str, PhaseFigures]:
        check_lab()
        settings = self.settings
        folder = task_folder(self._workload.folder, settings)
        parts = make_parts(folder, settings)
        task = Task(
            graph=draws_for(open_alone(parts), settings),
            num_hosts=settings.hosts,
            trainers_per_host=1,
            batch_size=settings.batch_size,
            fanouts=settings.fanouts,
            hidden=settings.hidden,
            max_steps=settings.steps,
        )
        found = run_job(folder / "lab-job", parts, phases(settings), task, cpu=settings.cpu, module=MODULE)
        for figures in found.values():
            say(f"  {figures.describe()}")
        return found


def phases(settings: SamplerLabSettings) -> list[Phase]:
    """Those of the job. Uniform draws come first and last: the machine may have changed in between."""

    def phase(name: str, warm: int = 6) -> Phase:
        return Phase(name=name, rate=settings.rate, warm=warm, epochs=settings.epochs)

    made = []
    for name in (UNIFORM, "nodes", "columns", BOTH):
        made += [phase(name + START, 0), phase(name)]
    made.append(phase(BOTH + FROZEN))
    for name in (f"{UNIFORM}-bf16", f"{BOTH}-bf16"):
        made += [phase(name + START, 0), phase(name)]
    return [*made, *(phase(name) for name in LAYER_WISE), phase(f"{UNIFORM}-again")]


def make_parts(folder: Path, settings: SamplerLabSettings) -> Path:
    out = folder / f"lab-parts-{settings.hosts}"
    if not out.exists():
        half = settings.num_features // 2
        graph = planted_noise(
            settings.num_nodes, num_classes=settings.num_classes, avg_degree=settings.avg_degree,
            homophily=settings.homophily, num_features=half, noise_columns=settings.num_features - half, separation=4.0,
            train=0.3,
        )  # fmt: skip
        partition_graph(graph, settings.hosts, out, balance=["train", "edges"])
    return out


def draws_for(graph: DistGraph, settings: SamplerLabSettings) -> dict[str, Any]:
    """Draws per layer with which layer-wise samplers have as many input nodes as uniform draws."""
    wanted = num_inputs(NeighborSampler(graph, list(settings.fanouts)), settings)
    found = {}
    for name, kind in LAYER_WISE.items():
        low, high = 1, 4 * int(wanted)
        while high - low > 0.02 * high:
            middle = (low + high) // 2
            is_less = num_inputs(kind(graph, [middle] * len(settings.fanouts)), settings) < wanted
            low, high = (middle, high) if is_less else (low, middle)
        found[name] = high
    return found


def num_inputs(sampler: Sampler, settings: SamplerLabSettings, num_batches: int = 4) -> float:
    """Mean over some batches."""
    generator = torch.Generator().manual_seed(0)
    total = 0
    for number in range(num_batches):
        seeds = torch.randperm(settings.num_nodes, generator=generator, device="cpu")[: settings.batch_size]
        total += sampler.sample({NODE: seeds}, key=SampleKey(0, 0, number)).node[NODE].numel()
    return total / num_batches


def _megabytes(figures: PhaseFigures) -> float:
    """Of an epoch, into all hosts."""
    return sum(traffic.bytes_in for traffic in figures.traffic.values()) / 1e6 / figures.phase.epochs


def lab(work: Workload) -> Iterator[Case]:
    """Bytes and throughput beside uniform draws, and what explaining costs."""
    job = work.once("samplers/lab", lambda: SamplerLab(work))
    rate = job.settings.rate
    for wire, names in {"": ("nodes", "columns", BOTH), "-bf16": (BOTH,)}.items():
        for name in names:
            ours, beside = f"{name}{wire}", f"{UNIFORM}{wire}"
            sides = {each: _of(job.megabytes, each) for each in (ours, beside)}
            yield figure_case(f"lab/{ours}/bytes", value("MB"), ours, sides, Versus((beside,), LEAST[name]))
            steady: dict[str, Callable[[], float]] = {
                each: _of(lambda which: _megabytes(job.phase(which)), each) for each in (ours, beside)
            }
            yield figure_case(f"lab/{ours}/bytes once guided", value("MB"), ours, steady, Versus((beside,)))
    others = (UNIFORM, f"{UNIFORM}-again", *LAYER_WISE)
    for unit, of in {
        "input nodes/s": job.nodes_per_s,
        "samples/s": lambda name: job.phase(name).samples_per_s,
    }.items():
        sides = {each: _of(of, each) for each in (BOTH, *others)}
        target = 1.1 if unit == "input nodes/s" else None
        versus = [Versus(others, target), *(Versus((other,)) for other in others)]
        yield figure_case(f"lab/{rate}/{unit}", score(unit), BOTH, sides, *versus)
    for name in (UNIFORM, BOTH, *LAYER_WISE):
        inputs = {name: _of(lambda which: _inputs(job.phase(which)), name)}
        yield figure_case(f"lab/{name}/inputs", value("nodes"), name, inputs, NOTHING)
    cost = {each: _of(lambda which: job.phase(which).samples_per_s, each) for each in (BOTH, BOTH + FROZEN)}
    yield figure_case("lab/throughput while explaining", score("samples/s"), BOTH, cost, Versus((BOTH + FROZEN,), 0.95))
    memory = {BOTH: lambda: _memory(job.phase(BOTH), 0), "without": lambda: _memory(job.phase(BOTH), 1)}
    yield figure_case("lab/memory while explaining", value("MB"), BOTH, memory, Versus(("without",), 1 / 1.11))


def _of(function: Callable[[str], float], name: str) -> Callable[[], float]:
    return lambda: function(name)


def _inputs(figures: PhaseFigures) -> float:
    """Of a batch."""
    return sum(rank["input_nodes"] for rank in figures.ranks) / sum(rank["steps"] for rank in figures.ranks)


def _memory(figures: PhaseFigures, without: int) -> float:
    """Of a host in megabytes, with the explaining process or without it."""
    return sum(r["memory"] - without * r["explaining_memory"] for r in figures.ranks) / 1e6 / len(figures.ranks)
