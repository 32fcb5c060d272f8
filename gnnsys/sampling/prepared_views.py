"""The parts that a process can read by itself, ready to be sampled from: what a graph server and a trainer share.

Views (`ViewSpec`) are prepared once per process; the uniform one is there from the start. Sampling by the times of
nodes needs the times of halo nodes, a rule may need their original ids; other parts own these: `wanted` says which are
needed, `prepare` takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import PartedCSC
from gnnsys.partition import Parts
from gnnsys.sampling.hop_message import Draw, HopAnswer, PartsRequest
from gnnsys.sampling.node_scores import ScoreBook
from gnnsys.sampling.part_view import UNIFORM, PartView, ViewSpec, draws_by, halo_sources, whole_csc

_SEEDS_PER_PIECE = 1 << 14
_MOST_VIEWS = 256
_SEEDS_PER_PIECE_OF_ALL = 1 << 11  # with fanout -1 a seed may have any number of neighbours
_EDGES_PER_PIECE = 1 << 22  # that are looked at or drawn: a hub may be asked for again and again

Wanted = dict[tuple[int, NodeType], Tensor]


class NotPrepared(ValueError):
    """A view that is not here: never prepared, or by a process that has been started again since."""


class PreparedViews:
    """Views of `own_parts`. Safe to use from several threads at once."""

    def __init__(self, parts: Parts, own_parts: Sequence[int]) -> None:
        self.parts, self.own_parts = parts, list(own_parts)
        self._lock = threading.Lock()
        self._views: dict[int, dict[int, PartView]] = {}
        self.scores = ScoreBook(parts)
        self._has_all = sorted(self.own_parts) == list(range(parts.book.num_parts))
        self._whole: dict[EdgeType, PartedCSC | None] = {}
        self.prepare(UNIFORM, {})

    def has(self, spec: ViewSpec) -> bool:
        return spec.key in self._views

    def wanted(self, spec: ViewSpec) -> Wanted:
        """Global ids of the halo nodes whose time, or original id, a view needs, by (part, node type)."""
        by = draws_by(self.parts, spec)
        types = {edge_type[0] for edge_type, rows in by.items() if rows == "node time" or spec.needs_sources}
        return {(p, t): halo_sources(self.parts.part(p), t) for p in self.own_parts for t in sorted(types)}

    def prepare(self, spec: ViewSpec, halo_rows: Mapping[tuple[int, NodeType], Tensor]) -> None:
        """Makes a view, unless it is there. `halo_rows`: times, or original ids, of what `wanted` names, int64."""
        with self._lock:
            if self.has(spec):
                return
            if len(self._views) >= _MOST_VIEWS:
                raise ValueError(f"{_MOST_VIEWS} ways of drawing are prepared here already: open the graph anew")
            for where, ids in self.wanted(spec).items():
                given = halo_rows.get(where)
                if given is None or given.shape != ids.shape or given.dtype != torch.int64:
                    raise ValueError(f"part {where[0]} needs rows of {ids.numel()} halo nodes of type {where[1]!r}")
            self._views[spec.key] = {
                p: PartView(
                    self.parts.part(p),
                    self.parts,
                    spec,
                    {t: rows for (part, t), rows in halo_rows.items() if part == p},
                    self.scores,
                )
                for p in self.own_parts
            }

    def view(self, key: int, part: int) -> PartView:
        views = self._views.get(key)
        if views is None:
            raise NotPrepared(f"view {key} was not prepared here: prepare it first")
        if part not in views:
            raise ValueError(f"part {part} is not here, only {self.own_parts}")
        return views[part]

    def whole(self, edge_type: EdgeType) -> PartedCSC | None:
        """Structure as one, where every part is here and stored alike; None where not."""
        if edge_type not in self._whole:
            self._whole[edge_type] = whole_csc(self.parts, edge_type) if self._has_all else None
        return self._whole[edge_type]

    def edge_type(self, index: int) -> EdgeType:
        edge_types = self.parts.schema.edge_types
        if not 0 <= index < len(edge_types):
            raise ValueError(f"edge type must be in [0, {len(edge_types)}), got {index}")
        return edge_types[index]

    def sample(self, request: PartsRequest) -> Iterator[HopAnswer]:
        """Answers a hop piece by piece: a piece is of one draw and one part."""
        for number, draw in enumerate(request.draws):
            for place in range(len(request.parts)):
                if request.slots[draw.slot].counts[place]:
                    yield from self._sample(request, number, draw, place)

    def _sample(self, request: PartsRequest, number: int, draw: Draw, place: int) -> Iterator[HopAnswer]:
        view, edge_type = self.view(request.view, request.parts[place]), self.edge_type(draw.edge_type)
        seeds, tree, seed_time = request.slots[draw.slot].of_part(place)
        step = _SEEDS_PER_PIECE if draw.fanout >= 0 else _SEEDS_PER_PIECE_OF_ALL
        for first, end in pieces(view.work(edge_type, seeds, draw.fanout, request.replace), seeds.numel(), step):
            chosen = slice(first, end)
            piece = view.sample(
                edge_type,
                seeds[chosen],
                draw.fanout,
                key=draw.key,
                replace=request.replace,
                last=request.last,
                exclude=draw.exclude[place],
                tree=None if tree is None else tree[chosen],
                seed_time=None if seed_time is None else seed_time[chosen],
                requester=request.requester,
                version=request.score_version,
            )
            yield HopAnswer(number, place, first, end - first, piece)


def pieces(
    work: Tensor | int, num_seeds: int, step: int = _SEEDS_PER_PIECE_OF_ALL, num_edges: int | None = None
) -> Iterator[tuple[int, int]]:
    """Ranges of at most `step` seeds that cover all, of `num_edges` (_EDGES_PER_PIECE) or a single seed.

    `work`: edges per seed.
    """
    num_edges = _EDGES_PER_PIECE if num_edges is None else num_edges
    if isinstance(work, int):
        step = max(1, min(step, num_edges // max(1, work)))
        yield from ((first, min(first + step, num_seeds)) for first in range(0, num_seeds, step))
        return
    done, first = work.cumsum(0), 0
    while first < num_seeds:
        before = int(done[first - 1]) if first else 0
        fitting = int(torch.searchsorted(done, before + num_edges, right=True))
        end = min(max(first + 1, fitting), first + step, num_seeds)
        yield first, end
        first = end
