"""A rank's share of a graph: its nodes, in global ids one contiguous range, and all their in-edges.

Everything else in this room is made from it. A share comes from parts on disk (a rank takes its subparts), or from a
graph in memory and, where there are several ranks, the rank of every node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.ops import CSC, gather_rows, in_subgraph

if TYPE_CHECKING:
    from gnnsys.partition import Part
    from gnnsys.sampling import DistGraph


@dataclass(frozen=True, eq=False)
class RankShare:
    """What rank `rank` has. `source` is where rows of nodes and of edges are read from."""

    rank: int
    offsets: Tensor  # int64 [world_size + 1]: rank r has the global ids [offsets[r], offsets[r + 1])
    csc: CSC  # a column per own node; its sources are global ids
    original_ids: Tensor  # int64 [num_core]
    source: Any
    find_edge_ids: Callable[[], Tensor]  # int64 [num_edges]: by position of `csc`, which row of the source's edge data

    @property
    def world_size(self) -> int:
        return self.offsets.numel() - 1

    @property
    def num_core(self) -> int:
        return self.csc.num_dst

    @property
    def first(self) -> int:
        """The first of this rank's global ids."""
        return int(self.offsets[self.rank])

    def rows(self, name: str) -> Tensor:
        """This rank's rows of one array of node data, in the order of its nodes.

        >>> x, y = share.rows("x"), share.rows("y")
        """
        if isinstance(self.source, Graph):
            known = self.source.node_data[self.source.node_types[0]]
            index = self.original_ids
        else:
            known = self.source.node_data[self.source.node_types[0]]
            index = torch.arange(self.first, self.first + self.num_core, device="cpu")
        if name not in known:
            raise ValueError(f"the nodes have no {name!r}, they have {list(known)}")
        return torch.as_tensor(known[name][index])

    def edge_rows(self, name: str) -> Tensor:
        """The rows of one array of edge data that belong to this rank's in-edges, by position of `csc`."""
        return torch.as_tensor(self.edge_array(name)[self.find_edge_ids()])

    def edge_array(self, name: str) -> Any:
        """One array of edge data, of all edges: a tensor or a table, whose rows go by edge ids."""
        known = self.source.edge_data[self.source.edge_types[0]]
        if name not in known:
            raise ValueError(f"the edges have no {name!r}, they have {list(known)}")
        return known[name]


def share_of(
    graph: Graph | DistGraph | RankShare, rank: int, world_size: int, ranks: Tensor | None = None
) -> RankShare:
    """The share of `rank`: of parts what they say, of a graph in memory what `ranks`, [num_nodes], gives it.

    Graphs have one node type and one edge type.
    """
    if isinstance(graph, RankShare):
        if (graph.rank, graph.world_size) != (rank, world_size):
            raise ValueError(
                f"this is the share of rank {graph.rank} of {graph.world_size}, and this process is rank {rank} of "
                f"{world_size}"
            )
        return graph
    if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
        raise ValueError(
            f"full-graph training takes one node type and one edge type, got {graph.edge_types}: sample it with "
            "gnnsys.NeighborLoader instead"
        )
    if not isinstance(graph, Graph):
        if ranks is not None:
            raise ValueError("parts say themselves which nodes a rank has: leave ranks away")
        return _share_of_parts(graph, rank, world_size)
    if ranks is None:
        if world_size > 1:
            raise ValueError(
                f"{world_size} ranks share a graph in memory: pass ranks, the rank of every node, or open parts, which "
                "`gnnsys partition` makes"
            )
        ranks = torch.zeros(graph.num_nodes(), dtype=torch.int64)
    return _share_of_graph(graph, rank, world_size, ranks)


def _share_of_graph(graph: Graph, rank: int, world_size: int, ranks: Tensor) -> RankShare:
    num_nodes, ranks = graph.num_nodes(), ranks.cpu()
    if ranks.shape != (num_nodes,) or ranks.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ranks must be int [{num_nodes}], a rank per node, got {ranks.dtype} {list(ranks.shape)}")
    if num_nodes and not 0 <= int(ranks.min()) <= int(ranks.max()) < world_size:
        raise ValueError(f"ranks must be in [0, {world_size}), got {int(ranks.min())} to {int(ranks.max())}")
    counts = torch.bincount(ranks.long(), minlength=world_size)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if world_size == 1:
        return RankShare(
            rank, offsets, _on_host(graph), torch.arange(num_nodes), graph, lambda: _edges_into(graph, None)
        )
    original_ids = torch.sort(ranks, stable=True).indices  # by global id
    global_ids = torch.empty_like(original_ids)
    global_ids[original_ids] = torch.arange(num_nodes)
    own = original_ids[int(offsets[rank]) : int(offsets[rank + 1])]
    whole = _on_host(graph)
    mine = in_subgraph(whole, own.to(whole.indices.dtype))
    sources = global_ids.to(mine.indices.dtype)[mine.indices.long()]
    csc = CSC(mine.indptr, sources, num_nodes)
    return RankShare(rank, offsets, csc, own, graph, lambda: _edges_into(graph, own))


def _edges_into(graph: Graph, nodes: Tensor | None) -> Tensor:
    """The user's ids of the edges into nodes, by default all, in the order of the structure."""
    csc = _on_host(graph)
    positions = torch.arange(csc.num_edges, device="cpu")
    if nodes is not None:
        found = in_subgraph(csc, nodes.to(csc.indices.dtype)).edge_ids
        assert found is not None
        positions = found.long()
    return positions if csc.edge_ids is None else csc.edge_ids[positions].long()


def _on_host(graph: Graph) -> CSC:
    """The structure where plans are made; what bins need of it goes to the device with them."""
    csc = graph.csc()
    return csc if csc.indices.is_cpu else csc.to("cpu")


def _share_of_parts(graph: DistGraph, rank: int, world_size: int) -> RankShare:
    book, parts = graph.book, graph.parts
    if book.num_subparts % world_size:
        raise ValueError(
            f"{book.num_parts} parts of {book.trainers_per_part} subparts cannot be dealt to {world_size} ranks alike: "
            f"partition with --parts and --trainers-per-part whose product {world_size} divides"
        )
    each = book.num_subparts // world_size
    offsets = next(iter(book.node_offsets.values()))[::each].clone()
    own = range(rank * each, (rank + 1) * each)
    needed = sorted({subpart // book.trainers_per_part for subpart in own})
    away = [part for part in needed if part not in graph.parts_here]
    if away:
        raise ValueError(
            f"rank {rank} trains on parts {needed}, and this machine has {graph.parts_here}: put the folders of parts "
            f"{away} here, or start the ranks in the order of the parts"
        )
    pieces, edges = [], []
    for part in needed:
        own_ids = book.part_range(part)
        first, end = max(int(offsets[rank]), own_ids.start), min(int(offsets[rank + 1]), own_ids.stop)
        pieces.append(_columns(parts.part(part), first, end))
        indptr = parts.part(part).csc().indptr
        start = book.part_range(part, graph.edge_types[0]).start
        edges.append((start + int(indptr[first - own_ids.start]), start + int(indptr[end - own_ids.start])))
    starts, num_edges = [torch.zeros(1, dtype=torch.int64)], 0
    for piece, _ in pieces:  # of which any may have no node
        starts.append(piece.indptr[1:] + num_edges)
        num_edges += piece.num_edges
    indices = torch.cat([piece.indices for piece, _ in pieces])
    csc = CSC(torch.cat(starts), indices, book.num_ids())
    original_ids = torch.cat([ids for _, ids in pieces]).long()
    return RankShare(
        rank, offsets, csc, original_ids, graph,
        lambda: torch.cat([torch.arange(a, b, device="cpu") for a, b in edges]),
    )  # fmt: skip


def _columns(part: Part, first: int, end: int) -> tuple[CSC, Tensor]:
    """The in-edges of a part's nodes with global ids first to end, in global ids, and the nodes' original ids."""
    own = part.book.part_range(part.index)
    csc = part.csc()
    indptr = csc.indptr[first - own.start : end - own.start + 1]
    local = csc.indices[int(indptr[0]) : int(indptr[-1])]
    num_nodes = part.book.num_ids()
    dtype = torch.int32 if num_nodes <= torch.iinfo(torch.int32).max else torch.int64
    names = torch.cat([torch.arange(own.start, own.stop), part.halo().long()]).to(dtype)  # by local id
    sources = gather_rows(names, local)
    return CSC(indptr - indptr[0], sources, num_nodes), part.original_ids()[first - own.start : end - own.start]
