"""In-edges of a parted graph, drawn by a device: own parts there, other machines asked as from the host.

Seeds are grouped by owner on the device. Those of other machines leave in one message per machine and hop, as
`DistNeighborhoods` sends them; meanwhile the device samples its own; what comes back is put between. Ids reach the host
only where another machine must be asked. What is drawn is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import (
    CSC,
    JoinedParts,
    Neighbors,
    PartNeighbors,
    bucket_ids,
    gather_rows,
    stitch_neighbors,
    to_host_together,
)
from gnnsys.sampling.device_structure import DeviceStructure, PartsRun
from gnnsys.sampling.dist_neighborhoods import DistNeighborhoods
from gnnsys.sampling.hop_message import Draw, HopAnswer, PartsRequest, Slot
from gnnsys.sampling.neighborhoods import HopRequest, to_device


class DeviceNeighborhoods:
    """Of a parted graph whose own parts a device reads. `host` is the same view for the host, which asks others."""

    def __init__(self, structure: DeviceStructure, host: DistNeighborhoods) -> None:
        self.structure, self._host = structure, host
        self.device = structure.device
        self.id_dtypes: Mapping[NodeType, torch.dtype] = host.id_dtypes
        self._runs = structure.runs(host.spec, host.own_view)
        self._bounds: dict[NodeType | EdgeType, Tensor] = {}

    def sample(
        self,
        requests: Sequence[HopRequest],
        *,
        replace: bool = False,
        last: bool = False,
        hop: int = -1,
    ) -> list[Neighbors]:
        if len(self._runs) == 1 and self.structure.has_all:
            return [self._sample_all(self._runs[0], request, replace, last) for request in requests]
        return self._sample_by_owner(requests, replace, last, hop)

    def _sample_all(self, run: PartsRun, request: HopRequest, replace: bool, last: bool) -> Neighbors:
        exclude = None if request.exclude is None else to_device(request.exclude, self.device)
        return run.sample(
            request.edge_type, request.seeds, request.fanout, key=request.key, replace=replace, last=last,
            exclude=exclude, tree=request.tree, seed_time=request.seed_time,
        )  # fmt: skip

    def _sample_by_owner(self, requests: Sequence[HopRequest], replace: bool, last: bool, hop: int) -> list[Neighbors]:
        known: dict[tuple[object, ...], _OwnedSeeds] = {}
        seeds: list[_OwnedSeeds] = []
        for request in requests:
            same = (request.edge_type[2], id(request.seeds), id(request.tree), id(request.seed_time))
            if same not in known:
                known[same] = self._group(request, len(known))
            seeds.append(known[same])
        drawn = [i for i, r in enumerate(requests) if r.fanout != 0 and r.seeds.numel()]
        answers = [_SeedAnswers() for _ in requests]
        pending = []
        for machine, parts in self._host.owners.away.items():
            asked = self._request(requests, drawn, list(known.values()), seeds, parts, replace, last)
            if asked is not None:
                pending.append((asked, self._host.ask(machine, asked, hop)))
        for run in self._runs:
            for i in drawn:
                self._sample_run(run, requests[i], seeds[i], answers[i], replace, last)
        for asked, sent in pending:
            for answer in sent:
                self._take(answer, asked, drawn, seeds, answers)
        return [
            self._finish(request, of, found, i in drawn)
            for i, (request, of, found) in enumerate(zip(requests, seeds, answers, strict=True))
        ]

    def _group(self, request: HopRequest, slot: int) -> _OwnedSeeds:
        """Seeds by part, on the device; the host waits for how many each part has."""
        counts, order, local = bucket_ids(request.seeds.contiguous(), self._part_bounds(request.edge_type[2]))
        tree, time = (None if rows is None else gather_rows(rows, order) for rows in (request.tree, request.seed_time))
        asked = [local.int(), *(rows for rows in (tree, time) if rows is not None)]
        on_host = to_host_together([counts, *(asked if self._host.owners.away else [])])
        starts = [0, *accumulate(on_host[0].tolist())]
        return _OwnedSeeds(slot, order, local, starts, tree, time, on_host[1:])

    def _part_bounds(self, type: NodeType | EdgeType) -> Tensor:
        if type not in self._bounds:
            self._bounds[type] = self._host.owners.bounds(type).to(self.device)
        return self._bounds[type]

    def _request(
        self,
        requests: Sequence[HopRequest],
        drawn: Sequence[int],
        slots: Sequence[_OwnedSeeds],
        seeds: Sequence[_OwnedSeeds],
        parts: Sequence[int],
        replace: bool,
        last: bool,
    ) -> PartsRequest | None:
        used = {seeds[i].slot for i in drawn}
        parts = [p for p in parts if any(slots[slot].count(p) for slot in used)]
        if not parts:
            return None
        asked = [of.to_slot(parts) for of in slots]
        draws = [
            Draw(self._host.number_of(r.edge_type), seeds[i].slot, r.fanout, r.key, self._host.excluded(r, parts))
            for i, r in ((i, requests[i]) for i in drawn)
        ]
        first = requests[0]
        requester = next(iter(self._host.owners.here), -1) if first.requester is None else first.requester
        return PartsRequest(self._host.spec.key, parts, asked, draws, replace, last, requester, first.version)

    def _sample_run(
        self, run: PartsRun, request: HopRequest, seeds: _OwnedSeeds, answers: _SeedAnswers, replace: bool, last: bool
    ) -> None:
        first, end = seeds.starts[run.parts[0]], seeds.starts[run.parts[-1] + 1]
        if first == end:
            return
        columns = seeds.local[first:end]
        if len(run.parts) > 1:  # columns count from the run's first part on, and not from each one's
            start = int(self._host.owners.bounds(request.edge_type[2])[run.parts[0]])
            columns = gather_rows(request.seeds, seeds.order[first:end]) - start
        exclude = self._host.excluded_in(request, run.parts[0], run.parts[-1] + 1)
        found = run.sample(
            request.edge_type, columns, request.fanout, key=request.key, replace=replace, last=last,
            exclude=None if exclude is None else to_device(exclude, self.device),
            tree=None if seeds.tree is None else seeds.tree[first:end],
            seed_time=None if seeds.seed_time is None else seeds.seed_time[first:end],
        )  # fmt: skip
        answers.add_whole(first, end - first, found)

    def _take(
        self,
        answer: HopAnswer,
        asked: PartsRequest,
        drawn: Sequence[int],
        seeds: Sequence[_OwnedSeeds],
        answers: Sequence[_SeedAnswers],
    ) -> None:
        """What a machine has answered; ValueError where it is not what was asked."""
        if not (0 <= answer.draw < len(drawn) and 0 <= answer.part < len(asked.parts)):
            raise ValueError(f"an answer is for draw {answer.draw} of part {answer.part}, which was not asked")
        number = drawn[answer.draw]
        of, part = seeds[number], asked.parts[answer.part]
        if answer.first + answer.size > of.count(part):
            raise ValueError(f"part {part} answers {answer.first + answer.size} seeds, {of.count(part)} were asked")
        answers[number].add(of.starts[part] + answer.first, answer.size, answer.piece)

    def _finish(self, request: HopRequest, seeds: _OwnedSeeds, found: _SeedAnswers, is_drawn: bool) -> Neighbors:
        """The answers in the order of the seeds."""
        dtype, order = self.id_dtypes[request.edge_type[0]], seeds.order
        if not is_drawn:
            return Neighbors(order.new_zeros(order.numel() + 1), order.new_empty(0, dtype=dtype), order.new_empty(0))
        if found.whole is not None and seeds.has_one_owner:  # they stand in their order already
            return found.whole._replace(ids=found.whole.ids.to(dtype))
        return stitch_neighbors(order, found.pieces, found.segments, wide=dtype == torch.int64)

    def edge_ids(self, edge_type: EdgeType, positions: Tensor) -> Tensor:
        return positions

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        """On the host, where requests are made of it."""
        return self._host.find_edges(edge_type, src.cpu(), dst.cpu())

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        return self._host.begin_find_edges(edge_type, src.cpu(), dst.cpu())

    def csc(self, edge_type: EdgeType) -> CSC:
        return self._host.csc(edge_type)

    def joined(self, edge_type: EdgeType) -> CSC | JoinedParts | None:
        """What native calls read as one: structure in its own order, where all parts are here."""
        is_plain = self._host.spec.weight is None and self._host.spec.time is None
        return self.structure.joined(edge_type, self._host.own_view) if is_plain else None

    def original(self, node_type: NodeType) -> Tensor:
        """Original ids of all nodes, where all parts are here."""
        return self.structure.original(node_type, self._host.own_view)

    def bounded(self, edge_type: EdgeType, fanout: int) -> int:
        return max(run.bounded(edge_type, fanout) for run in self._runs)


@dataclass(frozen=True)
class _OwnedSeeds:
    """Seeds of one node type by part, on the device. `slot` is their number in a request."""

    slot: int
    order: Tensor  # int64, where among the seeds the j-th grouped one stands
    local: Tensor
    starts: list[int]  # part p has grouped seeds starts[p] .. starts[p + 1]
    tree: Tensor | None
    seed_time: Tensor | None
    on_host: list[Tensor]  # local ids (int32), trees and times if any: what other machines are asked with

    def count(self, part: int) -> int:
        return self.starts[part + 1] - self.starts[part]

    @property
    def has_one_owner(self) -> bool:
        return max(end - begin for begin, end in pairwise(self.starts)) == self.order.numel()

    def to_slot(self, parts: Sequence[int]) -> Slot:
        """The seeds of some parts, on the host."""
        spans = [slice(self.starts[p], self.starts[p + 1]) for p in parts]
        local, *others = (
            rows[spans[0]] if len(spans) == 1 else torch.cat([rows[span] for span in spans]) for rows in self.on_host
        )
        tree = None if self.tree is None else others.pop(0)
        time = None if self.seed_time is None else others.pop(0)
        return Slot([self.count(p) for p in parts], local, tree, time)


@dataclass
class _SeedAnswers:
    """Answers for grouped seeds. `whole` is the last that was drawn here, as it was drawn."""

    pieces: list[PartNeighbors] = field(default_factory=list)
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    whole: Neighbors | None = None

    def add(self, first: int, size: int, piece: PartNeighbors) -> None:
        """For `size` seeds from `first` on."""
        self.segments.append((len(self.pieces), first, size))
        self.pieces.append(piece)

    def add_whole(self, first: int, size: int, drawn: Neighbors) -> None:
        self.whole = drawn
        self.add(first, size, PartNeighbors(drawn.indptr.diff().int(), drawn.ids, drawn.positions, drawn.weight))
