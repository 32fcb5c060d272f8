"""LABOR, walks and edges among nodes on the device: beside uniform draws there, and beside our own on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from gnnsys import ops
from gnnsys.bench.case import OURS, Case, Side, Versus, score
from gnnsys.bench.gpu.inputs import (
    FANOUTS,
    batches_of_seeds,
    device,
    device_graph,
    large_graph,
    num_cores,
    synchronize,
)
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.sampling import LaborSampler, NeighborSampler, SampleKey, Sampler, inner_edges, random_walks
from gnnsys.sampling import WithinRequest as Within

UNIFORM, HOST = "uniform", "host, all cores"
LABOR_SHARE = 0.25  # of uniform sampling's edges per second, at least
LENGTH = 8


def labor(work: Workload) -> Iterator[Case]:
    """Edges per second of whole samples, and of one hop alone. LABOR looks at every in-edge of a seed, and its batches
    have fewer nodes to expand; LABOR-1 looks at it several times."""

    def hops(rounds: int) -> dict[str, Side]:
        graph = device_graph(work)
        return {
            OURS: Side(_sampled(work, LaborSampler(graph, FANOUTS, importance_sampling=rounds))),
            UNIFORM: Side(_sampled(work, NeighborSampler(graph, FANOUTS))),
        }

    def hop(labor: Callable[..., ops.Neighbors]) -> dict[str, Side]:
        csc = device_graph(work).csc()
        seeds = work.ids(100 * work.sizes.num_seeds, csc.num_dst).to(device(work), csc.indices.dtype)

        def drawn(draw: Callable[..., ops.Neighbors]) -> Side:
            return Side(_timed(lambda: draw(csc, seeds, 10, key=1).ids.numel()))

        return {OURS: drawn(labor), UNIFORM: drawn(ops.sample_neighbors)}

    unit, promised, informing = score("M edges/s"), (Versus((UNIFORM,), LABOR_SHARE),), (Versus((UNIFORM,)),)
    by_importance = partial(ops.sample_labor_importance, rounds=1)
    yield Case("labor/three hops", unit, partial(hops, 0), promised, repeats=5)
    yield Case("labor/one hop", unit, partial(hop, ops.sample_labor), promised, repeats=5)
    yield Case("labor/three hops, LABOR-1", unit, partial(hops, 1), informing, repeats=5)
    yield Case("labor/one hop, LABOR-1", unit, partial(hop, by_importance), informing, repeats=5)


def walks(work: Workload) -> Iterator[Case]:
    """Steps per second, a hundred walks for each seed of a batch."""

    def sides() -> dict[str, Side]:
        graph = large_graph(work)
        roots = work.ids(100 * work.sizes.num_seeds, graph.num_nodes())
        on_device = device_graph(work), roots.to(device(work))

        def steps(graph: Graph, roots: Tensor) -> Callable[[], float]:
            return _timed(lambda: LENGTH * random_walks(graph, roots, LENGTH, key=1).shape[0])

        return {OURS: Side(steps(*on_device)), HOST: Side(steps(_bare(graph), roots), num_cores())}

    yield Case("walks/8 steps", score("M steps/s"), sides, (Versus((HOST,)),), repeats=5)


def induced(work: Workload) -> Iterator[Case]:
    """Edges among the nodes of batches: per second, how many in-edges are looked at."""

    def sides() -> dict[str, Side]:
        graph = large_graph(work)
        found = NeighborSampler(_bare(graph), [10, 10]).sample({NODE: batches_of_seeds(work, 1)[0]}, key=SampleKey())
        nodes = found.node[NODE]
        looked_at = int(graph.csc().in_degrees()[nodes].sum())
        on_device = device_graph(work), nodes.to(device(work))

        def edges(graph: Graph, nodes: Tensor) -> Callable[[], float]:
            def run() -> int:
                inner_edges(graph, [Within(EDGE, nodes, nodes)])
                return looked_at

            return _timed(run)

        return {OURS: Side(edges(*on_device)), HOST: Side(edges(_bare(graph), nodes), num_cores())}

    yield Case("induced/nodes of a batch", score("M edges/s"), sides, (Versus((HOST,)),), repeats=5)


def _bare(graph: Graph) -> Graph:
    return Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()})


def _sampled(work: Workload, sampler: Sampler) -> Callable[[], float]:
    seeds = batches_of_seeds(work, 32 if work.sizes is FULL else 4)

    def run() -> int:
        samples = (sampler.sample({NODE: ids}, key=SampleKey(0, 0, index)) for index, ids in enumerate(seeds))
        return sum(sum(sample.num_sampled_edges[EDGE]) for sample in samples)

    return _timed(run, calls=1)


def _timed(run: Callable[[], int], calls: int = 10) -> Callable[[], float]:
    """Millions per second of what `run` returns, over some calls."""

    def measure() -> float:
        synchronize()
        start = time.perf_counter()
        done = sum(run() for _ in range(calls))
        synchronize()
        return 1e-6 * done / (time.perf_counter() - start)

    return measure


BENCHMARKS = [labor, walks, induced]
