"""What the in-edges of a layer add up to at each of their sources: from this LADIES draws, and FastGCN is made.

An edge into a node of degree d counts as the integer that stands for 1 / d^2, as often as the node is in the layer.
Parts answer with their sums, not with their edges. Sums of integers are the same in any order, so a graph and any parts
of it have the same ones.

    SHARES  head int64 [view, edge type, part, number of nodes, part, number, ...]; int64 [how often the layer has
            the node that it has most often]; local ids of these nodes, int32
            reply, in chunks of five arrays: [place of the part in the head, place of its first node]; in-degrees of its
            nodes from there on, int32; then sources of its edges, each once in all chunks: global ids, original ids,
            sums (int64)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import Kind, Reply
from gnnsys.graph import EdgeType, Graph
from gnnsys.ops import CSC, IdTable, sample_neighbors
from gnnsys.partition import id_dtype
from gnnsys.sampling.labor_rule import LaborRule
from gnnsys.sampling.part_view import PartView, ViewSpec
from gnnsys.sampling.prepared_views import PreparedViews, pieces

if TYPE_CHECKING:
    from gnnsys.sampling.dist_neighborhoods import DistNeighborhoods
    from gnnsys.sampling.neighborhoods import AnyGraph

WITH_SOURCES = ViewSpec(rule=LaborRule.name)  # whose views know the original ids of sources, as is needed here
SUM_END = 1 << 62  # no sum of shares reaches it
_ID_DTYPES = (torch.int32, torch.int64)
_CHUNK = 1 << 16  # sources in one message of a reply: a megabyte
_NODES_PER_PIECE = 1 << 14  # of a graph in memory, whose in-edges are looked at together


class LayerShares(NamedTuple):
    """Of a layer: its sources, each once and in any order, and the in-degrees of its nodes. All int64."""

    ids: Tensor
    originals: Tensor
    sums: Tensor
    degrees: Tensor


def layer_shares(graph: AnyGraph, edge_type: EdgeType, nodes: Tensor, *, hop: int = -1) -> LayerShares:
    """The shares of the in-edges of `nodes`. Other machines are asked with one message each, before own parts."""
    if not isinstance(graph, Graph):
        return shares_of_parts(graph.host_neighborhoods(WITH_SOURCES), edge_type, nodes, graph.num_edges(), hop)
    csc, one = graph.csc(edge_type), _one(graph.num_edges(), _most_often(nodes))
    sums = _SumsById(graph.num_nodes(), int((csc.indptr[nodes + 1] - csc.indptr[nodes]).sum()))
    degrees = [_add_edges(sums, csc, some, one) for some in nodes.split(_NODES_PER_PIECE)]
    return LayerShares(sums.ids, sums.ids, sums.sums, torch.cat(degrees))


class _SumsById:
    """Numbers added up by id."""

    def __init__(self, id_bound: int, room: int = 512) -> None:
        self._table = IdTable(id_bound, min(id_bound, room))
        self.ids = self.sums = torch.empty(0, dtype=torch.int64, device="cpu")

    def add(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Returns the place of each id in `ids`."""
        place, fresh = self._table.insert(ids)
        if fresh.numel():
            self.ids = torch.cat([self.ids, fresh.long()])
            self.sums = torch.cat([self.sums, torch.zeros_like(fresh, dtype=torch.int64)])
        self.sums.index_add_(0, place, numbers)
        return place


def _most_often(nodes: Tensor) -> int:
    """How often a layer has the node that it has most often: seeds may repeat."""
    return int(nodes.unique(return_counts=True)[1].max()) if nodes.numel() else 1


def _one(num_edges: int, most_often: int) -> int:
    """What stands for 1 in a graph of so many edges. A layer has no more of them than `num_edges * most_often`."""
    one = SUM_END >> max(1, num_edges * most_often).bit_length()
    if most_often < 1 or one < 1:
        raise ValueError(f"shares cannot be added up where {num_edges} edges may count {most_often} times each")
    return one


def _add_edges(sums: _SumsById, csc: CSC, nodes: Tensor, one: int) -> Tensor:
    """Adds the shares of the in-edges of `nodes`; returns their in-degrees."""
    edges = sample_neighbors(csc, nodes.to(csc.indices.dtype), -1, key=0)
    degrees = edges.indptr.diff()
    positive = degrees.clamp(min=1)
    share = torch.div(one, positive * positive, rounding_mode="floor").clamp_(min=1)
    sums.add(edges.ids.long(), share.repeat_interleave(degrees, output_size=edges.ids.numel()))
    return degrees


# -- parts -------------------------------------------------------------------------------------------------------------


def answer_shares(
    views: PreparedViews,
    view: int,
    edge_type: EdgeType,
    parts: Sequence[tuple[int, int]],
    most_often: Tensor,
    nodes: Tensor,
) -> Iterator[Reply]:
    """What a machine answers from its own parts; `parts` are (part, number of nodes) as the head has them."""
    if nodes.dtype != torch.int32 or nodes.numel() != sum(count for _, count in parts):
        raise ValueError(f"{sum(count for _, count in parts)} nodes are announced, {nodes.numel()} came")
    if most_often.numel() != 1:
        raise ValueError(f"how often a node is in the layer must be one number, got {most_often.numel()}")
    one = _one(views.parts.book.num_ids(edge_type), int(most_often))
    of_parts = nodes.split([count for _, count in parts])
    for place, ((part, _), some) in enumerate(zip(parts, of_parts, strict=True)):
        for arrays in _part_shares(views.view(view, part), edge_type, some, one):
            yield Reply([torch.tensor([place, arrays.first], device="cpu"), *arrays[1:]])
    yield Reply(last=True)


class _SharePiece(NamedTuple):
    first: int  # node that `degrees` begin with
    degrees: Tensor
    ids: Tensor
    originals: Tensor
    sums: Tensor


def _part_shares(view: PartView, edge_type: EdgeType, nodes: Tensor, one: int) -> Iterator[_SharePiece]:
    """In-degrees while edges are looked at, then the sums. In the dtypes of messages."""
    csc, (src_type, _, _) = view.source(edge_type).csc, edge_type
    originals = view.source_ids(src_type)
    if originals is None:
        raise ValueError("shares of a layer need a view that knows the original ids of sources")
    work = view.work(edge_type, nodes, -1, False)
    dtype = id_dtype(view.part.book.num_ids(src_type))
    sums, none = (
        _SumsById(csc.num_src, int(work.sum()) if isinstance(work, Tensor) else work),
        torch.empty(0, dtype=dtype, device="cpu"),
    )
    for first, end in pieces(work, nodes.numel()):
        degrees = _add_edges(sums, csc, nodes[first:end], one)
        yield _SharePiece(first, degrees.int(), none, none, none.long())
    for begin in range(0, sums.ids.numel(), _CHUNK):
        local, added = sums.ids[begin : begin + _CHUNK], sums.sums[begin : begin + _CHUNK]
        ids = view.part.global_ids(local, src_type)
        yield _SharePiece(nodes.numel(), none.int(), ids.to(dtype), originals[local].to(dtype), added)


def shares_of_parts(
    hoods: DistNeighborhoods, edge_type: EdgeType, nodes: Tensor, num_edges: int, hop: int
) -> LayerShares:
    """The answers of all parts, added up."""
    grouped = hoods.owners.group(nodes.contiguous(), edge_type[2])
    total = _Total(hoods.owners.book.num_ids(edge_type[0]), nodes.numel())
    most_often, pending = _most_often(nodes), []
    one = _one(num_edges, most_often)
    for machine, parts in hoods.owners.away.items():
        asked = [part for part in parts if grouped.count(part)]
        if asked:
            head = [hoods.spec.key, hoods.number_of(edge_type), *(n for p in asked for n in (p, grouped.count(p)))]
            local = torch.cat([grouped.local[grouped.of_part(p)] for p in asked]).int()
            arrays = [torch.tensor(head, device="cpu"), torch.tensor([most_often], device="cpu"), local]
            pending.append((asked, hoods.request(machine, Kind.SHARES, arrays, hop)))
    for part in hoods.owners.here:
        if grouped.count(part):
            own = grouped.of_part(part)
            for piece in _part_shares(hoods.own_view(part), edge_type, grouped.local[own].int(), one):
                total.add(part, grouped.order[own], piece)
    for asked, messages in pending:
        for message in messages:
            if message.arrays:
                place, piece = _read_piece(message.arrays, len(asked))
                total.add(asked[place], grouped.order[grouped.of_part(asked[place])], piece)
    return total.whole()


def _read_piece(arrays: Sequence[Tensor], num_parts: int) -> tuple[int, _SharePiece]:
    if len(arrays) != 5 or any(rows.dim() != 1 for rows in arrays) or arrays[0].numel() != 2:
        raise ValueError(f"an answer about shares must be five vectors, got {[list(rows.shape) for rows in arrays]}")
    if arrays[0].dtype != torch.int64:
        raise ValueError(f"the head of an answer about shares must be int64, got {arrays[0].dtype}")
    place, first = arrays[0].tolist()
    if not 0 <= place < num_parts:
        raise ValueError(f"an answer about shares is of part {place} of {num_parts}")
    return place, _SharePiece(first, *arrays[1:])


class _Total:
    """What parts have answered, in any order. ValueError for what no part answers."""

    def __init__(self, num_nodes: int, size: int) -> None:
        self._num_nodes, self.sums = num_nodes, _SumsById(num_nodes)
        self._sources_of: dict[int, IdTable] = {}  # by part
        self._added = 0
        self.originals = torch.empty(0, dtype=torch.int64, device="cpu")
        self.degrees = torch.full((size,), -1, dtype=torch.int64, device="cpu")

    def add(self, part: int, order: Tensor, piece: _SharePiece) -> None:
        """`order`: where in the layer the nodes of the part stand."""
        self._add_degrees(order, piece.first, piece.degrees)
        ids, originals, numbers = piece.ids, piece.originals, piece.sums
        if not ids.numel() == originals.numel() == numbers.numel():
            raise ValueError(f"{ids.numel()} sources have {originals.numel()} original ids and {numbers.numel()} sums")
        if numbers.dtype != torch.int64 or any(rows.dtype not in _ID_DTYPES for rows in (ids, originals)):
            raise ValueError(f"sources and sums must be integers, got {ids.dtype}, {originals.dtype}, {numbers.dtype}")
        if not ids.numel():
            return
        for rows in (ids, originals):
            if not 0 <= int(rows.min()) <= int(rows.max()) < self._num_nodes:
                raise ValueError(
                    f"sources must be in [0, {self._num_nodes}), got {int(rows.min())} to {int(rows.max())}"
                )
        self._count(numbers)
        if part not in self._sources_of:
            self._sources_of[part] = IdTable(self._num_nodes, min(self._num_nodes, 512))
        if self._sources_of[part].insert(ids.long())[1].numel() != ids.numel():
            raise ValueError(f"an answer about shares has a source of part {part} twice")
        known = self.sums.ids.numel()
        place = self.sums.add(ids.long(), numbers)
        self.originals = torch.cat([self.originals, originals.long()[place >= known]])
        if not torch.equal(self.originals[place], originals.long()):
            raise ValueError("answers about shares have two original ids of a source")

    def _add_degrees(self, order: Tensor, first: int, degrees: Tensor) -> None:
        if not 0 <= first <= order.numel() - degrees.numel():
            raise ValueError(f"degrees from node {first} on are {degrees.numel()}, asked were {order.numel()} in all")
        if degrees.dtype != torch.int32 or (degrees.numel() and int(degrees.min()) < 0):
            raise ValueError("degrees must be int32 and not negative")
        places = order[first : first + degrees.numel()]
        if bool((self.degrees[places] >= 0).any()):
            raise ValueError(f"degrees from node {first} on came twice")
        self.degrees[places] = degrees.long()

    def _count(self, numbers: Tensor) -> None:
        """Of numbers that may be anything, so that their sum may not fit into 64 bits: halves are added up."""
        self._added += (int((numbers >> 31).sum()) << 31) + int((numbers & 0x7FFFFFFF).sum())
        if int(numbers.min()) < 1 or self._added >= SUM_END:
            raise ValueError("sums of shares must be positive and add up to less than 2^62")

    def whole(self) -> LayerShares:
        """Once all have answered."""
        missing = int((self.degrees < 0).sum())
        if missing:
            raise ValueError(f"the degrees of {missing} of {self.degrees.numel()} nodes did not come")
        return LayerShares(self.sums.ids, self.originals, self.sums.sums, self.degrees)
