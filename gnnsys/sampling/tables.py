"""The immutable tables of a directory of parts: rows of nodes and edges, and the two ways between ids.

`node/TYPE/NAME` and `edge/SRC|RELATION|DST/NAME` have a row per global id. `global/TYPE` has the original id of every
global id; `original/TYPE`, indexed by original id, has the global id, and is sharded in equal ranges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.partition import Parts, id_dtype, original_bounds
from gnnsys.store import TableSpec, edge_table, node_table


def graph_tables(parts: Parts) -> dict[str, TableSpec]:
    """Every table by name. From the manifest alone."""
    specs: dict[str, TableSpec] = {}

    def add(name: str, bounds: list[int], dtype: torch.dtype, row_shape: tuple[int, ...] = ()) -> None:
        specs[name] = TableSpec(name, row_shape, dtype, tuple(bounds), mutable=False)

    book = parts.book
    for node_type, arrays in parts.schema.node_data.items():
        ranges = book.ranges(node_type)
        bounds = [*ranges[:, 0].tolist(), book.num_ids(node_type)]
        for name, spec in arrays.items():
            add(node_table(node_type, name), bounds, spec.dtype, spec.row_shape)
        dtype = id_dtype(book.num_ids(node_type))
        add(f"global/{node_type}", bounds, dtype)
        if parts.has_global_ids:
            add(f"original/{node_type}", original_bounds(book.num_ids(node_type), book.num_parts), dtype)
    for edge_type, arrays in parts.schema.edge_data.items():
        bounds = [*book.ranges(edge_type)[:, 0].tolist(), book.num_ids(edge_type)]
        for name, spec in arrays.items():
            add(edge_table(edge_type, name), bounds, spec.dtype, spec.row_shape)
    return specs


def part_rows(parts: Parts, index: int) -> dict[str, Tensor]:
    """The rows that one part has of every table, mapped."""
    part = parts.part(index)
    rows: dict[str, Tensor] = {}
    for node_type, arrays in part.node_data.items():
        rows |= {node_table(node_type, name): values for name, values in arrays.items()}
        rows[f"global/{node_type}"] = part.original_ids(node_type)[: part.num_core(node_type)]
        if parts.has_global_ids:
            rows[f"original/{node_type}"] = part.global_of_original(node_type)
    for edge_type, arrays in part.edge_data.items():
        num_own = len(parts.book.part_range(index, edge_type))
        rows |= {edge_table(edge_type, name): values[:num_own] for name, values in arrays.items()}
    return rows
