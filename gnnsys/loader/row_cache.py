"""The cache of rows in front of an opened graph: filled when the first loader says what its batches will ask for.

`gnnsys.open(parts, device="cuda", cache="auto")` is a wish: which rows to keep depends on fanouts, seeds and batch
size, which a loader knows. Rows of other machines come first, as they cost most; then own ones that come over the bus;
own rows that are on the device are never cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gnnsys.graph import NodeType
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

_SHARE = 0.5  # of what the device has left, for a cache whose size nobody gave
_SLOT_BYTES = 4  # where a row is looked up, for every row of a table


def fill_caches(graph: DistGraph, device: torch.device, visits: Callable[[], Mapping[NodeType, Tensor]]) -> None:
    """Fills the caches that `graph` was opened with, once. `visits` tells how likely a batch is to hold each node.

    What is expected of them is in `graph.cache_plan`, by node type.
    """
    if graph.cache is None or graph.cache_plan is not None:
        return
    tables = {t: found for t in graph.node_types if (found := _tables(graph, device, t))}
    graph.cache_plan = {}
    if not tables:
        return
    left = MemoryBudget.of(device).left() // ranks_on_device(device)
    allowed = int(_SHARE * left) if graph.cache == "auto" else int(graph.cache)
    expected = visits()
    weights = {t: float(expected[t].sum()) * _row_bytes(of) for t, of in tables.items()}
    for node_type, of_type in tables.items():
        share = weights[node_type] / max(sum(weights.values()), 1e-30)
        graph.cache_plan[node_type] = _fill(graph, node_type, of_type, expected[node_type], int(share * allowed))


def _tables(graph: DistGraph, device: torch.device, node_type: NodeType) -> list[DeviceTable]:
    """The tables of a node type that a cache would spare something."""
    found = []
    for name, rows in graph.node_data[node_type].items():
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
        for table in tables:
            table.fill_cache(ids)
    return expected_reads(visits, is_remote, ids, row_bytes=row_bytes)


def _row_bytes(tables: list[DeviceTable]) -> int:
    return sum(table.row_bytes for table in tables)
