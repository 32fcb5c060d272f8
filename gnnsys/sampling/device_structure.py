"""The structure of a process's own parts, where a device reads it: what it samples from by itself.

Parts that follow each other are joined to one CSC in global ids in the device's memory. Where that is too large, the
indices stay in their mapped files, in local ids, and the device reads them there; what is looked up for every node
(where its edges begin, its original id) is in its memory in any case. Views by weight and by time are made of the
host's (`PartView`), so that host and device draw from the same candidates in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import CSC, DeviceReads, JoinedParts, Neighbors, gather_rows, sample_neighbors
from gnnsys.partition import Part, Parts, id_dtype
from gnnsys.sampling.draw_rule import DrawRule, RuleSeeds, RuleSource
from gnnsys.sampling.edge_sources import EdgeSource
from gnnsys.sampling.owners import part_bounds
from gnnsys.sampling.part_view import UNIFORM, PartView, ViewSpec
from gnnsys.sampling.rules import find_rule
from gnnsys.store import MemoryBudget, RegisteredFiles, runs_of

_CHUNK = 1 << 24  # edges that are named at once while structure is copied
_ROOMY = 1024  # fanouts up to this are given to kernels as they are
_MAX_JOINED = 64  # parts that `sample_hops` looks through


@dataclass(frozen=True)
class LocalNames:
    """What the local ids of one part stand for."""

    first: int  # global id of the first core node
    num_core: int
    halo: Tensor

    def __call__(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """Global ids of local ids."""
        if not self.halo.numel():
            return local.to(dtype) + self.first
        listed = gather_rows(self.halo, (local - self.num_core).clamp_(min=0)).to(dtype)
        return torch.where(local < self.num_core, local.to(dtype) + self.first, listed)


class PartsRun:
    """Parts that follow each other as one, on a device. Columns are numbered from the run's first node on.

    `names` tells what the indices are: None for global ids. Where a `rule` draws, `source_ids` are the original ids of
    what the indices name, if it reads them.
    """

    def __init__(
        self,
        parts: Parts,
        run: Sequence[int],
        original: Mapping[NodeType, Tensor],
        sources: Mapping[EdgeType, EdgeSource],
        order: Mapping[EdgeType, Tensor | None],
        names: Mapping[NodeType, LocalNames] | None,
        rule: DrawRule | None = None,
        source_ids: Mapping[NodeType, Tensor] | None = None,
    ) -> None:
        book = parts.book
        self.parts = list(run)
        self._dtypes = {t: id_dtype(book.num_ids(t)) for t in parts.schema.node_types}
        self._first_edge = {t: book.part_range(run[0], t).start for t in parts.schema.edge_types}
        self.original, self.sources, self._order, self.names = original, sources, order, names
        self._rule, self.source_ids = rule, dict(source_ids or {})
        self._largest: dict[EdgeType, int] = {}
        self._reads = DeviceReads()

    def sample(
        self,
        edge_type: EdgeType,
        columns: Tensor,
        fanout: int,
        *,
        key: int,
        replace: bool,
        last: bool,
        exclude: Tensor | None,
        tree: Tensor | None,
        seed_time: Tensor | None,
    ) -> Neighbors:
        """Up to `fanout` in-edges of each column, in global ids. `exclude`: positions of this run."""
        source, (src, _, dst) = self.sources[edge_type], edge_type
        if columns.is_cuda:
            csc = source.csc
            self._reads(columns.device, csc.indptr, csc.indices, source.weight, source.time, self.original[dst])
            self._reads(columns.device, self._order[edge_type], None if self.names is None else self.names[src].halo)
            self._reads(columns.device, self.source_ids.get(src))
            fanout = fanout if replace else self.bounded(edge_type, fanout)
        seeds, original = columns.to(source.csc.indices.dtype), gather_rows(self.original[dst], columns)
        rng_ids = original if original.dtype == seeds.dtype else original.long()
        if self._rule is not None:
            csc, ids = source.csc, self.source_ids.get(src)
            if ids is not None:
                csc = CSC(csc.indptr, csc.indices, ids.numel())  # no core edge comes from a later hop of the halo
            at = RuleSource(csc, ids, self.parts[0])
            found = self._rule.draw(at, RuleSeeds(seeds, fanout, key, exclude, tree, rng_ids))
            return self._named(edge_type, found)
        timed: dict[str, Any] = {}
        if source.time is not None and seed_time is not None:
            timed = {"time": source.time, "seed_time": seed_time, "last": last}
            timed |= {"node_time": source.node_time, "time_sorted": source.time_sorted}
        found = sample_neighbors(
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
        return self._named(edge_type, found)

    def _named(self, edge_type: EdgeType, found: Neighbors) -> Neighbors:
        """In global ids and edge ids."""
        src = edge_type[0]
        ids = found.ids.to(self._dtypes[src]) if self.names is None else self.names[src](found.ids, self._dtypes[src])
        order = self._order[edge_type]
        edges = found.positions if order is None else gather_rows(order, found.positions).long()
        return Neighbors(found.indptr, ids, edges + self._first_edge[edge_type], found.weight)

    def bounded(self, edge_type: EdgeType, fanout: int) -> int:
        """A fanout that takes all in-edges of every node, as the smallest such: kernels reserve room for a fanout."""
        if fanout <= _ROOMY:
            return fanout
        if edge_type not in self._largest:
            degrees = self.sources[edge_type].csc.in_degrees()
            self._largest[edge_type] = int(degrees.max()) if degrees.numel() else 0
        return min(fanout, max(_ROOMY, self._largest[edge_type]))


class DeviceStructure:
    """The structure of `own_parts` for one device. With `files`, indices stay in their files; else all is copied."""

    def __init__(
        self, parts: Parts, own_parts: Sequence[int], device: torch.device, files: RegisteredFiles | None = None
    ) -> None:
        self.parts, self.own_parts, self.device, self.files = parts, sorted(own_parts), device, files
        self.has_all = self.own_parts == list(range(parts.num_parts))
        self._runs: dict[ViewSpec, list[PartsRun]] = {}
        self._lock = threading.Lock()
        self._original: dict[tuple[int, ...], dict[NodeType, Tensor]] = {}
        self._joined: dict[EdgeType, CSC | JoinedParts | None] = {}
        self._all_original: dict[NodeType, Tensor] = {}
        MemoryBudget.of(device).watch(self, "structure of parts", DeviceStructure._device_bytes)

    def runs(self, spec: ViewSpec, view: Callable[[int], PartView]) -> list[PartsRun]:
        """The own parts through a view, made the first time. `view` is the host's of a part."""
        with self._lock:
            if spec not in self._runs:
                numbers = self._numbers()
                bases: Sequence[PartsRun | None] = self._runs.get(UNIFORM, [None] * len(numbers))
                self._runs[spec] = [
                    self._make(spec, run, [view(part) for part in run], base)
                    for run, base in zip(numbers, bases, strict=True)
                ]
                self._wait()
            return self._runs[spec]

    def joined(self, edge_type: EdgeType, view: Callable[[int], PartView]) -> CSC | JoinedParts | None:
        """All parts as `sample_hops` takes them, for uniform draws; None where some part is elsewhere."""
        if edge_type not in self._joined:
            self._joined[edge_type] = self._join_all(edge_type, view)
            self._wait()
        return self._joined[edge_type]

    def _join_all(self, edge_type: EdgeType, view: Callable[[int], PartView]) -> CSC | JoinedParts | None:
        if not self.has_all or (self.files is not None and len(self.own_parts) > _MAX_JOINED):
            return None
        runs = self.runs(UNIFORM, view)
        if self.files is None:
            return runs[0].sources[edge_type].csc if len(runs) == 1 else None
        src = edge_type[0]
        cscs = [run.sources[edge_type].csc for run in runs]
        halo = [run.names[src].halo for run in runs if run.names is not None]
        bounds = torch.stack([part_bounds(self.parts.book, src), part_bounds(self.parts.book, edge_type)])
        return JoinedParts(_joined_indptr([csc.indptr for csc in cscs]), [csc.indices for csc in cscs], halo, bounds)

    def original(self, node_type: NodeType, view: Callable[[int], PartView]) -> Tensor:
        """Original ids of the nodes of all parts, where all are here."""
        if node_type not in self._all_original:
            self._all_original[node_type] = _joined([run.original[node_type] for run in self.runs(UNIFORM, view)])
            self._wait()
        return self._all_original[node_type]

    def _wait(self) -> None:
        """Samples may be made on any stream."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _numbers(self) -> list[list[int]]:
        """Which parts make a run."""
        if self.files is not None:
            return [[part] for part in self.own_parts]
        # A part without nodes of a type is in a run by its number: ids follow each other all the same.
        return [[self.own_parts[k] for k in run] for run in runs_of([(p, p + 1) for p in self.own_parts])]

    def _make(self, spec: ViewSpec, run: list[int], views: Sequence[PartView], base: PartsRun | None) -> PartsRun:
        """`base` is the run as it is drawn from uniformly, if it is there: structure in the same order is its own."""
        parts = [self.parts.part(p) for p in run]
        original = self._original_ids(tuple(run), parts)
        sources: dict[EdgeType, EdgeSource] = {}
        order: dict[EdgeType, Tensor | None] = {}
        names = [{t: self._names(part, t) for t in self.parts.schema.node_types} for part in parts]
        for edge_type in self.parts.schema.edge_types:
            of_parts = [view.source(edge_type) for view in views]
            orders = [view.order(edge_type) for view in views]
            order[edge_type] = self._join_orders(orders, [source.csc.num_edges for source in of_parts])
            known = None if base is None or order[edge_type] is not None else base.sources[edge_type].csc
            sources[edge_type] = self._join(edge_type, of_parts, [name[edge_type[0]] for name in names], known)
        rule = None if spec.rule is None else find_rule(spec.rule)
        source_ids = self._source_ids(views, names, original) if spec.needs_sources else None
        local = None if self.files is None else names[0]
        return PartsRun(self.parts, run, original, sources, order, local, rule, source_ids)

    def _source_ids(
        self,
        views: Sequence[PartView],
        names: Sequence[Mapping[NodeType, LocalNames]],
        original: Mapping[NodeType, Tensor],
    ) -> dict[NodeType, Tensor]:
        """Original ids of what the indices name: local ids, or global ones, of which not all may be known here."""
        found: dict[NodeType, Tensor] = {}
        for node_type in self.parts.schema.node_types:
            of_views = [view.source_ids(node_type) for view in views]
            if all(ids is None for ids in of_views):
                continue  # no edge type comes from there
            if self.files is not None:
                found[node_type] = self._copy(_only(of_views))
            elif len(views) == self.parts.num_parts:
                found[node_type] = original[node_type]
            else:
                num_nodes = self.parts.book.num_ids(node_type)
                by_global = torch.zeros(num_nodes, dtype=id_dtype(num_nodes), device=self.device)
                for ids, of_part in zip(of_views, names, strict=True):
                    of_local = self._copy(_only([ids]))
                    local = torch.arange(of_local.numel(), device=self.device)
                    by_global[of_part[node_type](local, torch.int64)] = of_local.to(by_global.dtype)
                found[node_type] = by_global
        return found

    def _original_ids(self, run: tuple[int, ...], parts: Sequence[Part]) -> dict[NodeType, Tensor]:
        if run not in self._original:
            self._original[run] = {
                t: _joined([self._copy(part.original_ids(t)[: part.num_core(t)]) for part in parts])
                for t in self.parts.schema.node_types
            }
        return self._original[run]

    def _names(self, part: Part, node_type: NodeType) -> LocalNames:
        own = self.parts.book.part_range(part.index, node_type)
        return LocalNames(own.start, len(own), self._copy(part.halo(node_type)))

    def _join(
        self, edge_type: EdgeType, sources: Sequence[EdgeSource], names: Sequence[LocalNames], known: CSC | None
    ) -> EdgeSource:
        weight = [self._readable(source.weight) for source in sources if source.weight is not None]
        time = [self._readable(_time_by_position(source)) for source in sources if source.time is not None]
        return EdgeSource(
            self._join_structure(edge_type, sources, names) if known is None else known,
            weight=_joined(weight) if weight else None,
            time=_joined(time) if time else None,
            time_sorted=sources[0].time_sorted,
        )

    def _join_structure(self, edge_type: EdgeType, sources: Sequence[EdgeSource], names: Sequence[LocalNames]) -> CSC:
        indptr = _joined_indptr([self._copy(source.csc.indptr) for source in sources])
        num_src = sources[0].csc.num_src
        if self.files is None:
            src = edge_type[0]
            num_src, dtype = self.parts.book.num_ids(src), id_dtype(self.parts.book.num_ids(src))
            indices = torch.empty(sum(s.csc.num_edges for s in sources), dtype=dtype, device=self.device)
            end = 0
            for source, of_part in zip(sources, names, strict=True):
                for first in range(0, source.csc.num_edges, _CHUNK):
                    local = self._copy(source.csc.indices[first : first + _CHUNK])
                    begin, end = end, end + local.numel()
                    indices[begin:end] = of_part(local, dtype)
        else:
            indices = self._readable(sources[0].csc.indices)
        return CSC(indptr, indices, num_src)

    def _join_orders(self, orders: Sequence[Tensor | None], num_edges: Sequence[int]) -> Tensor | None:
        """Where the edges of a view stand in their part, as positions of the run."""
        if all(order is None for order in orders):
            return None
        joined, first = [], 0
        for order, size in zip(orders, num_edges, strict=True):
            places = torch.arange(size, device=self.device) if order is None else self._copy(order).long()
            joined.append(places + first)
            first += size
        return _joined(joined)

    def _copy(self, rows: Tensor) -> Tensor:
        return rows.to(self.device).contiguous()

    def _readable(self, rows: Tensor) -> Tensor:
        """Where the device reads it: in its file, if files are used and it is in one."""
        found = self.files.view(rows) if self.files is not None else None
        return self._copy(rows) if found is None else found

    def _device_bytes(self) -> int:
        held: dict[int, int] = {}
        for joined in list(self._joined.values()):
            if joined is not None:
                held[joined.indptr.data_ptr()] = joined.indptr.nbytes
        held |= {ids.data_ptr(): ids.nbytes for ids in list(self._all_original.values())}
        for runs in list(self._runs.values()):
            for run in runs:
                tensors = [*run.original.values(), *run.source_ids.values()]
                for source in run.sources.values():
                    tensors += [source.csc.indptr, source.csc.indices]
                    tensors += [rows for rows in (source.weight, source.time) if rows is not None]
                held |= {t.data_ptr(): t.nbytes for t in tensors if t.device == self.device}
        return sum(held.values())


def structure_bytes(parts: Parts, own_parts: Sequence[int]) -> int:
    """What a copy of the own parts' structure takes of a device, in bytes, when draws are uniform."""
    book, total = parts.book, 0
    for node_type in parts.schema.node_types:
        size = id_dtype(book.num_ids(node_type)).itemsize
        total += sum(size * len(book.part_range(p, node_type)) for p in own_parts)
    for edge_type in parts.schema.edge_types:
        size = id_dtype(book.num_ids(edge_type[0])).itemsize
        for p in own_parts:
            total += size * len(book.part_range(p, edge_type)) + 8 * (len(book.part_range(p, edge_type[2])) + 1)
    return total


def _only(rows: Sequence[Tensor | None]) -> Tensor:
    (only,) = rows
    assert only is not None
    return only


def _time_by_position(source: EdgeSource) -> Tensor:
    assert source.time is not None
    return gather_rows(source.time, source.csc.indices) if source.node_time else source.time


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _joined_indptr(parts: Sequence[Tensor]) -> Tensor:
    """Of CSCs that follow each other."""
    if len(parts) == 1:
        return parts[0]
    joined, first = [], 0
    for number, indptr in enumerate(parts):
        joined.append((indptr if number == 0 else indptr[1:]) + first)
        first += int(indptr[-1])
    return torch.cat(joined)
