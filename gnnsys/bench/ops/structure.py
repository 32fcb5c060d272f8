"""Structure: one hop of neighbours, relabelling, and COO to CSC, beside DGL and what one writes in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnsys import ops
from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds, of_peer
from gnnsys.bench.ops.peer_graphs import dgl_graph
from gnnsys.bench.workload import Workload
from gnnsys.ops import CSC

FANOUT = 10
Call = Callable[[], Any]


def sample(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            csc, seeds = work.csc, _seeds(work)
            found = {OURS: Side(lambda: ops.sample_neighbors(csc, seeds, FANOUT, key=1), threads)}
            if "dgl" not in peers.missing("dgl"):
                found["dgl"] = of_peer(lambda: _dgl_hop(csc, seeds), threads)
            return found

        missing = peers.missing("dgl")
        yield Case(f"sample_neighbors/{threads}t", milliseconds(), sides, (Versus(("dgl",)),), missing=missing)


def compact(work: Workload) -> Iterator[Case]:
    def sides() -> dict[str, Side]:
        csc, seeds = work.csc, _seeds(work)
        ids = ops.sample_neighbors(csc, seeds, FANOUT, key=1).ids
        scratch = ops.compact_scratch(seeds.numel() + ids.numel())
        found = {
            OURS: Side(lambda: ops.compact([seeds], [ids], [0], scratch)),
            "torch.unique": of_peer(lambda: lambda: torch.cat([seeds, ids]).unique(return_inverse=True)),
        }
        if "dgl" not in peers.missing("dgl"):
            found["dgl.to_block"] = of_peer(lambda: _dgl_block(csc, seeds))
        return found

    versus = (Versus(("torch.unique",)), Versus(("dgl.to_block",)))
    missing = {f"{name}.to_block": reason for name, reason in peers.missing("dgl").items()}
    yield Case("compact/1t", milliseconds(), sides, versus, missing=missing)


def coo_to_csc(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            edges, num_nodes = _shuffled_edges(work), work.sizes.num_nodes
            found = {
                OURS: Side(lambda: CSC.from_edge_index(edges, num_nodes), threads),
                "torch.sort": of_peer(lambda: lambda: _sorted_by_destination(edges, num_nodes), threads),
            }
            dgl = peers.find("dgl")
            if not isinstance(dgl, str):
                theirs = dgl.graph
                found["dgl"] = of_peer(
                    lambda: lambda: theirs((edges[0], edges[1]), num_nodes=num_nodes).adj_tensors("csc"), threads
                )
            return found

        yield Case(
            f"coo_to_csc/{threads}t",
            milliseconds(),
            sides,
            (Versus(("torch.sort",)), Versus(("dgl",))),
            repeats=3,
            missing=peers.missing("dgl"),
        )


def _dgl_hop(csc: CSC, seeds: Tensor) -> Call:
    graph, dgl = dgl_graph(csc, formats="csc"), peers.find("dgl")
    assert not isinstance(dgl, str)
    return lambda: dgl.sampling.sample_neighbors(graph, seeds, FANOUT)


def _dgl_block(csc: CSC, seeds: Tensor) -> Call:
    graph, nodes, dgl = dgl_graph(csc, torch.int64, formats="csc"), seeds.long(), peers.find("dgl")
    assert not isinstance(dgl, str)
    frontier = dgl.sampling.sample_neighbors(graph, nodes, FANOUT)
    return lambda: dgl.to_block(frontier, nodes)


def _seeds(work: Workload) -> Tensor:
    """As many seeds as the third hop of a batch has."""
    return work.seeds(work.sizes.num_nodes // 20).to(work.csc.indices.dtype)


def _shuffled_edges(work: Workload) -> Tensor:
    edges = torch.stack([work.csc.indices, work.csc.dst().to(work.csc.indices.dtype)])
    return edges[:, work.ids(work.csc.num_edges, work.csc.num_edges)].contiguous()


def _sorted_by_destination(edges: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    _, order = edges[1].sort(stable=True)
    counts = torch.bincount(edges[1], minlength=num_nodes)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), edges[0].index_select(0, order), order


BENCHMARKS = [sample, compact, coo_to_csc]
