"""The cache of rows in front of an opened graph: filled when the first loader says what its batches will ask for.

`gnnsys.open(parts, device="cuda", cache="auto")` is a wish: which rows to keep depends on fanouts, seeds and batch
size, which a loader knows. Rows of other machines come first, as they cost most; then own ones that come over the bus;
own rows that are on the device are never cached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gnnsys.graph import NodeType
from gnnsys.loader.fetch import Names
from gnnsys.sampling import DistGraph, ranks_on_device
from gnnsys.store import (
    DeviceTable,
    DistTensor,
    ExpectedReads,
    MemoryBudget,
    expected_reads,
    node_table,
    remote_rows,
    rows_to_cache,
)

_log = logging.getLogger(__name__)
_SHARE = 0.5  # of what the device has left, for a cache whose size nobody gave
_SLOT_BYTES = 4  # where a row is looked up, for every row of a table


def fill_caches(
    graph: DistGraph,
    device: torch.device,
    visits: Callable[[], Mapping[NodeType, Tensor]],
    names: Names | None = None,
) -> None:
    """Fills the caches that `graph` was opened with, once. `visits` tells how likely a batch is to hold each node,
    `names` which arrays batches have (None: all).

    What is expected of them is in `graph.cache_plan`, by node type.
    """
    if graph.cache is None:
        return
    with graph.filling:
        if graph.cache_plan is None:
            graph.cache_plan = _plan(graph, device, visits, names)


def _plan(
    graph: DistGraph, device: torch.device, visits: Callable[[], Mapping[NodeType, Tensor]], names: Names | None
) -> dict[NodeType, ExpectedReads]:
    plan: dict[NodeType, ExpectedReads] = {}
    tables = {t: found for t in graph.node_types if (found := _tables(graph, device, t, names))}
    if not tables:
        _log.warning("cache=%r keeps nothing: %s reads no rows that it could spare", graph.cache, device)
        return plan
    left = MemoryBudget.of(device).left() // ranks_on_device(device)
    assert graph.cache is not None
    allowed = int(_SHARE * left) if graph.cache == "auto" else int(graph.cache)
    expected = visits()
    weights = {t: float(expected[t].sum()) * _row_bytes(of) for t, of in tables.items()}
    for node_type, of_type in tables.items():
        share = weights[node_type] / max(sum(weights.values()), 1e-30)
        plan[node_type] = _fill(graph, node_type, of_type, expected[node_type], int(share * allowed))
    return plan


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


def _fill(
    graph: DistGraph, node_type: NodeType, tables: list[DeviceTable], visits: Tensor, allowed: int
) -> ExpectedReads:
    """All tables of a type keep the rows of the same nodes."""
    bounds = torch.tensor([*graph.book.ranges(node_type)[:, 0].tolist(), graph.num_nodes(node_type)])
    is_remote, row_bytes = remote_rows(bounds, graph.parts_here), _row_bytes(tables)
    others = (len(tables) - 1) * _SLOT_BYTES * graph.num_nodes(node_type)  # `rows_to_cache` counts one table's
    costs = {"own_cost": 0.0} if all(table.is_on_device for table in tables) else {}
    ids = rows_to_cache(visits, is_remote, row_bytes=row_bytes, bytes=max(allowed - others, 0), **costs)
    if ids.numel():
        name = object()
        for table in tables:
            table.fill_cache(ids, name)
    return expected_reads(visits, is_remote, ids, row_bytes=row_bytes)


def _row_bytes(tables: list[DeviceTable]) -> int:
    return sum(table.row_bytes for table in tables)
