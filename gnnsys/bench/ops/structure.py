"""Structure: one hop of neighbours, relabelling, and COO to CSC, beside DGL and what one writes in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnsys import ops
from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds
from gnnsys.bench.ops.peer_graphs import dgl_graph
from gnnsys.bench.workload import Workload
from gnnsys.ops import CSC

FANOUT = 10
Call = Callable[[], Any]


def sample(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            csc, seeds = work.csc, _seeds(work)
            calls: dict[str, Call] = {OURS: lambda: ops.sample_neighbors(csc, seeds, FANOUT, key=1)}
            dgl = peers.find("dgl")
            if not isinstance(dgl, str):
                graph = dgl_graph(csc, formats="csc")
                calls["dgl"] = lambda: dgl.sampling.sample_neighbors(graph, seeds, FANOUT)
            return {name: Side(call, threads) for name, call in calls.items()}

        missing = peers.missing("dgl")
        yield Case(f"sample_neighbors/{threads}t", milliseconds(), sides, (Versus(("dgl",)),), missing=missing)


def compact(work: Workload) -> Iterator[Case]:
    def sides() -> dict[str, Side]:
        csc, seeds = work.csc, _seeds(work)
        ids = ops.sample_neighbors(csc, seeds, FANOUT, key=1).ids
        scratch = ops.compact_scratch(seeds.numel() + ids.numel())
        calls: dict[str, Call] = {
            OURS: lambda: ops.compact([seeds], [ids], [0], scratch),
            "torch.unique": lambda: torch.cat([seeds, ids]).unique(return_inverse=True),
        }
        dgl = peers.find("dgl")
        if not isinstance(dgl, str):
            graph, nodes = dgl_graph(csc, torch.int64, formats="csc"), seeds.long()
            frontier = dgl.sampling.sample_neighbors(graph, nodes, FANOUT)
            calls["dgl.to_block"] = lambda: dgl.to_block(frontier, nodes)
        return {name: Side(call) for name, call in calls.items()}

    versus = (Versus(("torch.unique",)), Versus(("dgl.to_block",)))
    missing = {f"{name}.to_block": reason for name, reason in peers.missing("dgl").items()}
    yield Case("compact/1t", milliseconds(), sides, versus, missing=missing)


def coo_to_csc(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            edges, num_nodes = _shuffled_edges(work), work.sizes.num_nodes
            calls: dict[str, Call] = {
                OURS: lambda: CSC.from_edge_index(edges, num_nodes),
                "torch.sort": lambda: _sorted_by_destination(edges, num_nodes),
            }
            dgl = peers.find("dgl")
            if not isinstance(dgl, str):
                calls["dgl"] = lambda: dgl.graph((edges[0], edges[1]), num_nodes=num_nodes).adj_tensors("csc")
            return {name: Side(call, threads) for name, call in calls.items()}

        yield Case(
            f"coo_to_csc/{threads}t",
            milliseconds(),
            sides,
            (Versus(("torch.sort",)), Versus(("dgl",))),
            repeats=3,
            missing=peers.missing("dgl"),
        )


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
