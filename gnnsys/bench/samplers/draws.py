"""How long samplers take: LABOR beside DGL's, and guided draws beside uniform ones on the same parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds, of_peer
from gnnsys.bench.ops.peer_graphs import dgl_graph
from gnnsys.bench.workload import Workload
from gnnsys.graph import NODE
from gnnsys.partition import open_parts, partition_graph
from gnnsys.sampling import (
    DistGraph,
    GuidedSampler,
    LaborSampler,
    NeighborSampler,
    NodeScores,
    SampleKey,
    Sampler,
)
from gnnsys.store import Shard, Store

NUM_PARTS = 4


def parted(work: Workload) -> DistGraph:
    """The workload's graph in parts, all read by this process."""

    def make() -> DistGraph:
        folder = work.folder / f"samplers-{work.sizes.num_nodes}"
        if not (folder / "manifest.json").exists():
            partition_graph(work.graph, NUM_PARTS, folder, method="random")
        return open_alone(folder)

    return work.once("samplers/parts", make)


def open_alone(folder: Any) -> DistGraph:
    """Parts that one process reads by itself."""
    parts = open_parts(folder)
    owner = [0] * parts.num_parts
    store = Store(machine_of_part=owner, machine=0, local=Shard(0), rank=0, world_size=1)
    return DistGraph(parts, store, None, 0, owner)


def next_batch(sampler: Sampler, seeds: Tensor) -> Callable[[], Any]:
    """A call that samples the same seeds as another batch each time."""
    numbers = count()
    return lambda: sampler.sample({NODE: seeds}, key=SampleKey(0, 0, next(numbers)))


def labor_draws(work: Workload) -> Iterator[Case]:
    """Three hops into blocks, one batch, one thread."""

    def sides() -> dict[str, Side]:
        seeds, fanouts = work.seeds(work.sizes.num_seeds), list(work.sizes.fanout)
        ours = LaborSampler(work.graph, fanouts, expand="frontier")
        uniform = NeighborSampler(work.graph, fanouts, expand="frontier")
        made = {OURS: Side(next_batch(ours, seeds)), "uniform": Side(next_batch(uniform, seeds))}
        if not peers.missing("dgl"):
            made["dgl"] = of_peer(lambda: _dgl_labor(work, seeds, fanouts))
        return made

    versus = (Versus(("dgl",), 2.0), Versus(("uniform",)))
    yield Case("draws/labor", milliseconds(), sides, versus, missing=peers.missing("dgl"))


def _dgl_labor(work: Workload, seeds: Tensor, fanouts: list[int]) -> Callable[[], Any]:
    import dgl

    graph = dgl_graph(work.csc)
    sampler = dgl.dataloading.LaborSampler(fanouts[::-1])
    nodes = seeds.to(graph.idtype)
    return lambda: sampler.sample_blocks(graph, nodes)


def guided_draws(work: Workload) -> Iterator[Case]:
    """The same fanouts on four parts, one batch, one thread: guided draws look at all in-edges, uniform ones do not."""

    def sides() -> dict[str, Side]:
        graph, fanouts = parted(work), list(work.sizes.fanout)
        seeds = graph.global_ids(work.seeds(work.sizes.num_seeds), NODE)
        guided = {}
        for kind in (OURS, "unbiased"):
            sampler = GuidedSampler(graph, fanouts, requester=0, unbiased=kind == "unbiased")
            sampler.use(every_score(graph, 0), at=(0, 0))
            guided[kind] = Side(next_batch(sampler, seeds))
        return {**guided, "uniform": Side(next_batch(NeighborSampler(graph, fanouts), seeds))}

    yield Case("draws/guided", milliseconds(), sides, (Versus(("uniform",), 0.3), Versus(("unbiased",))))


def every_score(graph: DistGraph, requester: int) -> NodeScores:
    """A random score for every node of other parts."""
    own, num_nodes = graph.book.part_range(requester, NODE), graph.num_nodes(NODE)
    ids = torch.cat([torch.arange(own.start, device="cpu"), torch.arange(own.stop, num_nodes, device="cpu")])
    generator = torch.Generator().manual_seed(0)
    return NodeScores(requester, ids, torch.randint(1, 256, ids.shape, generator=generator, device="cpu").byte())
