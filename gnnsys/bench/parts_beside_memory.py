"""One process that reads all parts by itself, beside the same graph in its memory: parts should cost nothing.

Epochs of nodes, of links with negatives, and of links whose nodes have rows to be learned. Nothing is sent to anybody;
what is left are look-ups of who owns an id, and rows that lie in mapped files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.bench.case import Benchmark, Case, Side, Versus, milliseconds
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import LinkNeighborLoader, NegativeSampling, NeighborLoader
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph
from gnnsys.store import DistEmbedding, SparseAdam

NUM_PARTS = 2
DIM = 64
FANOUTS = [10, 10]
PARTS, MEMORY = "on parts", "in memory"
LEAST = 1 / 1.1  # of the speed in memory

Epoch = Callable[[], Any]


def nodes(work: Workload) -> Iterator[Case]:
    """Loading alone."""
    yield _case(work, "parts/nodes", _node_epoch)


def links(work: Workload) -> Iterator[Case]:
    """Loading alone: a negative for each link."""
    yield _case(work, "parts/links", _link_epoch)


def embeddings(work: Workload) -> Iterator[Case]:
    """Loading links, and steps on the rows of all nodes of a batch: looked up, and updated by Adam."""
    yield _case(work, "parts/links, rows to be learned", _embedding_epoch)


BENCHMARKS: list[Benchmark] = [nodes, links, embeddings]


def _case(work: Workload, name: str, epoch: Callable[[Workload, Graph | DistGraph], Epoch]) -> Case:
    def sides() -> dict[str, Side]:
        return {PARTS: Side(epoch(work, _opened(work))), MEMORY: Side(epoch(work, _graph(work)))}

    return Case(name, milliseconds(), sides, (Versus((MEMORY,), LEAST),), ours=PARTS)


def _graph(work: Workload) -> Graph:
    def make() -> Graph:
        csc = work.small_graph.csc()
        return Graph({NODE: csc.num_dst}, {EDGE: csc}, {NODE: {"x": work.rows(csc.num_dst, DIM)}})

    return work.once("parts beside memory/graph", make)


def _opened(work: Workload) -> DistGraph:
    def make() -> DistGraph:
        folder = work.folder / "parts-beside-memory"
        if not folder.exists():
            partition_graph(_graph(work), NUM_PARTS, folder, method="random")
        work.enter(gnnsys.init())
        return gnnsys.open(folder, verify=False)

    return work.once("parts beside memory/parts", make)


def _seeds(work: Workload) -> Tensor:
    return work.ids(work.sizes.epoch_batches * work.sizes.num_seeds // 2, _graph(work).csc().num_dst)


def _node_epoch(work: Workload, graph: Graph | DistGraph) -> Epoch:
    loader = NeighborLoader(
        graph, FANOUTS, input_nodes=_seeds(work), batch_size=work.sizes.num_seeds, across_epochs=False
    )
    return lambda: [None for _ in loader]


def _link_loader(work: Workload, graph: Graph | DistGraph) -> LinkNeighborLoader:
    csc = _graph(work).csc()
    edges = work.ids(work.sizes.epoch_batches * work.sizes.num_seeds // 2, csc.num_edges)
    return LinkNeighborLoader(
        graph,
        FANOUTS,
        edge_label_index=torch.stack([csc.indices[edges].long(), csc.dst()[edges]]),
        neg_sampling=NegativeSampling("binary"),
        batch_size=work.sizes.num_seeds,
        across_epochs=False,
    )


def _link_epoch(work: Workload, graph: Graph | DistGraph) -> Epoch:
    loader = _link_loader(work, graph)
    return lambda: [None for _ in loader]


def _embedding_epoch(work: Workload, graph: Graph | DistGraph) -> Epoch:
    loader = _link_loader(work, graph)
    table: nn.Module
    optimizer: torch.optim.Optimizer
    if isinstance(graph, DistGraph):
        table = DistEmbedding(graph, dim=DIM, node_type=NODE)
        optimizer = SparseAdam([table], lr=0.01)
    else:
        table = nn.Embedding(graph.csc().num_dst, DIM, sparse=True)
        optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.01)

    def epoch() -> None:
        for batch in loader:
            optimizer.zero_grad()
            table(batch.n_id).square().mean().backward()
            optimizer.step()

    return epoch
