"""Edges among chosen nodes: the in-edges of some nodes that come from a list of others, of a graph or of parts.

What induced subgraphs, clusters and layer-wise samplers need. Parts are asked with the list (`Kind.INDUCED`) and
answer with the edges inside it; no neighbour travels that would be dropped. A graph in memory and its parts give the
same edges in the same order: destinations as they were given, in-edges in the graph's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import Kind
from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import (
    CSC,
    DeviceReads,
    IdTable,
    InnerEdges,
    Neighbors,
    PartNeighbors,
    gather_rows,
    stitch_neighbors,
)
from gnnsys.ops import edges_within as csc_edges_within
from gnnsys.partition import Part, Parts, id_dtype
from gnnsys.sampling.device_neighborhoods import DeviceNeighborhoods
from gnnsys.sampling.hop_message import (
    HopAnswer,
    InnerDraw,
    InnerRequest,
    Slot,
    SourceList,
    answers_from_arrays,
)
from gnnsys.sampling.neighborhoods import AnyGraph, GraphNeighborhoods, HopRequest, Neighborhoods, neighborhoods
from gnnsys.sampling.owners import Grouped, Owners
from gnnsys.sampling.part_view import core_csc, local_sources

if TYPE_CHECKING:
    from gnnsys.comm import Client

_WORK_PER_PIECE = 1 << 22  # in-edges that are looked at for one piece of an answer


class WithinRequest(NamedTuple):
    """One edge type: the in-edges of `dst` whose source is in `src`, with trees those inside a tree alone.

    `exclude` is what `find_edges` returned. Both lists may repeat nodes: edges come from the first copy of a source.
    """

    edge_type: EdgeType
    dst: Tensor
    src: Tensor
    dst_tree: Tensor | None = None
    src_tree: Tensor | None = None
    exclude: Tensor | None = None


def edges_within(graph: AnyGraph, dst: Tensor, src: Tensor, edge_type: EdgeType | None = None) -> Neighbors:
    """The in-edges of each `dst` whose source is in `src`; `edge_type` may be left away where there is one.

    Positions are those of the graph's CSC, of parts global edge ids: `neighborhoods(graph).edge_ids` names them.
    """
    if edge_type is None:
        if len(graph.edge_types) != 1:
            raise ValueError(f"edge_type must be named, one of {graph.edge_types}")
        (edge_type,) = graph.edge_types
    num_src = graph.num_nodes(edge_type[0])
    if src.numel() and not 0 <= int(src.min()) <= int(src.max()) < num_src:
        raise ValueError(f"src must be in [0, {num_src}), got {int(src.min())} to {int(src.max())}")
    (found,) = inner_edges(graph, [WithinRequest(edge_type, dst, src)])
    return Neighbors(found.indptr, gather_rows(src.contiguous(), found.places), found.positions)


def inner_edges(graph: AnyGraph, requests: Sequence[WithinRequest]) -> list[InnerEdges]:
    """An answer per request; `places` are those in the request's `src`. Parts get one message per machine for all."""
    device = next((request.dst.device for request in requests), torch.device("cpu"))
    requests = [r if r.exclude is None else r._replace(exclude=r.exclude.to(device)) for r in requests]
    if device.type == "cpu" and not isinstance(graph, Graph):
        return graph.inner_edges(requests)
    hoods = neighborhoods(graph, device=device)  # ValueError where the structure is elsewhere
    cscs = [_whole(hoods, request.edge_type) for request in requests]
    rest = iter(_by_lookup(graph, hoods, [r for r, csc in zip(requests, cscs, strict=True) if csc is None]))
    return [next(rest) if csc is None else _in_csc(csc, r) for r, csc in zip(requests, cscs, strict=True)]


def _whole(hoods: Neighborhoods, edge_type: EdgeType) -> CSC | None:
    """The structure of an edge type, where those that draw have all of it as one; about to be read."""
    if isinstance(hoods, GraphNeighborhoods):
        hoods.note_read(edge_type)
        return hoods.csc(edge_type)
    joined = hoods.joined(edge_type) if isinstance(hoods, DeviceNeighborhoods) else None
    if not isinstance(joined, CSC):
        return None
    if joined.indptr.is_cuda:
        DeviceReads()(joined.indptr.device, joined.indptr, joined.indices)
    return joined


def _in_csc(csc: CSC, r: WithinRequest) -> InnerEdges:
    return csc_edges_within(csc, r.dst, r.src, dst_tree=r.dst_tree, src_tree=r.src_tree, exclude=r.exclude)


def _by_lookup(graph: AnyGraph, hoods: Neighborhoods, requests: Sequence[WithinRequest]) -> list[InnerEdges]:
    """On parts that a device reads: all in-edges are gathered, and sources that are not listed dropped."""
    if not requests:
        return []
    device = requests[0].dst.device
    asked = [
        HopRequest(r.edge_type, r.dst.to(hoods.id_dtypes[r.edge_type[2]]), -1, key=0, exclude=_on_host(r.exclude))
        for r in requests
    ]
    found = []
    for request, neighbors in zip(requests, hoods.sample(asked), strict=True):
        num_nodes = graph.num_nodes(request.edge_type[0])
        column = torch.repeat_interleave(neighbors.indptr.diff(), output_size=neighbors.ids.numel())
        sources, wanted, bound = request.src.long(), neighbors.ids.long(), num_nodes
        if request.dst_tree is not None and request.src_tree is not None:
            sources = request.src_tree * num_nodes + sources
            wanted, bound = request.dst_tree[column] * num_nodes + wanted, 1 << 40
        table = IdTable(max(bound, num_nodes), max(1, sources.numel()), device=device)
        table.insert_seeds(sources)
        places = table.lookup(wanted)
        inside = (places >= 0).nonzero().view(-1)
        indptr = torch.zeros_like(neighbors.indptr)
        torch.cumsum(torch.bincount(column[inside], minlength=request.dst.numel()), 0, out=indptr[1:])
        found.append(InnerEdges(indptr, places[inside], neighbors.positions[inside]))
    return found


def _on_host(rows: Tensor | None) -> Tensor | None:
    """As other machines are asked to leave it out."""
    return None if rows is None else rows.cpu()


# -- parts -------------------------------------------------------------------------------------------------------------


def answer_inner(parts: Parts, own_parts: Sequence[int], request: InnerRequest) -> Iterator[HopAnswer]:
    """What a machine answers from its own parts, piece by piece."""
    edge_types = parts.schema.edge_types
    for number, draw in enumerate(request.draws):
        if not 0 <= draw.edge_type < len(edge_types):
            raise ValueError(f"edge type must be in [0, {len(edge_types)}), got {draw.edge_type}")
        for place, part in enumerate(request.parts):
            if part not in own_parts:
                raise ValueError(f"part {part} is not here, only {list(own_parts)}")
            seeds, tree, _ = request.slots[draw.slot].of_part(place)
            if seeds.numel():
                found = _part_edges(
                    parts.part(part), edge_types[draw.edge_type], seeds, tree, request.sources[draw.sources],
                    draw.exclude[place],
                )  # fmt: skip
                yield from (HopAnswer(number, place, first, piece.counts.numel(), piece) for first, piece in found)


def _part_edges(
    part: Part, edge_type: EdgeType, dst: Tensor, tree: Tensor | None, sources: SourceList, exclude: Tensor | None
) -> Iterator[tuple[int, PartNeighbors]]:
    """(first, edges of the next destinations from there on) of core nodes `dst`, given by local id."""
    csc = core_csc(part, edge_type)
    if not 0 <= int(dst.min()) <= int(dst.max()) < csc.num_dst:
        raise ValueError(f"destinations of part {part.index} must be in [0, {csc.num_dst})")
    local = local_sources(part, edge_type[0], sources.ids)
    first_edge = part.book.part_range(part.index, edge_type).start
    dtype = id_dtype(part.book.num_ids(edge_type))
    done = (csc.indptr[dst.long() + 1] - csc.indptr[dst.long()]).cumsum(0)
    first = 0
    while first < dst.numel():
        limit = (int(done[first - 1]) if first else 0) + _WORK_PER_PIECE
        end = max(first + 1, int(torch.searchsorted(done, limit, right=True)))
        of_tree = None if tree is None else tree[first:end]
        edges = csc_edges_within(csc, dst[first:end], local, dst_tree=of_tree, src_tree=sources.tree, exclude=exclude)
        counts, positions = edges.indptr.diff().int(), (edges.positions + first_edge).to(dtype)
        yield first, PartNeighbors(counts, edges.places.int(), positions)
        first = end


def inner_edges_of_parts(
    parts: Parts, owners: Owners, client: Client | None, requests: Sequence[WithinRequest]
) -> list[InnerEdges]:
    """Other machines are asked first, own parts read meanwhile, the answers stitched."""
    plan = _InnerPlan(parts, owners, requests)
    pending = []
    for machine, of_machine in owners.away.items():
        asked = plan.request(of_machine)
        if asked is not None:
            assert client is not None
            pending.append((asked, client.request(machine, Kind.INDUCED, asked.message.to_arrays())))
    own = plan.request(owners.here)
    if own is not None:
        plan.take(own, answer_inner(parts, owners.here, own.message))
    for asked, sent in pending:
        plan.take(asked, (answer for message in sent.chunks() for answer in answers_from_arrays(message.arrays)))
    return [plan.finish(number) for number in range(len(requests))]


class _Asked(NamedTuple):
    message: InnerRequest
    kept: list[Tensor | None]  # of each source list the places that were sent; None: all


class _InnerPlan:
    """Requests by part, then the answers to them. Lists that several edge types share are grouped and sent once."""

    def __init__(self, parts: Parts, owners: Owners, requests: Sequence[WithinRequest]) -> None:
        self._owners, self._requests = owners, requests
        self._edge_types = {t: i for i, t in enumerate(parts.schema.edge_types)}
        self._dst: list[tuple[Grouped, Tensor | None]] = []
        self._src: list[SourceList] = []
        self._dst_of: list[int] = []
        self._src_of: list[int] = []
        known: dict[tuple[object, ...], int] = {}
        for r in requests:
            src_type, _, dst_type = r.edge_type
            same: tuple[object, ...] = ("dst", dst_type, id(r.dst), id(r.dst_tree))
            if same not in known:
                known[same] = len(self._dst)
                grouped = owners.group(r.dst.contiguous(), dst_type)
                self._dst.append((grouped, None if r.dst_tree is None else gather_rows(r.dst_tree, grouped.order)))
            self._dst_of.append(known[same])
            same = ("src", src_type, id(r.src), id(r.src_tree))
            if same not in known:
                known[same] = len(self._src)
                self._src.append(SourceList(self._checked(r.src, src_type), r.src_tree))
            self._src_of.append(known[same])
        self._pieces: list[list[PartNeighbors]] = [[] for _ in requests]
        self._segments: list[list[tuple[int, int, int]]] = [[] for _ in requests]

    def _checked(self, ids: Tensor, node_type: NodeType) -> Tensor:
        num_nodes = self._owners.book.num_ids(node_type)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
            raise ValueError(f"src must be in [0, {num_nodes}), got {int(ids.min())} to {int(ids.max())}")
        return ids.to(id_dtype(num_nodes)).contiguous()

    def request(self, parts: Sequence[int]) -> _Asked | None:
        """What is asked of some parts; None where it is nothing."""
        parts = [p for p in parts if any(grouped.count(p) for grouped, _ in self._dst)]
        if not parts:
            return None
        slots = []
        for grouped, tree in self._dst:
            chosen = [grouped.of_part(p) for p in parts]
            local = torch.cat([grouped.local[c] for c in chosen]).int()
            of_tree = None if tree is None else torch.cat([tree[c] for c in chosen])
            slots.append(Slot([grouped.count(p) for p in parts], local, of_tree, None))
        kept, sources = [], []
        for number, listed in enumerate(self._src):
            there = self._of_trees(listed, [slots[self._dst_of[i]] for i, s in enumerate(self._src_of) if s == number])
            kept.append(there)
            sources.append(listed if there is None else SourceList(listed.ids[there], _rows(listed.tree, there)))
        draws = [
            InnerDraw(self._edge_types[r.edge_type], self._dst_of[i], self._src_of[i], self._excluded(r, parts))
            for i, r in enumerate(self._requests)
        ]
        return _Asked(InnerRequest(parts, slots, sources, draws), kept)

    def _of_trees(self, listed: SourceList, slots: Sequence[Slot]) -> Tensor | None:
        """Where in a list the nodes of those trees are that have a destination there; None where trees do not count."""
        if listed.tree is None:
            return None
        trees = torch.cat([slot.tree for slot in slots if slot.tree is not None])
        if not trees.numel() or not listed.tree.numel():
            return listed.tree.new_empty(0)
        wanted = torch.zeros(1 + int(max(listed.tree.max(), trees.max())), dtype=torch.bool, device="cpu")
        wanted[trees] = True
        return wanted[listed.tree].nonzero().view(-1)

    def _excluded(self, request: WithinRequest, parts: Sequence[int]) -> list[Tensor | None]:
        if request.exclude is None:
            return [None] * len(parts)
        bounds = self._owners.bounds(request.edge_type)
        ends = torch.searchsorted(request.exclude, bounds).tolist()
        return [request.exclude[ends[p] : ends[p + 1]] - int(bounds[p]) for p in parts]

    def take(self, asked: _Asked, answers: Iterator[HopAnswer]) -> None:
        parts = asked.message.parts
        for answer in answers:
            if not (0 <= answer.draw < len(self._requests) and 0 <= answer.part < len(parts)):
                raise ValueError(f"an answer is for draw {answer.draw} of part {answer.part}, which was not asked")
            listed = self._src_of[answer.draw]
            places, num_listed = answer.piece.ids, asked.message.sources[listed].ids.numel()
            if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < num_listed:
                raise ValueError(f"an answer names places up to {int(places.max())} of a list of {num_listed}")
            kept = asked.kept[listed]
            piece = answer.piece if kept is None else answer.piece._replace(ids=kept[places.long()].int())
            starts = self._dst[self._dst_of[answer.draw]][0].starts
            pieces, segments = self._pieces[answer.draw], self._segments[answer.draw]
            segments.append((len(pieces), starts[parts[answer.part]] + answer.first, answer.size))
            pieces.append(piece)

    def finish(self, number: int) -> InnerEdges:
        grouped, _ = self._dst[self._dst_of[number]]
        order = grouped.order
        if not order.numel():
            return InnerEdges(order.new_zeros(1), order.new_empty(0), order.new_empty(0))
        found = stitch_neighbors(order, self._pieces[number], self._segments[number], wide=False)
        return InnerEdges(found.indptr, found.ids.long(), found.positions)


def _rows(rows: Tensor | None, index: Tensor) -> Tensor | None:
    return None if rows is None else rows[index]
