"""One process that reads all parts by itself, beside the same graph in its memory: parts should cost nothing.

Epochs of nodes, of links with negatives, and of links whose nodes have rows to be learned. Nothing is sent to anybody;
what is left are look-ups of who owns an id, and rows that lie in mapped files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.bench.case import Benchmark, Case, Side, Versus, milliseconds, score
from gnnsys.bench.local_ranks import run_local_ranks
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import LinkNeighborLoader, NegativeSampling, NeighborLoader
from gnnsys.observe import num_usable_cores
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph
from gnnsys.store import DistEmbedding, SparseAdam

NUM_PARTS = 2
DIM = 64
FANOUTS = [10, 10]
PARTS, MEMORY = "on parts", "in memory"
ONE, TWO, ALL_CORES = "one rank", "two ranks", "all cores used"
LEAST = 1 / 1.1  # of the speed in memory
TWO_RANKS = 1.5  # of one rank's links per second
_JOB_SECONDS = 600.0

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


def two_ranks(work: Workload) -> Iterator[Case]:
    """Links with rows to be learned, by one rank and by two of the same machine: what a second one adds.

    One rank loads and computes side by side, so it uses more than one core already. `all cores used` is what it would
    do if it could use all of them: no number of ranks that work as it does can do more.
    """

    def sides() -> dict[str, Side]:
        folder = _shared_part(work)
        alone: list[dict[str, float]] = []

        def one() -> float:
            alone.extend(_run_link_ranks(work, folder, 1))
            return alone[-1]["links_per_second"]

        def two() -> float:
            return sum(rank["links_per_second"] for rank in _run_link_ranks(work, folder, 2))

        def bound() -> float:
            return alone[-1]["links_per_second"] * num_usable_cores() / alone[-1]["cores"]

        return {TWO: Side(two), ONE: Side(one), ALL_CORES: Side(bound)}

    versus = (Versus((ONE,), TWO_RANKS), Versus((ALL_CORES,)))
    yield Case("parts/two ranks", score("links/s"), sides, versus, ours=TWO, limit=ALL_CORES, repeats=3)


BENCHMARKS: list[Benchmark] = [nodes, links, embeddings, two_ranks]


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


def _shared_part(work: Workload) -> Path:
    """One part for two trainers, with as many train links as an epoch has."""

    def make() -> Path:
        folder = work.folder / "part-of-two-trainers"
        if not folder.exists():
            graph = _graph(work)
            chosen = torch.zeros(graph.num_edges(), dtype=torch.bool)
            chosen[work.ids(work.sizes.epoch_batches * work.sizes.num_seeds, graph.num_edges())] = True
            graph.set_edge_data("train_mask", chosen)
            partition_graph(graph, 1, folder, method="random", trainers_per_part=2)
        return folder

    return work.once("parts beside memory/one part", make)


def _run_link_ranks(work: Workload, folder: Path, num_ranks: int) -> list[dict[str, float]]:
    command = ["-m", "gnnsys.bench.link_rank", str(folder), str(work.sizes.num_seeds)]
    said = run_local_ranks(command, num_ranks, _JOB_SECONDS, {"OMP_NUM_THREADS": "1"}, share_machine=True)
    return [json.loads(text.splitlines()[-1]) for text in said]


def _seeds(work: Workload) -> Tensor:
    return work.ids(work.sizes.epoch_batches * work.sizes.num_seeds // 2, _graph(work).csc().num_dst)


def _node_epoch(work: Workload, graph: Graph | DistGraph) -> Epoch:
    loader = NeighborLoader(
        graph,
        FANOUTS,
        input_nodes=graph.from_global(_seeds(work)),
        batch_size=work.sizes.num_seeds,
        across_epochs=False,
    )
    return lambda: [None for _ in loader]


def _link_loader(work: Workload, graph: Graph | DistGraph) -> LinkNeighborLoader:
    csc = _graph(work).csc()
    edges = work.ids(work.sizes.epoch_batches * work.sizes.num_seeds // 2, csc.num_edges)
    return LinkNeighborLoader(
        graph,
        FANOUTS,
        edge_label_index=graph.from_global(torch.stack([csc.indices[edges].long(), csc.dst()[edges]])),
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
