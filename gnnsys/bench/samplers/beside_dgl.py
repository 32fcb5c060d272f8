"""Every sampler that DGL has as well, beside DGL's, on one thread: a batch of the same size from the same graph.

An R-MAT graph, an eighth of the workload's: DGL's GraphSAINT makes numbers for every edge. Ours return samples (nodes,
edges by local id, edge ids), DGL's its graphs or blocks. Both normalize LABOR-i's weights, and not LABOR-0's.
"""

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
from gnnsys.graph import NODE, Graph
from gnnsys.partition import Clustering
from gnnsys.sampling import (
    ClusterSampler,
    LaborSampler,
    PinSAGESampler,
    SaintEdgeSampler,
    SaintNodeSampler,
    SaintWalkSampler,
    SampleKey,
    Sampler,
    ShadowSampler,
    SubgraphSampler,
    cluster,
    induced,
    random_walks,
)
from gnnsys.sampling import NeighborSampler as Uniform

TARGET = 2.0
Call = Callable[[], Any]
Maker = Callable[[], Call]  # of DGL's side, which is not made where there is no DGL


class Contest:
    """Graphs, seeds and sizes that all cases share."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.graph: Graph = work.small_graph
        self.num_nodes = self.graph.num_nodes()
        self.fanouts = list(work.sizes.fanout)
        self.num_seeds = min(work.sizes.num_seeds, self.num_nodes // 8)
        self.subgraph_size = self.num_nodes // 20  # nodes that a subgraph is drawn to have
        self._numbers = count()

    @property
    def theirs(self) -> Any:
        """The same graph as DGL's, with int64 ids (its blocks need them)."""
        return self.work.once("samplers/dgl graph", lambda: dgl_graph(self.graph.csc(), torch.int64))

    @property
    def flipped(self) -> Any:
        """DGL's graph turned round: its walks follow edges, ours go against them."""
        return self.work.once("samplers/dgl flipped", lambda: peers.find("dgl").reverse(self.theirs))  # type: ignore[union-attr]

    @property
    def clusters(self) -> Clustering:
        return self.work.once("samplers/clusters", lambda: cluster(self.graph, self.num_nodes // 125))

    def seeds(self) -> Tensor:
        """The next batch's: both sides go through the same ones."""
        nodes = self.work.once("samplers/with in-edges", lambda: self.graph.csc().in_degrees().nonzero().view(-1))
        generator = torch.Generator().manual_seed(next(self._numbers) // 2)
        return nodes[torch.randint(0, nodes.numel(), (self.num_seeds,), generator=generator).unique()]

    def around(self, sampler: Sampler) -> Call:
        numbers = count()
        return lambda: sampler.sample({NODE: self.seeds()}, key=SampleKey(0, 0, next(numbers)))

    def of_inputs(self, sampler: SubgraphSampler, num_inputs: int) -> Call:
        numbers = count()

        def call() -> Any:
            number = next(numbers)
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randperm(sampler.num_inputs, generator=generator)[:num_inputs]
            return sampler.sample(inputs, key=SampleKey(0, number, 0))

        return call


MakeSides = Callable[[Contest], tuple[Call, Maker]]


def _labor(rounds: int) -> MakeSides:
    def sides(c: Contest) -> tuple[Call, Maker]:
        ours = LaborSampler(c.graph, c.fanouts, importance_sampling=rounds, normalize=rounds > 0, expand="frontier")

        def theirs() -> Call:
            import dgl

            sampler = dgl.dataloading.LaborSampler(c.fanouts[::-1], importance_sampling=rounds)
            return lambda: sampler.sample_blocks(c.theirs, c.seeds())

        return c.around(ours), theirs

    return sides


def _walks(c: Contest) -> tuple[Call, Maker]:
    numbers = count()

    def theirs() -> Call:
        import dgl

        return lambda: dgl.sampling.random_walk(c.flipped, c.seeds().repeat_interleave(10), length=10)

    return lambda: random_walks(c.graph, c.seeds().repeat_interleave(10), 10, key=next(numbers)), theirs


def _pinsage(c: Contest) -> tuple[Call, Maker]:
    ours = PinSAGESampler(c.graph, [10], num_walks=20, length=3, restart_prob=0.5)

    def theirs() -> Call:
        import dgl

        sampler = dgl.sampling.RandomWalkNeighborSampler(c.flipped, 3, 0.5, 20, 10)
        return lambda: sampler(c.seeds())

    return c.around(ours), theirs


def _saint(mode: str) -> MakeSides:
    def sides(c: Contest) -> tuple[Call, Maker]:
        size = c.subgraph_size
        options: dict[str, Any] = {"num_subgraphs": 1, "coverage": 0}
        budget: Any = size
        if mode == "walk":
            budget = (size // 4, 3)
            ours: SubgraphSampler = SaintWalkSampler(c.graph, *budget, **options)
        elif mode == "node":
            ours = SaintNodeSampler(c.graph, budget, **options)
        else:
            budget = size // 2
            ours = SaintEdgeSampler(c.graph, budget, **options)

        def theirs() -> Call:
            import dgl

            sampler = dgl.dataloading.SAINTSampler(mode, budget)
            return lambda: sampler.sample(c.flipped, None)

        return c.of_inputs(ours, 1), theirs

    return sides


def _cluster(c: Contest) -> tuple[Call, Maker]:
    num_inputs = max(1, c.clusters.num_clusters // 20)

    def theirs() -> Call:
        import dgl

        sampler = dgl.dataloading.ClusterGCNSampler.__new__(dgl.dataloading.ClusterGCNSampler)  # with our clusters
        of = c.clusters.cluster[NODE]
        sampler.partition_node_ids = torch.argsort(of, stable=True)
        sizes = torch.bincount(of, minlength=c.clusters.num_clusters)
        sampler.partition_offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        sampler.prefetch_ndata, sampler.prefetch_edata, sampler.output_device = [], [], None
        numbers = count()

        def batch() -> Any:
            generator = torch.Generator().manual_seed(next(numbers))
            return sampler.sample(c.theirs, torch.randperm(c.clusters.num_clusters, generator=generator)[:num_inputs])

        return batch

    return c.of_inputs(ClusterSampler(c.graph, c.clusters), num_inputs), theirs


def _shadow(c: Contest) -> tuple[Call, Maker]:
    fanouts = c.fanouts[1:]
    ours = ShadowSampler(c.graph, fanouts, disjoint=False, expand="frontier")

    def theirs() -> Call:
        import dgl

        sampler = dgl.dataloading.ShaDowKHopSampler(fanouts[::-1])
        return lambda: sampler.sample(c.theirs, c.seeds())

    return c.around(ours), theirs


def _induced(c: Contest) -> tuple[Call, Maker]:
    """Edges among the nodes of a sample of two hops, found before."""
    sample = Uniform(c.graph, c.fanouts[1:]).sample({NODE: c.seeds()}, key=SampleKey())
    return lambda: induced(sample, c.graph), lambda: lambda: c.theirs.subgraph(sample.node[NODE])


CONTESTS: dict[str, MakeSides] = {
    "labor-0": _labor(0),
    "labor-1": _labor(1),
    "walks": _walks,
    "pinsage": _pinsage,
    "saint-node": _saint("node"),
    "saint-edge": _saint("edge"),
    "saint-walk": _saint("walk"),
    "cluster": _cluster,
    "shadow": _shadow,
    "induced": _induced,
}


def beside_dgl(work: Workload) -> Iterator[Case]:
    for name, make in CONTESTS.items():

        def sides(make: MakeSides = make) -> dict[str, Side]:
            ours, theirs = make(work.once("samplers/contest", lambda: Contest(work)))
            return {OURS: Side(ours)} | ({} if peers.missing("dgl") else {"dgl": of_peer(theirs)})

        yield Case(f"dgl/{name}", milliseconds(), sides, (Versus(("dgl",), TARGET),), missing=peers.missing("dgl"))
