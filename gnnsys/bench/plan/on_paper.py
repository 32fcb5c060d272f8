"""`gnnsys bench plan --only "plan/on paper"`: clusters not here; docs/cluster_figures.md lists what is assumed.

DistDGLv2's eight g4dn.metal: its 5 s (GraphSAGE) and 7 s (GAT) per epoch on 64 GPUs fix the two numbers that nobody
printed, core-seconds of a batch and a GAT's step; speed-ups follow, beside the 20x and 36x that were measured. Then 64
H200 and 1,000 of them, by the costs of one H200: seconds, what binds, and what one should buy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, score, value
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.plan.described_jobs import DescribedGraph, DescribedJob, batch_work, example_file
from gnnsys.bench.workload import FULL, Workload
from gnnsys.planning import Cluster, MachineProfile, ModelShape

PAPERS = DescribedGraph("ogbn-papers100M", 111e6, 3.2e9, 128, 172, 1.2e6)  # DistDGLv2, Table 1
TEN_BILLION = DescribedGraph("10 billion edges", 345e6, 10e9, 128, 172, 34.5e6)  # its degree; a tenth is trained on
FANOUTS, BATCH, HIDDEN = (15, 10, 5), 1000, 256
PUBLISHED_SECONDS = {"sage": 5.0, "gat": 7.0}
PUBLISHED_SPEEDUP = {"sage": 20.0, "gat": 36.0}
NAMES = {"sage": "GraphSAGE", "gat": "GAT"}
GPUS = (1, 2, 4, 8, 16, 32, 64)
READINGS = ("in turn", "overlapped")
_HALVINGS = 40
_QUICK_EDGES = 200_000


def t4_machine() -> MachineProfile:
    """A g4dn.metal with one of its T4, by data sheets: 0.8 of 320 GB/s, 0.9 of 12 GB/s, half of 8.1 TFLOPS."""
    return MachineProfile.from_rates(
        cores=96, host_gbs_per_core=2.0, host_gflops_per_core=20.0, bus_gbs=10.8, device_gbs=256.0, device_tflops=4.05,
        gpu="t4",
    )  # fmt: skip


def model_of(kind: str, graph: DescribedGraph) -> ModelShape:
    return ModelShape(kind, (graph.features, *[HIDDEN] * (len(FANOUTS) - 1), graph.classes))


def job_of(graph: DescribedGraph, kind: str, machine: MachineProfile, work: Workload) -> DescribedJob:
    """A job whose core-seconds and steps are those of a machine's costs."""
    sizes = graph.batch_sizes(FANOUTS, BATCH, *([] if work.sizes == FULL else [_QUICK_EDGES]))
    model = model_of(kind, graph)
    core_seconds, step_seconds = batch_work(machine, model, sizes)
    return DescribedJob(
        rows=sizes.layers[0].sources, edges=sizes.sampled_edges, row_bytes=4.0 * graph.features,
        core_seconds=core_seconds, step_seconds=step_seconds, gradient_bytes=4.0 * model.num_parameters,
    )  # fmt: skip


def steps_per_epoch(graph: DescribedGraph, trainers: int) -> int:
    return math.ceil(graph.train_nodes / (BATCH * trainers))


@dataclass(frozen=True)
class ScaledJob:
    """A job and how its batches and steps follow: `in turn`, a step begins when its batch is there and nothing else is
    done meanwhile; `overlapped`, batches are made during steps, and the slower of both counts."""

    job: DescribedJob
    reading: str
    cluster: Cluster

    def iteration(self, trainers: int) -> float:
        if self.reading == "overlapped":
            return self.job.iteration(self.cluster, trainers)
        return replace(self.job, step_seconds=0.0).iteration(self.cluster, trainers) + self.job.step_seconds

    def epoch(self, trainers: int) -> float:
        return self.iteration(trainers) * steps_per_epoch(PAPERS, trainers)

    def binds(self, trainers: int) -> str:
        return self.job.run(self.cluster, trainers).binding().lines()[0].removeprefix("what binds: ")


def fitted(kind: str, reading: str, work: Workload) -> ScaledJob:
    """The job whose epoch on 64 T4 takes what was published. GraphSAGE's step is that of the data sheet and its
    core-seconds are fitted; a GAT's batches are the same, and its step is fitted."""
    cluster = Cluster.from_file(example_file("clusters", "g4dn-metal-8.json"))
    sage = job_of(PAPERS, "sage", t4_machine(), work)
    start = sage if kind == "sage" else fitted("sage", reading, work).job

    def with_value(found: float) -> ScaledJob:
        job = replace(start, core_seconds=found) if kind == "sage" else replace(start, step_seconds=found)
        return ScaledJob(job, reading, cluster)

    return with_value(_solve(lambda found: with_value(found).epoch(GPUS[-1]), PUBLISHED_SECONDS[kind]))


def _solve(seconds: Callable[[float], float], wanted: float) -> float:
    """Where a function that grows is `wanted`, between 0 and 100."""
    low, high = 0.0, 100.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return high


def distdglv2(work: Workload) -> Iterator[Case]:
    """Speed-up on 64 GPUs over one, both readings, beside what was measured."""

    @cache
    def epochs(kind: str, reading: str) -> tuple[ScaledJob, dict[int, float]]:
        found = fitted(kind, reading, work)
        return found, {trainers: found.epoch(trainers) for trainers in GPUS}

    @cache
    def speedup(kind: str, reading: str) -> float:
        found, seconds = epochs(kind, reading)
        job = found.job
        if kind == "sage":
            say(
                f"  a batch has {job.rows:,.0f} rows and {job.edges:,.0f} edges, {job.batch_bytes / 1e6:.0f} MB; "
                f"{job.core_seconds:.2f} core-s of it are fitted to {PUBLISHED_SECONDS[kind]:g} s per epoch"
            )
        told = ", ".join(f"{n}: {s:.1f} s ({seconds[1] / s:.1f}x)" for n, s in seconds.items())
        say(f"  {NAMES[kind]}, {reading}, a step of {1e3 * job.step_seconds:.0f} ms: {told}")
        say(f"    on 64, without its steps in turn: {found.binds(GPUS[-1])}")
        return seconds[1] / seconds[GPUS[-1]]

    for kind in ("sage", "gat"):

        def sides(kind: str = kind) -> dict[str, Side]:
            return {
                OURS: Side(lambda: speedup(kind, "in turn")),
                "overlapped": Side(lambda: speedup(kind, "overlapped")),
                "measured": Side(lambda: PUBLISHED_SPEEDUP[kind]),
            }

        versus = (
            Versus(("measured",), label=f"DistDGLv2 measured {PUBLISHED_SPEEDUP[kind]:g}x"),
            Versus(("overlapped",)),
        )
        yield Case(f"plan/on paper, {NAMES[kind]} on 64 T4, speed-up", score("times"), sides, versus, repeats=1)


def what_to_buy(work: Workload) -> Iterator[Case]:
    """Seconds of an epoch on H200s, and with twice of one resource."""
    for name, graph, file, trainers, iterations in (
        ("64 H200, papers100M", PAPERS, "h200-8x8.json", 64, 20),
        ("1,000 H200, 10 billion edges", TEN_BILLION, "h200-125x8.json", 1000 if work.sizes == FULL else 16, 10),
    ):

        @cache
        def seconds(buy: str, graph=graph, file=file, trainers=trainers, iterations=iterations) -> float:  # type: ignore[no-untyped-def]
            cluster = Cluster.from_file(example_file("clusters", file))
            job = job_of(graph, "sage", MachineProfile.load(example_file("machines", "h200.json")), work)
            host = cluster.hosts[0]
            doubled = {
                "links": ["all.rate=" + f"{host.rate_in * 16:.0f}bit"],
                "cores": [f"all.cores={2 * host.cores}"],
                "GPUs": ["gpu.h200=2"],
            }
            steps = steps_per_epoch(graph, trainers)
            if buy == "nothing":
                run = job.run(cluster, trainers, iterations)
                say(
                    f"  {trainers} trainers, {steps} steps: {job.rows:,.0f} rows, {job.batch_bytes / 1e6:.0f} MB, "
                    f"{job.core_seconds:.3f} core-s, a step of {1e3 * job.step_seconds:.1f} ms"
                )
                say(f"    {run.binding().lines()[0]}")
            return steps * job.iteration(cluster.with_settings(doubled.get(buy, [])), trainers, iterations)

        def sides(seconds=seconds) -> dict[str, Side]:  # type: ignore[no-untyped-def]
            others = {f"twice the {buy}": Side(partial(seconds, buy)) for buy in ("links", "cores", "GPUs")}
            return {OURS: Side(partial(seconds, "nothing")), **others}

        versus = tuple(Versus((f"twice the {buy}",)) for buy in ("links", "cores", "GPUs"))
        yield Case(f"plan/on paper, {name}", value("s per epoch"), sides, versus, repeats=1)


BENCHMARKS: list[Benchmark] = [distdglv2, what_to_buy]
