"""A graph as one block of memory and a description of it in plain JSON, for processes that share it.

`pack_plan` says which arrays a graph has and where each begins in the block; `unpack` makes the graph of the pieces of
a block that was filled so. Nothing is checked again and nothing is copied: whoever packed it had a `Graph`, which was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph.arrays import dtype_name, dtype_named
from gnnsys.graph.graph import Graph
from gnnsys.graph.schema import EdgeType, NodeType
from gnnsys.ops import CSC

Take: TypeAlias = Callable[[int, int], Tensor]  # of a block: uint8 from an offset on, so many
ALIGNMENT = 512  # bytes, as torch's allocator on a device


@dataclass(frozen=True)
class PackPlan:
    """`description` is plain JSON; `tensors[i]` belongs at byte `offsets[i]` of a block of `num_bytes`."""

    description: dict[str, Any]
    tensors: list[Tensor]
    offsets: list[int]
    num_bytes: int

    def fill(self, take: Take) -> None:
        """Copies every array to its place in a block, of which `take(offset, num_bytes)` is a piece."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            if tensor.nbytes:
                take(offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


class _PackedArrays:
    """Gives every array a number and a place."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []
        self.entries: list[dict[str, Any]] = []
        self.end = 0

    def add(self, tensor: Any, what: str) -> int | None:
        if tensor is None:
            return None
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ValueError(f"a graph that is shared is made of dense tensors, and {what} is {_sort(tensor)}")
        tensor = tensor.detach()
        self.tensors.append(tensor)
        self.offsets.append(self.end)
        self.entries.append({"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "offset": self.end})
        self.end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return len(self.tensors) - 1


def pack_plan(graph: Graph | Mapping[str, Tensor]) -> PackPlan:
    """Of a graph whose rows are all tensors, or of tensors by name. ValueError where there is something else."""
    arrays = _PackedArrays()
    if not isinstance(graph, Graph):
        described: dict[str, Any] = {"tensors": {name: arrays.add(tensor, name) for name, tensor in graph.items()}}
    else:
        graph.check_in_memory("sharing a graph")
        described = {
            "info": graph.info,
            "nodes": [
                {
                    "type": node_type,
                    "num_nodes": graph.num_nodes(node_type),
                    "data": {name: arrays.add(rows, name) for name, rows in graph.node_data[node_type].items()},
                }
                for node_type in graph.node_types
            ],
            "edges": [
                {
                    "type": list(edge_type),
                    "num_src": graph.csc(edge_type).num_src,
                    "structure": [arrays.add(tensor, "structure") for tensor in _structure(graph.csc(edge_type))],
                    "data": {name: arrays.add(rows, name) for name, rows in graph.edge_data[edge_type].items()},
                }
                for edge_type in graph.edge_types
            ],
        }
    return PackPlan({**described, "arrays": arrays.entries}, arrays.tensors, arrays.offsets, arrays.end)


def unpack(description: Mapping[str, Any], take: Take, device: torch.device | str = "cpu") -> Graph | dict[str, Tensor]:
    """The graph, or the tensors by name, of a block on `device`, of which `take(offset, num_bytes)` is a piece."""
    tensors = [_array(take, entry, device) for entry in description["arrays"]]
    if "tensors" in description:
        return {name: tensors[number] for name, number in description["tensors"].items()}
    num_nodes: dict[NodeType, int] = {}
    node_data: dict[NodeType, dict[str, Tensor]] = {}
    csc: dict[EdgeType, CSC] = {}
    edge_data: dict[EdgeType, dict[str, Tensor]] = {}
    for entry in description["nodes"]:
        num_nodes[entry["type"]] = entry["num_nodes"]
        node_data[entry["type"]] = {name: tensors[number] for name, number in entry["data"].items()}
    for entry in description["edges"]:
        src, relation, dst = entry["type"]
        indptr, indices, edge_ids = (None if number is None else tensors[number] for number in entry["structure"])
        assert indptr is not None and indices is not None
        csc[src, relation, dst] = CSC(indptr, indices, entry["num_src"], edge_ids)
        edge_data[src, relation, dst] = {name: tensors[number] for name, number in entry["data"].items()}
    return Graph._of_checked(num_nodes, csc, node_data, edge_data, description["info"])


def _structure(csc: CSC) -> tuple[Tensor, Tensor, Tensor | None]:
    return csc.indptr, csc.indices, csc.edge_ids


def _sort(value: object) -> str:
    return f"a {value.layout} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _array(take: Take, entry: Mapping[str, Any], device: torch.device | str) -> Tensor:
    dtype, shape = dtype_named(entry["dtype"]), entry["shape"]
    if dtype is None:
        raise ValueError(f"this version of torch has no dtype {entry['dtype']!r}, which a shared graph was packed with")
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return take(entry["offset"], num_bytes).view(dtype).view(shape)
