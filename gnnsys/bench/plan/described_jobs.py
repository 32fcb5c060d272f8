"""Jobs on graphs and clusters that are only described: sizes of their batches, and what an iteration takes there.

Sizes are counted. A graph of R-MAT with the same mean degree, `1 / scale` of the nodes and as much of the seeds, meets
a node twice as often as the large one does; counts of its batches times `scale` are those of the large one's.
Everything else that is assumed is a field of `DescribedJob`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gnnsys
from gnnsys.bench.case import NotHere
from gnnsys.graph import rmat
from gnnsys.loader import NeighborLoader
from gnnsys.planning import (
    BatchRule,
    BatchSizes,
    Cluster,
    Demands,
    MachineProfile,
    ModelShape,
    SimulatedRun,
    TrainingTasks,
    machines_of,
    plan_batch,
    simulate,
    steady_iteration,
)

MOST_EDGES = 12_500_000  # of a graph that is generated
NUM_BATCHES = 48  # whose sizes are averaged
ID_BYTES = EDGE_BYTES = 8


@dataclass(frozen=True)
class DescribedGraph:
    name: str
    nodes: float
    edges: float
    features: int
    classes: int
    train_nodes: float

    @cache  # noqa: B019  a handful of graphs
    def batch_sizes(self, fanouts: tuple[int, ...], batch_size: int, most_edges: int = MOST_EDGES) -> BatchSizes:
        """Of a batch of so many seeds, the mean of `NUM_BATCHES`, counted on a graph of at most `most_edges`."""
        scale = max(1.0, self.edges / most_edges)
        seeds = max(1, round(batch_size / scale))
        graph = rmat(round(self.nodes / scale), round(self.edges / scale), seed=1)
        ids = torch.arange(graph.num_nodes(), device="cpu")[graph.csc().indptr.diff() > 0]
        loader = NeighborLoader(graph, list(fanouts), input_nodes=ids, batch_size=seeds, shuffle=True, seed=1)
        nodes, edges = np.zeros(len(fanouts) + 1), np.zeros(len(fanouts))
        for number, batch in enumerate(loader):
            if number == NUM_BATCHES:
                break
            nodes += np.array(batch.num_sampled_nodes) / NUM_BATCHES
            edges += np.array(batch.num_sampled_edges) / NUM_BATCHES
        times = batch_size / seeds
        return BatchSizes.of_hops((nodes * times).tolist(), (edges * times).tolist())


@dataclass(frozen=True, kw_only=True)
class DescribedJob:
    """`core_seconds`: of all processors for one batch, sampling and gathering. `step_seconds`: of a GPU for one.
    `local`: of a batch's rows and edges, how much is on the trainer's own machine where there are several. `served`: of
    the core-seconds, how much is spent where the rows are; the rest is the trainer's. `byte_work`: core-seconds of a
    byte on a link, at each end. `ahead`: batches under way beside the one that is trained on."""

    rows: float
    edges: float
    row_bytes: float
    core_seconds: float
    step_seconds: float
    gradient_bytes: float
    local: float = 0.5
    served: float = 0.5
    byte_work: float = 0.25e-9
    ahead: int = 4

    @property
    def batch_bytes(self) -> float:
        return self.rows * (self.row_bytes + ID_BYTES) + self.edges * EDGE_BYTES

    def run(self, cluster: Cluster, trainers: int, iterations: int = 20, *, explain: bool = True) -> SimulatedRun:
        """Trainers on as few hosts as have GPUs for them, a part on each host, gradients summed in a ring."""
        hosts = _first_hosts(cluster, trainers)
        num = len(hosts)
        kind = next(iter(hosts.hosts[0].gpus))
        at = np.repeat(np.arange(num), [host.num_gpus for host in hosts])[:trainers]
        tasks = TrainingTasks.of_job(
            num, trainers, 1, sync="ring-whole" if trainers > 1 else "none", ahead=self.ahead, own_samplers=True
        )
        share = np.full((num, trainers), (1 - self.local) / max(1, num - 1))
        share[at, np.arange(trainers)] = self.local if num > 1 else 1.0
        away = self.batch_bytes * (share.sum(axis=0) - share[at, np.arange(trainers)])
        sent = self.batch_bytes * (share.sum(axis=1) - np.bincount(at, share[at, np.arange(trainers)], num))
        cores = np.array([host.cores for host in hosts])
        serving = self.served * self.core_seconds * share.sum(axis=1) + self.byte_work * sent
        sampling = (1 - self.served) * self.core_seconds + self.byte_work * away
        volume: dict[str, Any] = {"graph": self.batch_bytes * share}
        if trainers > 1:
            volume["chunk"] = self.gradient_bytes * (2 * trainers - 2) / trainers
        demands = Demands.of(
            tasks,
            iterations,
            seconds={"store": serving / cores, "sampler": sampling / cores[at], "worker": self.step_seconds},
            volume=volume,
            threads={"store": cores, "sampler": cores[at], "worker": 0.0},
        )
        placement = np.concatenate([np.arange(num), at])
        return simulate(machines_of(hosts, computes_on=kind), tasks, placement, demands, "maxmin", explain=explain)

    def iteration(self, cluster: Cluster, trainers: int, iterations: int = 20) -> float:
        """Seconds, once the pipeline is full."""
        return steady_iteration(self.run(cluster, trainers, iterations, explain=False))


def _first_hosts(cluster: Cluster, trainers: int) -> Cluster:
    seats = np.cumsum([host.num_gpus for host in cluster])
    if trainers < 1 or trainers > seats[-1]:
        raise ValueError(f"trainers must be 1 to {seats[-1]}, one for each GPU, got {trainers}")
    count = int(np.searchsorted(seats, trainers)) + 1
    return Cluster(cluster.hosts[:count], cluster.uplinks, cluster.gpu_speeds)


def batch_work(machine: MachineProfile, model: ModelShape, sizes: BatchSizes) -> tuple[float, float]:
    """Core-seconds of sampling and gathering a batch, and seconds of its step on the GPU, by a machine's costs: the
    larger of the GPU's own and the bus's, which work at once."""
    busy = plan_batch(machine, model, sizes, BatchRule("pure GPU", "host", "host")).busy()
    return busy["cores"] * machine.machine.threads, max(busy["gpu"], busy["bus up"])


def example_file(*parts: str) -> Path:
    """A file of the repository's examples; `NotHere` where the package was installed without them."""
    file = Path(gnnsys.__file__).parents[1].joinpath("examples", *parts)
    if not file.exists():
        raise NotHere(f"it needs {'/'.join(('examples', *parts))} of the repository")
    return file
