"""The cache of rows in front of an opened graph: filled when it is known what batches ask for, and when that moves.

`gnnsys.open(parts, device="cuda", cache="auto")` is a wish: which rows to keep depends on fanouts, seeds and batch
size. A `NeighborLoader` computes from these what its batches will ask for, and the cache is filled when it is made. Of
any other loader, and of a sampler of the user's own, the first epoch is counted, and the cache filled at its end.

Rows of other machines come first, as they cost most; then own ones that come over the bus; own rows that are on the
device are never cached.

At the end of an epoch in which the cache had fewer rows than were expected of it, counting begins for the next one. At
its end other rows take the place of those that are cached, where they would have been read more often: rows are chosen
by the counts of every other batch and judged by those of the batches between, so that chance moves nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import NodeType
from gnnsys.loader.fetch import Names
from gnnsys.sampling import DistGraph
from gnnsys.store import (
    OWN_COST,
    DeviceTable,
    DistTensor,
    ExpectedReads,
    MemoryBudget,
    VisitCounts,
    Visits,
    expected_reads,
    node_table,
    remote_rows,
    rows_to_cache,
)

_log = logging.getLogger(__name__)
_SHARE = 0.5  # of what the device has left, for a cache whose size nobody gave
_SLOT_BYTES = 4  # where a row is looked up, for every row of a table
_MOVED = 0.95  # of what a cache was expected to have: visits have moved where it has less
Expected = Mapping[NodeType, Tensor]


def fill_caches(
    graph: DistGraph, device: torch.device, visits: Callable[[], Expected], names: Names | None = None
) -> None:
    """Fills the caches that `graph` was opened with, once. `visits` tells how likely a batch is to hold each node,
    `names` which arrays batches have (None: all).

    What is expected of them is in `graph.cache_plan`, by node type.
    """
    keeper = keeper_of(graph, device, names)
    if keeper is not None:
        keeper.fill(graph, visits)


def keeper_of(graph: Any, device: torch.device | None, names: Names | None) -> CacheKeeper | None:
    """Who keeps the caches of a graph, which is the same for all of its loaders; None where it has none there."""
    if not isinstance(graph, DistGraph) or graph.cache is None or device is None:
        return None
    with graph.filling:
        if graph.cache_keeper is None:
            graph.cache_keeper = CacheKeeper(device, names)
    return graph.cache_keeper if graph.cache_keeper.device == device else None


class CacheKeeper:
    """Fills the caches of one graph on `device`. The first loader that joins leads: its epochs are what counts, while
    it lives. Others are read through the same caches, and what they read is counted, too."""

    def __init__(self, device: torch.device, names: Names | None) -> None:
        self.device, self._names = device, names
        self._allowed: dict[NodeType, int] = {}
        self._seen: dict[NodeType, tuple[int, int]] = {}  # hits and rows when an epoch ended last
        self._leader: weakref.ref[Any] | None = None

    def join(self, graph: DistGraph, loader: object) -> None:
        """A loader was made. Where the caches are empty still, it is counted what batches ask for."""
        if self._leader is None:
            self._leader = weakref.ref(loader)
        if graph.cache_plan is None:
            self._count(graph, True)

    def fill(self, graph: DistGraph, visits: Callable[[], Expected]) -> None:
        """Fills the caches, where nobody has done so before."""
        with graph.filling:
            if graph.cache_plan is not None:
                return
            tables = self._tables(graph)
            if not tables:
                _log.warning("cache=%r keeps nothing: %s reads no rows that it could spare", graph.cache, self.device)
                graph.cache_plan = {}
                return
            expected = visits()
            self._allot(graph, tables, expected)
            graph.cache_plan = {t: self._fill(graph, t, of_type, expected[t]) for t, of_type in tables.items()}

    def end_epoch(self, graph: DistGraph, loader: object) -> None:
        """An epoch of `loader` has been consumed. Reads that are under way go on with the rows that they have found."""
        leader = None if self._leader is None else self._leader()
        if leader is None:
            self._leader, leader = weakref.ref(loader), loader
        if leader is not loader:
            return
        tables = self._tables(graph)
        counted = self._take_counts(tables)
        if graph.cache_plan is None:
            if counted:
                self._count(graph, False)
                zeros = {t: torch.zeros(graph.num_nodes(t), dtype=torch.float64, device="cpu") for t in tables}
                self.fill(graph, lambda: zeros | {t: visits.per_batch() for t, visits in counted.items()})
                for node_type, visits in counted.items():
                    chosen = self._chosen(graph, node_type, tables[node_type], visits.even.double())
                    self._expect(graph, node_type, tables[node_type], visits, chosen)
            return
        if counted:
            self._count(graph, False)
            for node_type, visits in counted.items():
                self._refill(graph, node_type, tables[node_type], visits)
        elif any([self._has_moved(graph, t, of_type) for t, of_type in tables.items()]):
            self._count(graph, True)

    def _take_counts(self, tables: Mapping[NodeType, list[DeviceTable]]) -> dict[NodeType, Visits]:
        """What was counted of the types that batches read; empty where no type has two batches. Other types have no
        visits: a cache need not wait for rows that nobody asks for."""
        counts = {t: visits for t, of in tables.items() if (visits := of[0].visits) is not None and visits.num_batches}
        counted = {t: visits.take() for t, visits in counts.items()}
        most = max((visits.num_batches for visits in counted.values()), default=0)  # batches without the type count too
        return {t: visits._replace(num_batches=most) for t, visits in counted.items()}

    def _count(self, graph: DistGraph, is_on: bool) -> None:
        """All tables of a type are read with the same ids: those of the first are counted."""
        for node_type, of_type in self._tables(graph).items():
            if is_on and of_type[0].visits is None:
                of_type[0].count_visits(VisitCounts(graph.num_nodes(node_type), self.device))
            elif not is_on:
                of_type[0].count_visits(None)

    def _has_moved(self, graph: DistGraph, node_type: NodeType, tables: list[DeviceTable]) -> bool:
        """Whether a cache had fewer of the rows that were asked for since the last epoch's end than was expected."""
        counts = tables[0].counters()
        hits, rows = counts.hits, counts.hits + counts.misses
        hits_before, rows_before = self._seen.get(node_type, (0, 0))
        if rows < rows_before:  # it was filled since
            hits_before = rows_before = 0
        self._seen[node_type] = hits, rows
        plan = (graph.cache_plan or {}).get(node_type)
        if plan is None or rows == rows_before:
            return False
        return (hits - hits_before) / (rows - rows_before) < _MOVED * plan.hit_rate

    def _refill(self, graph: DistGraph, node_type: NodeType, tables: list[DeviceTable], visits: Visits) -> None:
        """Puts other rows into a cache where they would have spared more, and says what is expected from here on."""
        ids, chosen = tables[0].cached_rows(), self._chosen(graph, node_type, tables, visits.even.double())
        now, then = (self._spared(graph, tables, node_type, visits.odd.double(), each) for each in (ids, chosen))
        if now < _MOVED * then:
            self._fill(graph, node_type, tables, visits.per_batch())
            ids = chosen
            _log.info("the cache of %s rows is filled anew: visits have moved", node_type)
        self._expect(graph, node_type, tables, visits, ids)

    def _expect(
        self, graph: DistGraph, node_type: NodeType, tables: list[DeviceTable], visits: Visits, ids: Tensor
    ) -> None:
        """What a cache of rows that were not chosen by odd batches has of what these asked for."""
        assert graph.cache_plan is not None
        per_batch = visits.odd.double() / max(visits.num_batches, 1)
        is_remote, row_bytes = self._is_remote(graph, node_type), _row_bytes(tables)
        graph.cache_plan[node_type] = expected_reads(per_batch, is_remote, ids, row_bytes=row_bytes)

    def _allot(self, graph: DistGraph, tables: Mapping[NodeType, list[DeviceTable]], expected: Expected) -> None:
        """Shares what is allowed among node types, by the bytes that batches read of each."""
        left = MemoryBudget.of(self.device).share()
        assert graph.cache is not None
        allowed = int(_SHARE * left) if graph.cache == "auto" else int(graph.cache)
        weights = {t: float(expected[t].sum()) * _row_bytes(of) for t, of in tables.items()}
        total = max(sum(weights.values()), 1e-30)
        self._allowed = {t: int(weight / total * allowed) for t, weight in weights.items()}

    def _fill(self, graph: DistGraph, node_type: NodeType, tables: list[DeviceTable], visits: Tensor) -> ExpectedReads:
        """All tables of a type keep the rows of the same nodes."""
        ids = self._chosen(graph, node_type, tables, visits)
        if ids.numel():
            name = object()
            self._seen.pop(node_type, None)  # a cache that is filled counts hits from zero
            try:
                for table in tables:
                    table.fill_cache(ids, name)
            except torch.OutOfMemoryError:
                _log.warning("%s has no memory left for a cache of %s rows", self.device, node_type)
        return expected_reads(visits, self._is_remote(graph, node_type), ids, row_bytes=_row_bytes(tables))

    def _chosen(self, graph: DistGraph, node_type: NodeType, tables: list[DeviceTable], visits: Tensor) -> Tensor:
        others = (len(tables) - 1) * _SLOT_BYTES * graph.num_nodes(node_type)  # `rows_to_cache` counts one table's
        return rows_to_cache(
            visits, self._is_remote(graph, node_type), row_bytes=_row_bytes(tables),
            bytes=max(self._allowed[node_type] - others, 0), **_costs(tables),
        )  # fmt: skip

    def _spared(
        self, graph: DistGraph, tables: list[DeviceTable], node_type: NodeType, visits: Tensor, ids: Tensor
    ) -> float:
        """What a cache of these rows saves, in the costs by which rows are chosen."""
        own = _costs(tables).get("own_cost", OWN_COST)
        return float((visits * torch.where(self._is_remote(graph, node_type), 1.0, own).double())[ids].sum())

    def _is_remote(self, graph: DistGraph, node_type: NodeType) -> Tensor:
        bounds = [*graph.book.ranges(node_type)[:, 0].tolist(), graph.num_nodes(node_type)]
        return remote_rows(torch.tensor(bounds, device="cpu"), graph.parts_here)

    def _tables(self, graph: DistGraph) -> dict[NodeType, list[DeviceTable]]:
        """Looked up each time: a device may have been let go of."""
        found = {t: _tables(graph, self.device, t, self._names) for t in graph.node_types}
        return {t: of_type for t, of_type in found.items() if of_type}


def _tables(graph: DistGraph, device: torch.device, node_type: NodeType, names: Names | None) -> list[DeviceTable]:
    """The tables of a node type that a cache would spare something."""
    found = []
    named = names.get(node_type, ()) if isinstance(names, Mapping) else names
    for name, rows in graph.node_data[node_type].items():
        if named is not None and name not in named:
            continue
        if isinstance(rows, DistTensor) and rows.name == node_table(node_type, name):
            table = graph.read_by(device, rows)
            if isinstance(table, DeviceTable) and (table.is_remote or not table.is_on_device):
                found.append(table)
    return found


def _costs(tables: list[DeviceTable]) -> dict[str, float]:
    return {"own_cost": 0.0} if all(table.is_on_device for table in tables) else {}


def _row_bytes(tables: list[DeviceTable]) -> int:
    return sum(table.row_bytes for table in tables)
