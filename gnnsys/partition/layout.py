"""What a directory of parts is made of: the schema, and the one description of it that its manifest holds.

DIR/manifest.json     the whole description; every machine has it
DIR/part-0003/*.npy   the arrays of part 3; only its machine needs them
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import PARTS_FORMAT, EdgeType, Graph, NodeType, check_target, dtype_name, dtype_named

FORMAT, VERSION, WHAT = PARTS_FORMAT, 1, "a directory of parts"


class Malformed(Exception):
    """A manifest describes what cannot be. Whoever reads it says which one: a ValueError for the user."""


def check_parts_target(out: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Where parts written to `out` end up, past symbolic links; ValueError for what must not be overwritten."""
    return check_target(out, overwrite=overwrite, format=FORMAT, what=WHAT)


def part_folder(part: int) -> str:
    return f"part-{part:04d}"


def original_bounds(num_nodes: int, num_parts: int) -> list[int]:
    """Which original ids' global ids each part stores: equal ranges, part p has [bounds[p], bounds[p + 1])."""
    return [num_nodes * part // num_parts for part in range(num_parts + 1)]


@dataclass(frozen=True)
class ArraySpec:
    """What a row of a named array is."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor) -> ArraySpec:
        return cls(rows.dtype, tuple(rows.shape[1:]))

    def to_json(self) -> dict[str, Any]:
        return {"dtype": dtype_name(self.dtype), "row_shape": list(self.row_shape)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ArraySpec:
        return cls(_dtype(values["dtype"]), tuple(int(size) for size in values["row_shape"]))


@dataclass(frozen=True)
class Schema:
    """Types and named arrays of the graph that was parted.

    `index_dtype` and `edge_id_dtype` (None: edges were numbered by position) are those of the source's CSC, which
    `Parts.merge` restores; parts themselves have int32 indices.
    """

    node_data: Mapping[NodeType, Mapping[str, ArraySpec]]
    edge_data: Mapping[EdgeType, Mapping[str, ArraySpec]]
    index_dtype: Mapping[EdgeType, torch.dtype]
    edge_id_dtype: Mapping[EdgeType, torch.dtype | None]

    @property
    def node_types(self) -> list[NodeType]:
        return list(self.node_data)

    @property
    def edge_types(self) -> list[EdgeType]:
        return list(self.edge_data)

    @classmethod
    def of(cls, graph: Graph) -> Schema:
        cscs = {edge_type: graph.csc(edge_type) for edge_type in graph.edge_types}
        return cls(
            {t: {name: ArraySpec.of(rows) for name, rows in graph.node_data[t].items()} for t in graph.node_types},
            {t: {name: ArraySpec.of(rows) for name, rows in graph.edge_data[t].items()} for t in graph.edge_types},
            {edge_type: csc.indices.dtype for edge_type, csc in cscs.items()},
            {t: None if csc.edge_ids is None else csc.edge_ids.dtype for t, csc in cscs.items()},
        )

    def to_json(self) -> dict[str, Any]:
        edges = []
        for edge_type, arrays in self.edge_data.items():
            ids = self.edge_id_dtype[edge_type]
            edges.append(
                {
                    "type": list(edge_type),
                    "data": {name: spec.to_json() for name, spec in arrays.items()},
                    "index_dtype": dtype_name(self.index_dtype[edge_type]),
                    "edge_id_dtype": None if ids is None else dtype_name(ids),
                }
            )
        nodes = [
            {"type": node_type, "data": {name: spec.to_json() for name, spec in arrays.items()}}
            for node_type, arrays in self.node_data.items()
        ]
        return {"nodes": nodes, "edges": edges}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Schema:
        nodes = {str(entry["type"]): _arrays(entry["data"]) for entry in values["nodes"]}
        edges, index_dtype, edge_id_dtype = {}, {}, {}
        for entry in values["edges"]:
            src, relation, dst = entry["type"]
            if src not in nodes or dst not in nodes:
                raise ValueError(f"edge type {entry['type']} names a node type that is not there")
            edge_type = (str(src), str(relation), str(dst))
            edges[edge_type] = _arrays(entry["data"])
            index_dtype[edge_type] = _dtype(entry["index_dtype"])
            edge_id_dtype[edge_type] = None if entry["edge_id_dtype"] is None else _dtype(entry["edge_id_dtype"])
        return cls(nodes, edges, index_dtype, edge_id_dtype)


def _arrays(values: Mapping[str, Any]) -> dict[str, ArraySpec]:
    return {name: ArraySpec.from_json(spec) for name, spec in values.items()}


def _dtype(name: Any) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
