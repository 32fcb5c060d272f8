"""A rank's share of a graph: its nodes, in global ids one contiguous range, and all their in-edges.

Everything else in this room is made from it. A share comes from parts on disk (a rank takes its subparts), or from a
graph in memory and, where there are several ranks, the rank of every node. Of typed graphs `typed_share.py` knows more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnsys.fullgraph.plan.graph_types import GraphTypes
from gnnsys.fullgraph.plan.typed_share import TypedNodes, edges_of_graph, edges_of_parts, nodes_of_parts, nodes_of_ranks
from gnnsys.graph import Graph, NodeType, some
from gnnsys.ops import CSC, gather_rows, in_subgraph

if TYPE_CHECKING:
    from gnnsys.partition import Part
    from gnnsys.sampling import DistGraph


@dataclass(frozen=True, eq=False)
class TypedPart:
    """What a share of a typed graph has besides. Its nodes come type by type, `counts` of each."""

    types: GraphTypes
    original_ids: Mapping[NodeType, Tensor]
    counts: list[int]
    first_ids: Mapping[NodeType, int]  # among the global ids that parts give the nodes of a type
    edge_type: Tensor  # int16 [num_edges]: by position of the share's `csc`, the place among types.edge_types


@dataclass(frozen=True, eq=False)
class RankShare:
    """What rank `rank` has. `source` is where rows of nodes and of edges are read from.

    Of a typed graph `original_ids` are ids of one graph, in which nodes of all types come one after another.
    """

    rank: int
    offsets: Tensor  # int64 [world_size + 1]: rank r has the global ids [offsets[r], offsets[r + 1])
    csc: CSC  # a column per own node; its sources are global ids
    original_ids: Tensor  # int64 [num_core]
    source: Any
    find_edge_ids: Callable[[], Tensor]  # int64 [num_edges]: by position of `csc`, which row of the source's edge data
    typed: TypedPart | None = None

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

    def rows(self, name: str, node_type: NodeType | None = None) -> Any:
        """This rank's rows of one array of node data, in the order of its nodes.

        Of a typed graph those of one node type, or by node type those of all that have such an array.

        >>> x, y = share.rows("x"), share.rows("y")
        """
        if node_type is not None:
            self._check_type(node_type)
        if self.typed is None:
            return self._rows_of(name, self.source.node_types[0], self.original_ids, self.first)
        if node_type is not None:
            return self._rows_of(name, node_type, self.typed.original_ids[node_type], self.typed.first_ids[node_type])
        known = [t for t in self.typed.types.node_types if name in self.source.node_data[t]]
        if not known:
            raise ValueError(f"no node type has an array {name!r}")
        return {t: self.rows(name, t) for t in known}

    def global_ids(self, node_type: NodeType | None = None) -> Tensor:
        """This rank's nodes by the ids that parts give them, which a `DistEmbedding` is called with."""
        if isinstance(self.source, Graph):
            raise ValueError("nodes of a graph in memory have no ids but the user's: model.nodes has them")
        if self.typed is not None or node_type is not None:
            self._check_type(node_type)
        if self.typed is None:
            return torch.arange(self.first, self.first + self.num_core, device="cpu")
        assert node_type is not None
        first = self.typed.first_ids[node_type]
        return torch.arange(first, first + self.typed.original_ids[node_type].numel(), device="cpu")

    def _check_type(self, node_type: NodeType | None) -> None:
        if node_type not in self.source.node_types:
            raise ValueError(f"node_type must be one of {some(list(self.source.node_types))}, got {node_type!r}")

    def _rows_of(self, name: str, node_type: NodeType, original_ids: Tensor, first: int) -> Tensor:
        known = self.source.node_data[node_type]
        if name not in known:
            raise ValueError(f"the nodes have no {name!r}, they have {list(known)}")
        if isinstance(self.source, Graph):
            return torch.as_tensor(known[name][original_ids])
        return torch.as_tensor(known[name][torch.arange(first, first + original_ids.numel(), device="cpu")])

    def edge_rows(self, name: str) -> Tensor:
        """The rows of one array of edge data that belong to this rank's in-edges, by position of `csc`."""
        return torch.as_tensor(self.edge_array(name)[self.find_edge_ids()])

    def edge_array(self, name: str) -> Any:
        """One array of edge data, of all edges: a tensor or a table, whose rows go by edge ids."""
        if self.typed is not None:
            raise ValueError(
                f"rows of edges are for graphs of one type, and this one has {len(self.typed.types.edge_types)} edge "
                "types: leave edge_data away"
            )
        known = self.source.edge_data[self.source.edge_types[0]]
        if name not in known:
            raise ValueError(f"the edges have no {name!r}, they have {list(known)}")
        return known[name]


Ranks = Tensor | Mapping[NodeType, Tensor]


def share_of(graph: Graph | DistGraph | RankShare, rank: int, world_size: int, ranks: Ranks | None = None) -> RankShare:
    """The share of `rank`: of parts what they say, of a graph in memory what `ranks` gives it.

    `ranks` is [num_nodes], of a graph with several node or edge types {node type: [num_nodes]}.
    """
    if isinstance(graph, RankShare):
        if (graph.rank, graph.world_size) != (rank, world_size):
            raise ValueError(
                f"this is the share of rank {graph.rank} of {graph.world_size}, and this process is rank {rank} of "
                f"{world_size}"
            )
        return graph
    types = GraphTypes.of(graph)
    if not isinstance(graph, Graph):
        if ranks is not None:
            raise ValueError("parts say themselves which nodes a rank has: leave ranks away")
        return _share_of_parts(graph, rank, world_size, types)
    if ranks is None and world_size > 1:
        raise ValueError(
            f"{world_size} ranks share a graph in memory: pass ranks, the rank of every node, or open parts, which "
            "`gnnsys partition` makes"
        )
    if types is not None:
        return _typed_share_of_graph(graph, rank, world_size, types, ranks)
    ranks = torch.zeros(graph.num_nodes(), dtype=torch.int64) if ranks is None else ranks
    if not isinstance(ranks, Tensor):
        raise ValueError(f"ranks must be int [{graph.num_nodes()}], a rank per node, got {type(ranks).__name__}")
    return _share_of_graph(graph, rank, world_size, ranks)


def _typed_share_of_graph(graph: Graph, rank: int, world_size: int, types: GraphTypes, ranks: Any) -> RankShare:
    if ranks is None:
        ranks = {t: torch.zeros(graph.num_nodes(t), dtype=torch.int64) for t in types.node_types}
    nodes = nodes_of_ranks(graph, types, ranks, rank, world_size)
    csc, edge_type = edges_of_graph(graph, types, nodes, ranks)
    return _typed_share(graph, rank, types, nodes, dict.fromkeys(types.node_types, 0), csc, edge_type)


def _typed_share(
    source: Any, rank: int, types: GraphTypes, nodes: TypedNodes, first_ids: Mapping[NodeType, int], csc: CSC,
    edge_type: Tensor,
) -> RankShare:  # fmt: skip
    typed = TypedPart(types, nodes.original_ids, nodes.counts[rank].tolist(), first_ids, edge_type)
    ids = types.own_ids(nodes.original_ids)
    return RankShare(rank, nodes.offsets, csc, ids, source, lambda: torch.arange(csc.num_edges), typed)


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


def _share_of_parts(graph: DistGraph, rank: int, world_size: int, types: GraphTypes | None) -> RankShare:
    book, parts = graph.book, graph.parts
    if book.num_subparts % world_size:
        raise ValueError(
            f"{book.num_parts} parts of {book.trainers_per_part} subparts cannot be dealt to {world_size} ranks alike: "
            f"partition with --parts and --trainers-per-part whose product {world_size} divides"
        )
    each = book.num_subparts // world_size
    own = range(rank * each, (rank + 1) * each)
    needed = sorted({subpart // book.trainers_per_part for subpart in own})
    away = [part for part in needed if part not in graph.parts_here]
    if away:
        raise ValueError(
            f"rank {rank} trains on parts {needed}, and this machine has {graph.parts_here}: put the folders of parts "
            f"{away} here, or start the ranks in the order of the parts"
        )
    if types is not None:
        nodes = nodes_of_parts(graph, types, each, rank, needed)
        csc, edge_type = edges_of_parts(graph, types, nodes, each, rank, needed)
        first_ids = {t: int(book.node_offsets[t][rank * each]) for t in types.node_types}
        return _typed_share(graph, rank, types, nodes, first_ids, csc, edge_type)
    offsets = next(iter(book.node_offsets.values()))[::each].clone()
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
