"""Relabelling beside torch.unique, and three hops of sampling beside our own sampler on all cores of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnsys import ops
from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds, of_peer, score
from gnnsys.bench.gpu.inputs import (
    FANOUTS,
    batches_of_seeds,
    device,
    device_graph,
    is_gpu,
    large_graph,
    num_cores,
    pinned_graph,
    synchronize,
)
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.sampling import NeighborSampler, SampleKey

NUM_IDS = (110_000, 1_100_000, 5_500_000)
FANOUT = 10
NUM_BATCHES = 32  # of which a host's cores make every fourth when they share it
UNIQUE = "torch.unique"
PROMISED, PROMISE = "400M edges/s", 400.0
ONE_BATCH, MANY_BATCHES = "host, cores in a batch", "host, batches by cores"


def compact(work: Workload) -> Iterator[Case]:
    """Seeds and ten neighbours of each. torch.unique sorts and loses who came first; ours has the seeds first. Ids are
    as an edge_index of torch has them, and as our graphs have them, which sort in half the passes."""
    scale = work.sizes.num_nodes / 1_000_000
    for num_ids in NUM_IDS:
        for dtype in (torch.int64, torch.int32):

            def sides(num_ids: int = num_ids, dtype: torch.dtype = dtype) -> dict[str, Side]:
                csc, target = large_graph(work).csc(), device(work)
                num_seeds = max(1, round(num_ids * scale) // (FANOUT + 1))
                seeds = work.ids(num_seeds, csc.num_dst).to(csc.indices.dtype)
                ids = ops.sample_neighbors(csc, seeds, FANOUT, key=1).ids.to(target, dtype)
                seeds = seeds.to(target, dtype)
                both = torch.cat([seeds, ids])
                _check_compact(seeds, ids)
                return {
                    OURS: Side(lambda: ops.compact([seeds], [ids], [0]), clock="synced"),
                    UNIQUE: of_peer(lambda: lambda: both.unique(return_inverse=True), clock="synced"),
                }

            name = f"compact/{num_ids:,} {str(dtype).removeprefix('torch.')} ids"
            yield Case(name, milliseconds(), sides, (Versus((UNIQUE,), 2.0),), repeats=21)


def sampling(work: Workload) -> Iterator[Case]:
    """Edges per second of whole samples, local ids and all, one batch after the other.

    The host's sampler has all cores in one of two ways: they share the sampling of a batch, whose relabelling is one
    core's; or each makes batches of its own, which takes as many batches in memory and gives no batch sooner.
    """

    def in_device_memory() -> dict[str, Side]:
        return {
            OURS: Side(_sampled(work, device_graph(work))),
            PROMISED: Side(lambda: PROMISE),
            **_on_host(work),
        }

    def in_host_memory() -> dict[str, Side]:
        return {OURS: Side(_sampled(work, pinned_graph(work))), **_on_host(work)}

    unit, informs = score("M edges/s"), Versus((MANY_BATCHES,))
    promised = Versus((PROMISED,), 1.0), Versus((ONE_BATCH,)), informs
    yield Case("sampling/device memory", unit, in_device_memory, promised, repeats=5)
    yield Case("sampling/pinned host memory", unit, in_host_memory, (Versus((ONE_BATCH,), 8.0), informs), repeats=5)


def _check_compact(seeds: Tensor, ids: Tensor) -> None:
    [nodes], [local] = ops.compact([seeds], [ids], [0])
    kept = torch.cat([seeds, ids]).unique().numel()
    if not (nodes[: seeds.numel()].equal(seeds) and nodes[local].equal(ids) and nodes.numel() == kept):
        raise RuntimeError("compact: the nodes are not the seeds and then every other id once")


def _on_host(work: Workload) -> dict[str, Side]:
    graph = large_graph(work)
    bare = Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()})
    seeds = batches_of_seeds(work, _num_batches(work))
    loader = NeighborLoader(
        bare,
        FANOUTS,
        input_nodes=torch.cat(seeds),
        batch_size=work.sizes.num_seeds,
        num_threads=num_cores(),
        prefetch=num_cores() + 1,
        across_epochs=False,
    )
    sampler = NeighborSampler(bare, FANOUTS)
    return {
        ONE_BATCH: Side(lambda: _edges_per_second(_samples(sampler, seeds[::4])), num_cores()),
        MANY_BATCHES: Side(lambda: _edges_per_second(sum(batch.num_sampled_edges) for batch in loader)),
    }


def _sampled(work: Workload, graph: Graph) -> Callable[[], float]:
    """Seeds come from the host, as a loader's do."""
    options: dict[str, Any] = {"device": device(work)} if is_gpu(work) else {}
    sampler = NeighborSampler(graph, FANOUTS, **options)
    seeds = batches_of_seeds(work, _num_batches(work))
    return lambda: _edges_per_second(_samples(sampler, seeds))


def _num_batches(work: Workload) -> int:
    return NUM_BATCHES if work.sizes is FULL else 4


def _samples(sampler: NeighborSampler, seeds: list[Tensor]) -> Iterator[int]:
    """The number of edges of each batch; the samples themselves go at once."""
    for index, ids in enumerate(seeds):
        sample = sampler.sample({NODE: ids}, key=SampleKey(0, 0, index))
        yield sum(sample.num_sampled_edges[EDGE])


def _edges_per_second(counts: Iterable[int]) -> float:
    """In millions."""
    synchronize()
    start = time.perf_counter()
    num_edges = sum(counts)
    synchronize()
    return 1e-6 * num_edges / (time.perf_counter() - start)


BENCHMARKS = [compact, sampling]
