"""The clusters and jobs of DGTP's evaluation (§VI) as problems of placement.

The paper prints machines, tasks and what they take (lines 489-491), and no times and volumes. Those are made here
of the data sets' sizes, with every assumption in `Assumed`; `expected_sizes` says how many rows a batch has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gnnsys.planning import (
    ClusterMachines,
    Demands,
    DrawnAmount,
    PlacementProblem,
    Resources,
    TrainingTasks,
    expected_sizes,
)

GBIT, GB = 1e9 / 8, 1e9
ITERATIONS = 20  # that are simulated, as in the paper
RESOURCES = ("GB of memory", "cores", "GPUs")
WORKER, SAMPLER, SERVER = (3.0, 1.0, 1.0), (7.0, 2.0, 0.0), (5.0, 1.0, 0.0)  # line 491


@dataclass(frozen=True)
class Assumed:
    """What the paper does not say. `scale` multiplies all bytes of graph data."""

    sampled_edge: float = 40e-9  # core-seconds of a store per edge
    gathered: float = 5 * GB  # bytes per second that a store gathers, and a sampler puts together
    bus: float = 12 * GB  # bytes per second from host to GPU
    flops: float = 0.3 * 11.3e12  # of a GTX 1080Ti that are reached
    hidden: int = 256
    edge_bytes: int = 8
    id_bytes: int = 8
    scale: float = 1.0


@dataclass(frozen=True)
class PaperDataset:
    """Table II. `peak_to_mean` is that of flows from stores to samplers (line 552)."""

    name: str
    nodes: float
    edges: float
    features: int
    classes: int
    fanouts: tuple[int, ...]  # from the seeds on
    peak_to_mean: float


# Table II lists fan-outs of 5, 10 and 15 or 25: the official script has the largest for the first hop.
PRODUCTS = PaperDataset("ogbn-products", 2.449e6, 123.7e6, 100, 47, (15, 10, 5), 1.16)
REDDIT = PaperDataset("Reddit", 0.233e6, 114.6e6, 602, 41, (25, 10, 5), 1.16)
PAPERS = PaperDataset("ogbn-papers100M", 111e6, 1.6e9, 128, 172, (12, 12, 12), 1.08)


@dataclass(frozen=True)
class PaperCluster:
    """Machines with their resources; `gpu_speed` is that of workers beside a GTX 1080Ti."""

    gbit: tuple[float, ...]
    memory: tuple[float, ...]
    cores: tuple[float, ...]
    gpus: tuple[float, ...]
    gpu_speed: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.gbit)

    def in_order(self, order: np.ndarray) -> PaperCluster:
        """The same machines, numbered otherwise."""
        picked = {name: tuple(getattr(self, name)[m] for m in order) for name in self.__dataclass_fields__}
        return PaperCluster(**picked)


def testbed(*, logical: bool = False) -> PaperCluster:
    """Four servers of 8 cores, 48 GB and two GPUs; two of the links are limited to 10 Gbit/s.

    DistDGL must separate two workers from their samplers there. With 8 cores it must: tasks take 31 of 32, and there
    is little to choose. `logical`: demands are of logical cores, of which this processor has 16. Then memory separates
    them, where stores and systems take so much that two workers with their samplers do not fit beside: 15 GB.
    """
    memory, cores = (33, 16) if logical else (48, 8)
    return PaperCluster((50, 50, 10, 10), (memory,) * 4, (cores,) * 4, (2,) * 4, (1,) * 4)


def unequal_testbed() -> PaperCluster:
    """Two servers of 1080Ti at 10 Gbit/s, two of four V100, 20 cores, 256 GB and 100 Gbit/s."""
    return PaperCluster((10, 10, 100, 100), (48, 48, 256, 256), (8, 8, 20, 20), (2, 2, 4, 4), (1, 1, 1.8, 1.8))


def drawn_cluster(size: int, generator: np.random.Generator, *, logical: bool = False) -> PaperCluster:
    """§VI-B, line 542: 32 to 128 GB, 4 to 16 cores, 1 to 4 GPUs, 10, 20 or 50 Gbit/s. `logical`: a core is two logical
    ones, which is what tasks ask for (line 491)."""
    return PaperCluster(
        gbit=tuple(generator.choice([10.0, 20.0, 50.0], size)),
        memory=tuple(generator.uniform(32, 128, size)),
        cores=tuple((2.0 if logical else 1.0) * generator.integers(4, 17, size)),
        gpus=tuple(generator.integers(1, 5, size).astype(float)),
        gpu_speed=(1.0,) * size,
    )


@dataclass(frozen=True)
class PaperJob:
    """Workers with samplers each, a batch of `batch_size` seeds per worker and iteration, one parameter server or a
    ring."""

    dataset: PaperDataset
    workers: int
    samplers_per_worker: int
    sync: str = "ps"
    batch_size: int = 2000
    ahead: int | None = None  # batches that samplers are ahead at most; None: the paper's, no limit
    assumed: Assumed = Assumed()

    def with_batch(self, per_sampler: int) -> PaperJob:
        return replace(self, batch_size=per_sampler * self.samplers_per_worker)

    def problem(self, cluster: PaperCluster, *, seed: int = 0, peak_to_mean: float | None = None) -> PlacementProblem:
        """Of this job on a cluster, a graph store on every machine."""
        tasks = TrainingTasks.of_job(
            cluster.size, self.workers, self.samplers_per_worker, sync=self.sync, ahead=self.ahead
        )
        names = tuple(f"m{m}" for m in range(cluster.size))
        rates = np.array(cluster.gbit) * GBIT
        machines = ClusterMachines(rates, rates, speeds={"worker": np.array(cluster.gpu_speed)}, names=names)
        capacity = np.array([cluster.memory, cluster.cores, cluster.gpus], dtype=np.float64).T
        demand = np.array([SAMPLER, WORKER, SERVER], dtype=np.float64)
        resources = Resources(RESOURCES, capacity, demand, np.zeros((cluster.size, len(RESOURCES))), names)
        demands = self.demands(tasks, seed, peak_to_mean or self.dataset.peak_to_mean)
        return PlacementProblem(machines, tasks, demands, resources, np.arange(cluster.size))

    def demands(self, tasks: TrainingTasks, seed: int, peak_to_mean: float) -> Demands:
        data, assumed = self.dataset, self.assumed
        sizes = expected_sizes(data.nodes, data.edges, data.fanouts, self.batch_size // self.samplers_per_worker)
        rows = sizes.layers[0].sources
        edges = sum(layer.edges for layer in sizes.layers)
        row_bytes = 4 * data.features * assumed.scale
        graph = rows * (row_bytes + assumed.id_bytes) + edges * assumed.edge_bytes
        batch = rows * row_bytes + edges * assumed.edge_bytes
        stores = tasks.count("store")
        samplers = self.workers * self.samplers_per_worker
        widths = (data.features, *[assumed.hidden] * (len(data.fanouts) - 1), data.classes)
        weights = sum(2 * a * b for a, b in pairwise(widths))  # a layer has two matrices
        # Forward and backward, three times a product of rows with both matrices, for each layer's destinations.
        flops = 3 * sum(
            2 * layer.destinations * 2 * a * b for layer, a, b in zip(sizes.layers, widths, widths[1:], strict=False)
        )
        worker = self.samplers_per_worker * (batch / assumed.bus + flops / assumed.flops)
        gradient = 4.0 * weights
        volume = {"graph": DrawnAmount(graph / stores, peak_to_mean), "batch": batch}
        if self.sync == "ps":
            volume |= {"gradient": gradient, "parameter": gradient}
        else:
            volume |= {"chunk": gradient / self.workers}
        seconds = {
            "store": samplers / stores * (edges * assumed.sampled_edge / 8 + graph / assumed.gathered),
            "sampler": graph / assumed.gathered,
            "worker": worker,
            "server": gradient * self.workers / assumed.gathered,
        }
        return Demands.of(tasks, ITERATIONS, seconds=seconds, volume=volume, seed=seed)


def fitting_draws(
    job: PaperJob, size: int, count: int, seed: int, *, logical: bool = False, peak_to_mean: float | None = None
) -> tuple[list[PlacementProblem], int]:
    """Problems on drawn clusters, and how many draws were thrown away because IFS found nothing."""
    from gnnsys.planning import NoPlacement, first_placement

    generator = np.random.default_rng(seed)
    found: list[PlacementProblem] = []
    refused = 0
    while len(found) < count:
        cluster = drawn_cluster(size, generator, logical=logical)
        problem = job.problem(cluster, seed=len(found), peak_to_mean=peak_to_mean)
        try:
            first_placement(problem.resources, problem.counts, problem.store_machine)
        except NoPlacement:
            refused += 1
            continue
        found.append(problem)
    return found, refused
