"""One part as it is sampled from: its core columns, with the weights or in the order of the times that were asked for.

Structure stays where it is mapped. Uniform and weighted sampling need nothing beside it; sampling in time keeps a copy
of the indices in order of time where the files have another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import (
    CSC,
    Neighbors,
    PartedCSC,
    PartNeighbors,
    gather_rows,
    name_neighbors,
    native,
    sample_neighbors,
)
from gnnsys.partition import Part, Parts, id_dtype
from gnnsys.sampling.draw_rule import DrawRule, RuleSeeds, RuleSource
from gnnsys.sampling.edge_filter import ends_of_csc, find_filter, keep_edges
from gnnsys.sampling.edge_sources import (
    EdgeSource,
    check_time,
    rows_to_draw_by,
    time_rows,
    weight_rows,
    with_edge_time,
    with_node_time,
)
from gnnsys.sampling.node_scores import ScoreBook
from gnnsys.sampling.owners import part_bounds
from gnnsys.sampling.rules import find_rule

_SMALL_FANOUT = 256
_MAX_REPLACE = 1 << 22
_MAX_LOOKED_AT = 1 << 33  # edges, by one request: seconds


class ViewSpec(NamedTuple):
    """How in-edges are drawn: by weight, up to a time, by a rule (`draw_rule.py`), or (none of them) uniformly.

    `edges` is the text of a filter (`edge_filter.py`): the others are not there.
    """

    weight: str | None = None
    time: str | None = None
    rule: str | None = None
    edges: str | None = None

    @property
    def key(self) -> int:
        """A number that stands for it in a message: FNV-1a of the names, 63 bits; 0 for uniform."""
        if self == UNIFORM:
            return 0
        value = 0xCBF29CE484222325
        for byte in "\x1f".join(map(repr, self if self.edges is not None else self[:-1])).encode():
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        return value & 0x7FFFFFFFFFFFFFFF or 1

    @property
    def needs_sources(self) -> bool:
        """Whether drawing needs the original ids of sources; ValueError for a rule that nobody knows."""
        if self.edges is not None and find_filter(self.edges).needs_ends:
            return True
        return self.rule is not None and find_rule(self.rule).needs_sources


UNIFORM = ViewSpec()


def draws_by(parts: Parts, spec: ViewSpec) -> dict[EdgeType, str]:
    """What each edge type is drawn by (see `rows_to_draw_by`); ValueError where there are no such rows to draw by."""
    schema = parts.schema
    if spec.rule is not None:
        find_rule(spec.rule)  # ValueError where there is none
    if spec.edges is not None:
        find_filter(spec.edges).check(schema.edge_data)
    found = rows_to_draw_by(schema.node_data, schema.edge_data, spec.weight, spec.time)
    if spec.needs_sources and "node time" in found.values():
        raise ValueError(
            f"times of nodes, {spec.time!r}, do not go with what needs the ends of edges, such as a random split of "
            "links: use times of edges, or a mask"
        )
    for edge_type, by in found.items():
        key: NodeType | EdgeType = edge_type[0] if by == "node time" else edge_type
        if by.endswith("time"):
            rows = (schema.node_data[key] if isinstance(key, str) else schema.edge_data[key])[str(spec.time)]
            check_time(str(spec.time), (parts.book.num_ids(key), *rows.row_shape), rows.dtype)
    return found


def halo_sources(part: Part, node_type: NodeType) -> Tensor:
    """Global ids of the halo nodes that have edges into the core: the first hop of the halo."""
    hops = part.hops(node_type)
    return part.halo(node_type)[: hops[1] - hops[0]]


class PartView:
    """The in-edges of one part's core nodes. Seeds are local ids; what comes out is in global ids."""

    def __init__(
        self, part: Part, parts: Parts, spec: ViewSpec, halo_rows: Mapping[NodeType, Tensor], scores: ScoreBook
    ) -> None:
        self.part = part
        self._own = {t: parts.book.part_range(part.index, t) for t in parts.schema.node_types}
        self._first_edge = {t: parts.book.part_range(part.index, t).start for t in parts.schema.edge_types}
        self._sources: dict[EdgeType, EdgeSource] = {}
        self._order: dict[EdgeType, Tensor | None] = {}
        self._wide = {t: id_dtype(parts.book.num_ids(t)) == torch.int64 for t in parts.schema.node_types}
        self._wide_edges = {t: id_dtype(parts.book.num_ids(t)) == torch.int64 for t in parts.schema.edge_types}
        self._rule: DrawRule | None = None if spec.rule is None else find_rule(spec.rule)
        self._scores = scores
        self._source_ids: dict[NodeType, Tensor] = {}
        if spec.needs_sources:
            self._source_ids = {
                t: torch.cat([part.original_ids(t)[: part.num_core(t)].long(), ids]) for t, ids in halo_rows.items()
            }
        for edge_type, by in draws_by(parts, spec).items():
            source, kept = self._kept(edge_type, spec.edges)
            rows = part.edge_data[edge_type]
            if by == "weight":
                weights = weight_rows(str(spec.weight), _of_kept(rows[str(spec.weight)], source.csc, kept))
                source = EdgeSource(source.csc, weight=weights)
            elif by == "edge time":
                times = time_rows(str(spec.time), _of_kept(rows[str(spec.time)], source.csc, kept))
                source = with_edge_time(source, times)
            elif by == "node time":
                own = time_rows(str(spec.time), part.node_data[edge_type[0]][str(spec.time)])
                source = with_node_time(source, torch.cat([own, halo_rows[edge_type[0]]]))
            csc, order = source.csc, source.csc.edge_ids
            self._order[edge_type] = None if order is None else order.to(id_dtype(order.numel()))
            known = self._source_ids.get(edge_type[0])  # no core edge comes from a later hop of the halo
            num_src = csc.num_src if known is None else known.numel()
            self._sources[edge_type] = replace(source, csc=CSC(csc.indptr, csc.indices, num_src))  # not both orders

    def _kept(self, edge_type: EdgeType, edges: str | None) -> tuple[EdgeSource, Tensor | None]:
        """Structure with the edges that a filter keeps, and where each of them was; None where all are."""
        part, (src, _, dst) = self.part, edge_type
        csc = core_csc(part, edge_type)
        if edges is None:
            return EdgeSource(csc), None
        ends = ends_of_csc(csc, self._source_ids.get(src), part.original_ids(dst))
        mask = find_filter(edges).keeps(edge_type, part.edge_data[edge_type], csc.num_edges, ends)
        if mask is None:
            return EdgeSource(csc), None
        csc, kept = keep_edges(csc, mask)
        return EdgeSource(csc), kept

    def source(self, edge_type: EdgeType) -> EdgeSource:
        """What is sampled from: local ids, with weights or times by position, or times by local id."""
        return self._sources[edge_type]

    def source_ids(self, node_type: NodeType) -> Tensor | None:
        """Original ids of local ids that core edges come from, int64; None where the view does not need them."""
        return self._source_ids.get(node_type)

    def order(self, edge_type: EdgeType) -> Tensor | None:
        """Where in the part's own order each edge of the view stands; None where it is the same."""
        return self._order[edge_type]

    def sample(
        self,
        edge_type: EdgeType,
        seeds: Tensor,
        fanout: int,
        *,
        key: int,
        replace: bool,
        last: bool,
        exclude: Tensor | None,
        tree: Tensor | None,
        seed_time: Tensor | None,
        requester: int = -1,
        version: int = 0,
    ) -> PartNeighbors:
        """Up to `fanout` in-edges of each seed, drawn by its original id. `exclude`: positions of this view."""
        part, src = self.part, edge_type[0]
        rng_ids = gather_rows(part.original_ids(edge_type[2]), seeds)
        if self._rule is None:
            neighbors = self._draw(edge_type, seeds, fanout, key, replace, last, exclude, tree, seed_time, rng_ids)
        else:
            csc, ids, score = self._sources[edge_type].csc, self._source_ids.get(src), None
            if self._rule.needs_scores and version:
                score = self._scores.of_sources(part.index, requester, version)
            source = RuleSource(csc, ids, part.index, requester, version, score)
            neighbors = self._rule.draw(source, RuleSeeds(seeds, fanout, key, exclude, tree, rng_ids))
        own = self._own[src]
        return name_neighbors(
            neighbors,
            first=own.start,
            num_core=len(own),
            halo=part.halo(src),
            first_edge=self._first_edge[edge_type],
            order=self._order[edge_type],
            wide_ids=self._wide[src],
            wide_edges=self._wide_edges[edge_type],
        )

    def _draw(
        self,
        edge_type: EdgeType,
        seeds: Tensor,
        fanout: int,
        key: int,
        replace: bool,
        last: bool,
        exclude: Tensor | None,
        tree: Tensor | None,
        seed_time: Tensor | None,
        rng_ids: Tensor,
    ) -> Neighbors:
        """Uniformly, by weight or in time."""
        source = self._sources[edge_type]
        timed: dict[str, Any] = {}
        if source.time is not None and seed_time is not None:
            timed = {"time": source.time, "seed_time": seed_time, "last": last}
            timed |= {"node_time": source.node_time, "time_sorted": source.time_sorted}
        return sample_neighbors(
            source.csc,
            seeds,
            fanout,
            key=key,
            replace=replace,
            weight=source.weight,
            exclude=exclude,
            tree=tree,
            rng_ids=rng_ids,
            **timed,
        )

    def work(self, edge_type: EdgeType, seeds: Tensor, fanout: int, replace: bool) -> Tensor | int:
        """Edges that sampling looks at or draws, for each seed, int64; a number where that bounds all of them.

        ValueError for seeds that are not core nodes, and for draws with replacement that no memory would hold.
        """
        source = self._sources[edge_type]
        if replace and fanout > _MAX_REPLACE:
            raise ValueError(f"fanout with replacement must be at most {_MAX_REPLACE}, got {fanout}")
        is_uniform = source.weight is None and source.time is None and self._rule is None
        if is_uniform and 0 <= fanout <= (_MAX_REPLACE if replace else _SMALL_FANOUT):
            return fanout
        indptr = source.csc.indptr
        if seeds.numel() and not 0 <= int(seeds.min()) <= int(seeds.max()) < indptr.numel() - 1:
            raise ValueError(f"seeds of part {self.part.index} must be in [0, {indptr.numel() - 1})")
        degrees = indptr[seeds.long() + 1] - indptr[seeds.long()]
        return degrees + fanout if replace and fanout > 0 else degrees

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        """Positions of all edges from global ids `src[i]` to local ids `dst[i]`, ascending, each once, int64."""
        csc = self._sources[edge_type].csc
        if dst.numel() and not 0 <= int(dst.min()) <= int(dst.max()) < csc.num_dst:
            raise ValueError(f"destinations of part {self.part.index} must be in [0, {csc.num_dst})")
        local = local_sources(self.part, edge_type[0], src)
        known = (local >= 0).nonzero().view(-1)
        columns = dst[known].long()
        work = int((csc.indptr[columns + 1] - csc.indptr[columns]).sum())
        if work > _MAX_LOOKED_AT:
            raise ValueError(
                f"these pairs have {work} edges to look at, at most {_MAX_LOOKED_AT} at once: ask for fewer"
            )
        return native.find_edges(csc.indptr, csc.indices, local[known].int(), dst[known].int())


def _of_kept(rows: Tensor, csc: CSC, kept: Tensor | None) -> Tensor:
    return rows[: csc.num_edges] if kept is None else gather_rows(rows, kept)


def core_csc(part: Part, edge_type: EdgeType) -> CSC:
    """In-edges of the core nodes alone, as views."""
    csc, num_core = part.csc(edge_type), part.num_core(edge_type[2])
    if csc.num_dst == num_core:
        return csc
    return CSC(csc.indptr[: num_core + 1], csc.indices[: int(csc.indptr[num_core])], csc.num_src)


def whole_csc(parts: Parts, edge_type: EdgeType) -> PartedCSC | None:
    """In-edges of all parts as one; None where parts are not stored alike."""
    src, _, dst = edge_type
    all_parts = [parts.part(p) for p in range(parts.book.num_parts)]
    cscs = [core_csc(part, edge_type) for part in all_parts]
    original, halo = [part.original_ids(dst) for part in all_parts], [part.halo(src) for part in all_parts]
    is_alike = all(len({ids.dtype for ids in lists}) == 1 for lists in (original, halo))
    if not is_alike or any(csc.edge_ids is not None for csc in cscs):
        return None
    bounds = [part_bounds(parts.book, t) for t in (dst, src, edge_type)]
    return PartedCSC([csc.indptr for csc in cscs], [csc.indices for csc in cscs], original, halo, *bounds)


def local_sources(part: Part, node_type: NodeType, ids: Tensor) -> Tensor:
    """Local ids of global ids that the core's edges may come from, int64; -1 for ids that the part does not know."""
    own, halo, ids = part.book.part_range(part.index, node_type), halo_sources(part, node_type), ids.long()
    local = torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, -1)
    if halo.numel():
        place = torch.searchsorted(halo, ids.to(halo.dtype)).clamp_(max=halo.numel() - 1)
        local = torch.where(halo[place].long() == ids, place + len(own), local)
    return local
