"""The immutable tables of a directory of parts: rows of nodes and edges, and the two ways between ids.

`node/TYPE/NAME` and `edge/SRC|RELATION|DST/NAME` have a row per global id. `global/TYPE` has the original id of every
global id; `original/TYPE`, indexed by original id, has the global id, and is sharded in equal ranges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import ambiguous_rows
from gnnsys.partition import Parts, id_dtype, original_bounds
from gnnsys.store import TableSpec, edge_table, node_table


class TablesByName(dict[str, Any]):
    """The arrays of one node or edge type of a graph in parts, such as `graph.node_data["node"]`.

    Tables and other sources of rows can be assigned. Tensors are refused: their rows may be in the order of original or
    of global ids, which `graph.set_node_data` and `graph.set_edge_data` ask for.
    """

    def __init__(self, tables: dict[str, Any], where: str, setter: str) -> None:
        super().__init__(tables)
        self._where, self._setter = where, setter

    def __setitem__(self, name: str, rows: Any) -> None:
        if isinstance(rows, Tensor):
            raise ambiguous_rows(f"{self._where}[{name!r}] (use graph.{self._setter})")
        super().__setitem__(name, rows)

    def put(self, name: str, rows: Any) -> None:
        """Sets rows that are known to be in the order of global ids."""
        super().__setitem__(name, rows)

    def update(self, *args: Any, **named: Any) -> None:
        for name, rows in dict(*args, **named).items():
            self[name] = rows

    def __ior__(self, other: Any) -> TablesByName:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, name: str, rows: Any = None) -> Any:
        if name not in self:
            self[name] = rows
        return self[name]


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
