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


def _labor(rounds: int) -> Callable[[Contest], tuple[Call, Call]]:
    def sides(c: Contest) -> tuple[Call, Call]:
        import dgl

        ours = LaborSampler(c.graph, c.fanouts, importance_sampling=rounds, normalize=rounds > 0, expand="frontier")
        theirs = dgl.dataloading.LaborSampler(c.fanouts[::-1], importance_sampling=rounds)
        return c.around(ours), lambda: theirs.sample_blocks(c.theirs, c.seeds())

    return sides


def _walks(c: Contest) -> tuple[Call, Call]:
    import dgl

    numbers = count()
    return (
        lambda: random_walks(c.graph, c.seeds().repeat_interleave(10), 10, key=next(numbers)),
        lambda: dgl.sampling.random_walk(c.flipped, c.seeds().repeat_interleave(10), length=10),
    )


def _pinsage(c: Contest) -> tuple[Call, Call]:
    import dgl

    ours = PinSAGESampler(c.graph, [10], num_walks=20, length=3, restart_prob=0.5)
    theirs = dgl.sampling.RandomWalkNeighborSampler(c.flipped, 3, 0.5, 20, 10)
    return c.around(ours), lambda: theirs(c.seeds())


def _saint(mode: str) -> Callable[[Contest], tuple[Call, Call]]:
    def sides(c: Contest) -> tuple[Call, Call]:
        import dgl

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
        theirs = dgl.dataloading.SAINTSampler(mode, budget)
        return c.of_inputs(ours, 1), lambda: theirs.sample(c.flipped, None)

    return sides


def _cluster(c: Contest) -> tuple[Call, Call]:
    import dgl

    num_inputs = max(1, c.clusters.num_clusters // 20)
    theirs = dgl.dataloading.ClusterGCNSampler.__new__(dgl.dataloading.ClusterGCNSampler)  # with our clusters
    of = c.clusters.cluster[NODE]
    theirs.partition_node_ids = torch.argsort(of, stable=True)
    sizes = torch.bincount(of, minlength=c.clusters.num_clusters)
    theirs.partition_offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    theirs.prefetch_ndata, theirs.prefetch_edata, theirs.output_device = [], [], None
    numbers = count()

    def their_batch() -> Any:
        generator = torch.Generator().manual_seed(next(numbers))
        return theirs.sample(c.theirs, torch.randperm(c.clusters.num_clusters, generator=generator)[:num_inputs])

    return c.of_inputs(ClusterSampler(c.graph, c.clusters), num_inputs), their_batch


def _shadow(c: Contest) -> tuple[Call, Call]:
    import dgl

    fanouts = c.fanouts[1:]
    ours = ShadowSampler(c.graph, fanouts, disjoint=False, expand="frontier")
    theirs = dgl.dataloading.ShaDowKHopSampler(fanouts[::-1])
    return c.around(ours), lambda: theirs.sample(c.theirs, c.seeds())


def _induced(c: Contest) -> tuple[Call, Call]:
    """Edges among the nodes of a sample of two hops, found before."""
    sample = Uniform(c.graph, c.fanouts[1:]).sample({NODE: c.seeds()}, key=SampleKey())
    return lambda: induced(sample, c.graph), lambda: c.theirs.subgraph(sample.node[NODE])


CONTESTS: dict[str, Callable[[Contest], tuple[Call, Call]]] = {
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

        def sides(make: Callable[[Contest], tuple[Call, Call]] = make, name: str = name) -> dict[str, Side]:
            contest = work.once("samplers/contest", lambda: Contest(work))
            if peers.missing("dgl"):
                raise RuntimeError("no dgl")
            ours, theirs = make(contest)
            return {OURS: Side(ours), "dgl": of_peer(lambda: theirs)}

        yield Case(f"dgl/{name}", milliseconds(), sides, (Versus(("dgl",), TARGET),), missing=peers.missing("dgl"))
