"""In-edges of a parted graph: remote parts are asked first, own parts sampled meanwhile, the answers stitched.

Where all parts are here and draws are uniform, neither is needed: seeds are looked up and answered in their order.
One message per machine and hop has the seeds of all edge types. Ids are global throughout; what an exclusion names is
the first edge of the part plus a position of the view, so that it needs no look-up where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnsys.comm import Kind, RemoteValueError
from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import CSC, Neighbors, PartedCSC, PartNeighbors, gather_rows, sample_parts, stitch_neighbors
from gnnsys.partition import id_dtype
from gnnsys.sampling.hop_message import Draw, HopAnswer, PartsRequest, Slot, answers_from_arrays
from gnnsys.sampling.neighborhoods import HopRequest
from gnnsys.sampling.node_scores import ScoresNotHere
from gnnsys.sampling.owners import Grouped, Owners
from gnnsys.sampling.part_view import UNIFORM, PartView, ViewSpec
from gnnsys.sampling.prepared_views import NotPrepared, PreparedViews

if TYPE_CHECKING:
    from gnnsys.comm import Client, Message, Pending


class DistNeighborhoods:
    """Of a parted graph, through a prepared view. `prepare` has machines prepare it that do not have it any more."""

    def __init__(
        self, views: PreparedViews, owners: Owners, client: Client | None, spec: ViewSpec, prepare: Callable[[], None]
    ) -> None:
        self._views, self._owners, self._client, self._spec = views, owners, client, spec
        self.owners, self.spec = owners, spec
        self._prepare = prepare
        schema, book = views.parts.schema, views.parts.book
        self._edge_types = {t: i for i, t in enumerate(schema.edge_types)}
        self.id_dtypes: Mapping[NodeType, torch.dtype] = {t: id_dtype(book.num_ids(t)) for t in schema.node_types}

    def sample(
        self,
        requests: Sequence[HopRequest],
        *,
        replace: bool = False,
        last: bool = False,
        hop: int = -1,
    ) -> list[Neighbors]:
        whole = [self._whole(request) for request in requests]
        asked = [request for request, csc in zip(requests, whole, strict=True) if csc is None]
        found = iter(self._sample_by_part(asked, replace, last, hop) if asked else ())
        return [
            next(found) if csc is None else self._sample_whole(csc, request, replace)
            for request, csc in zip(requests, whole, strict=True)
        ]

    def _whole(self, request: HopRequest) -> PartedCSC | None:
        """What a request is answered from at once: uniform draws where all parts are here."""
        is_plain = self._spec == UNIFORM and (request.exclude is None or not request.exclude.numel())
        return self._views.whole(request.edge_type) if is_plain else None

    def _sample_whole(self, csc: PartedCSC, request: HopRequest, replace: bool) -> Neighbors:
        wide = self.id_dtypes[request.edge_type[0]] == torch.int64
        seeds = request.seeds.contiguous()
        return sample_parts(csc, seeds, request.fanout, key=request.key, replace=replace, tree=request.tree, wide=wide)

    def _sample_by_part(self, requests: Sequence[HopRequest], replace: bool, last: bool, hop: int) -> list[Neighbors]:
        plan = _Plan(requests, self._owners)
        options = (self._spec.key, self._edge_types, replace, last)
        pending = []
        for machine, parts in self._owners.away.items():
            asked = plan.request(parts, *options)
            if asked is not None:
                pending.append((asked.parts, self.ask(machine, asked, hop)))
        own = plan.request(self._owners.here, *options)
        if own is not None:
            plan.take(own.parts, self._views.sample(own))
        for parts, answers in pending:
            plan.take(parts, answers)
        return [plan.finish(number, self.id_dtypes[r.edge_type[0]]) for number, r in enumerate(requests)]

    def ask(self, machine: int, request: PartsRequest, hop: int) -> Iterator[HopAnswer]:
        """Sends a hop's request to a machine, now; what it answers, piece by piece, when it is iterated."""
        messages = self.request(machine, Kind.SAMPLE, request.to_arrays(), hop)
        return (answer for message in messages for answer in answers_from_arrays(message.arrays))

    def request(self, machine: int, kind: Kind, arrays: list[Tensor], hop: int) -> Iterator[Message]:
        """Sends what names this view to a machine, now; the messages of its reply, when they are iterated."""
        assert self._client is not None
        ask = partial(self._client.request, machine, kind, arrays, layer=hop)
        return self._messages(ask, ask())

    def own_view(self, part: int) -> PartView:
        """The view of a part that is here."""
        return self._views.view(self._spec.key, part)

    def number_of(self, edge_type: EdgeType) -> int:
        """What messages call an edge type."""
        return self._edge_types[edge_type]

    def excluded(self, request: HopRequest, parts: Sequence[int]) -> list[Tensor | None]:
        """Of each part the positions that a request excludes there."""
        return [self.excluded_in(request, part, part + 1) for part in parts]

    def excluded_in(self, request: HopRequest, first_part: int, end_part: int) -> Tensor | None:
        """The positions that a request excludes in some parts, counted from the first of them on."""
        if request.exclude is None:
            return None
        first, end = self._owners.bounds(request.edge_type)[[first_part, end_part]].tolist()
        begin, stop = torch.searchsorted(request.exclude, torch.tensor([first, end], device="cpu")).tolist()
        return request.exclude[begin:stop] - first

    def _messages(self, ask: Callable[[], Pending], sent: Pending) -> Iterator[Message]:
        """What is answered; asked for again where the machine's server was started again and has lost the view."""
        taken = set()
        try:
            for message in sent.chunks():
                taken.add(message.header.chunk)
                yield message
        except RemoteValueError as error:
            if error.remote_type not in (NotPrepared.__name__, ScoresNotHere.__name__):
                raise
            self._prepare()
            yield from (message for message in ask().chunks() if message.header.chunk not in taken)

    def edge_ids(self, edge_type: EdgeType, positions: Tensor) -> Tensor:
        return positions

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        return self.begin_find_edges(edge_type, src, dst)()

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        """Other machines are asked now; own parts are read, and answers awaited, when the result is called."""
        src_type, _, dst_type = edge_type
        num_src = self._owners.book.num_ids(src_type)
        if src.numel() and not 0 <= int(src.min()) <= int(src.max()) < num_src:
            raise ValueError(f"src must be in [0, {num_src}), got {int(src.min())} to {int(src.max())}")
        grouped = self._owners.group(dst.contiguous(), dst_type)
        src, local = src.long()[grouped.order], grouped.local.long()
        pending = []
        for machine, parts in self._owners.away.items():
            asked = [p for p in parts if grouped.count(p)]
            if asked:
                assert self._client is not None
                head = [self._spec.key, self._edge_types[edge_type]]
                head += [number for p in asked for number in (p, grouped.count(p))]
                arrays = [torch.tensor(head, device="cpu"), *(_take(rows, grouped, asked) for rows in (src, local))]
                ask = partial(self._client.request, machine, Kind.FIND_EDGES, arrays)
                pending.append((asked, ask, ask()))
        return partial(self._found_edges, edge_type, src, local, grouped, pending)

    def _found_edges(
        self,
        edge_type: EdgeType,
        src: Tensor,
        local: Tensor,
        grouped: Grouped,
        pending: Sequence[tuple[list[int], Callable[[], Pending], Pending]],
    ) -> Tensor:
        found: dict[int, Tensor] = {}
        for part in self._owners.here:
            if grouped.count(part):
                own = grouped.of_part(part)
                found[part] = self._views.view(self._spec.key, part).find_edges(edge_type, src[own], local[own])
        for asked, ask, sent in pending:
            (message,) = self._messages(ask, sent)
            counts, positions = message.arrays
            found.update(zip(asked, positions.split(counts.tolist()), strict=True))
        first = self._owners.bounds(edge_type).tolist()
        places = [found[part] + first[part] for part in sorted(found)]
        return torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device="cpu")

    def csc(self, edge_type: EdgeType) -> CSC:
        raise ValueError("a parted graph has no CSC of the whole: use find_edges, sample_neighbors or parts of it")


def _take(rows: Tensor, grouped: Grouped, parts: Sequence[int]) -> Tensor:
    """The rows of some parts, a view where the parts are neighbours."""
    if len(parts) == 1 or grouped.starts[parts[-1] + 1] - grouped.starts[parts[0]] == sum(map(grouped.count, parts)):
        return rows[grouped.starts[parts[0]] : grouped.starts[parts[-1] + 1]]
    return torch.cat([rows[grouped.of_part(p)] for p in parts])


@dataclass
class _Seeds:
    """Seeds that several edge types may share, grouped by part."""

    grouped: Grouped
    local: Tensor
    tree: Tensor | None
    seed_time: Tensor | None


@dataclass
class _Answers:
    """What has come of one request."""

    pieces: list[PartNeighbors] = field(default_factory=list)
    segments: list[tuple[int, int, int]] = field(default_factory=list)


class _Plan:
    """One hop in the making: seeds by part, then the answers to them."""

    def __init__(self, requests: Sequence[HopRequest], owners: Owners) -> None:
        self._requests, self._owners = requests, owners
        self._seeds: list[_Seeds] = []
        self._slot_of: list[int] = []
        known: dict[tuple[object, ...], int] = {}
        for request in requests:
            # The type too: one tensor may name nodes of two types, which other parts own.
            same = (request.edge_type[2], id(request.seeds), id(request.tree), id(request.seed_time))
            if same not in known:
                known[same] = len(self._seeds)
                self._seeds.append(_group_seeds(request, owners))
            self._slot_of.append(known[same])
        self._answers = [_Answers() for _ in requests]
        self._drawn = [i for i, r in enumerate(requests) if r.fanout != 0 and r.seeds.numel()]

    def request(
        self, parts: Sequence[int], view: int, edge_types: Mapping[EdgeType, int], replace: bool, last: bool
    ) -> PartsRequest | None:
        """What is asked of some parts; None where it is nothing."""
        used = {self._slot_of[i] for i in self._drawn}
        parts = [p for p in parts if any(self._seeds[slot].grouped.count(p) for slot in used)]
        if not parts:
            return None
        slots = []
        for seeds in self._seeds:
            local, tree, time = (
                None if rows is None else _take(rows, seeds.grouped, parts)
                for rows in (seeds.local, seeds.tree, seeds.seed_time)
            )
            assert local is not None
            slots.append(Slot([seeds.grouped.count(p) for p in parts], local, tree, time))
        draws = [
            Draw(edge_types[r.edge_type], self._slot_of[i], r.fanout, r.key, self._excluded(r, parts))
            for i, r in ((i, self._requests[i]) for i in self._drawn)
        ]
        first = self._requests[0]
        requester = next(iter(self._owners.here), -1) if first.requester is None else first.requester
        return PartsRequest(view, parts, slots, draws, replace, last, requester, first.version)

    def _excluded(self, request: HopRequest, parts: Sequence[int]) -> list[Tensor | None]:
        if request.exclude is None:
            return [None] * len(parts)
        bounds = self._owners.bounds(request.edge_type)
        ends = torch.searchsorted(request.exclude, bounds).tolist()
        return [request.exclude[ends[p] : ends[p + 1]] - int(bounds[p]) for p in parts]

    def take(self, parts: Sequence[int], answers: Iterable[HopAnswer]) -> None:
        """Keeps what some of `parts`, those that were asked together, have answered."""
        for answer in answers:
            if not (0 <= answer.draw < len(self._drawn) and 0 <= answer.part < len(parts)):
                raise ValueError(f"an answer is for draw {answer.draw} of part {answer.part}, which was not asked")
            number = self._drawn[answer.draw]
            into = self._answers[number]
            starts = self._seeds[self._slot_of[number]].grouped.starts
            into.segments.append((len(into.pieces), starts[parts[answer.part]] + answer.first, answer.size))
            into.pieces.append(answer.piece)

    def finish(self, number: int, dtype: torch.dtype) -> Neighbors:
        order, answers = self._seeds[self._slot_of[number]].grouped.order, self._answers[number]
        if number not in self._drawn:
            return Neighbors(order.new_zeros(order.numel() + 1), order.new_empty(0, dtype=dtype), order.new_empty(0))
        if len(answers.pieces) == 1:  # one part has all seeds: they stand in their order already
            (counts, ids, edges, weight), indptr = answers.pieces[0], order.new_zeros(order.numel() + 1)
            torch.cumsum(counts, 0, out=indptr[1:])
            return Neighbors(indptr, ids.to(dtype), edges.long(), weight)
        return stitch_neighbors(order, answers.pieces, answers.segments, wide=dtype == torch.int64)


def _group_seeds(request: HopRequest, owners: Owners) -> _Seeds:
    grouped = owners.group(request.seeds.contiguous(), request.edge_type[2])
    tree, time = (
        None if rows is None else gather_rows(rows, grouped.order) for rows in (request.tree, request.seed_time)
    )
    return _Seeds(grouped, grouped.local.to(torch.int32), tree, time)
