"""Graphs in one `.npz` file of plain arrays: `edge_index` and whatever belongs to nodes or edges.

An array with a row per node is node data, one with a row per edge edge data, both under their own name; strings go to
`info`. Where there are as many nodes as edges, `weight`, `time` and names that start with `edge_` belong to edges, all
others to nodes. Some names mean more, see `load_npz`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.capacity import check_num_nodes, check_rows_fit
from gnnsys.graph.graph import Graph
from gnnsys.graph.names_in_errors import some
from gnnsys.graph.npy import load_npz_arrays
from gnnsys.graph.npz_checks import (
    Arrays,
    as_float32,
    check_csr,
    check_edge_index,
    check_edge_type,
    check_has_rows,
    check_kinds,
    check_mask,
    check_masks,
    check_once,
    check_types,
    count_in,
    edge_types_in,
    is_per_edge,
    mask_name,
    offsets_in,
    owner_of,
    take,
)
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType
from gnnsys.graph.user_ids import as_ids

_CSR_PARTS = ("data", "indices", "indptr", "shape")


@dataclass(frozen=True)
class Content:
    """What the arrays of an `.npz` mean. Rows per edge are left as they are: there may be too many to convert here."""

    edge_index: np.ndarray  # [2, E], ids of all node types in one numbering
    edge_types: list[EdgeType]
    edge_type: np.ndarray | None  # [E], None where there is one type
    first_node: dict[NodeType, int]
    num_nodes: dict[NodeType, int]
    node_data: dict[NodeType, dict[str, Tensor]]
    edge_rows: dict[str, np.ndarray]
    info: dict[str, Any]


def load_npz(path: Path) -> Graph:
    """Reads a graph from one `.npz`.

    `edge_index` [2, E]; `num_nodes`, by default the rows of `x` or `y`, or the largest id + 1. Sparse rows may be given
    in CSR form as `x_data, x_indices, x_indptr, x_shape` and become dense float32. `y` becomes int64, `train_idx` a
    `train_mask`, `train_masks` [splits, N] a `train_mask` [N, splits].

    With `edge_type` and `edge_type_names` ("src|relation|dst") the graph is typed. Nodes of several types share one
    numbering, type t holding `node_type_offsets[t]:node_type_offsets[t+1]` (`node_type_names`). Rows of a type end in
    its name: `x_<type>`, `year_<type>`, `train_idx_<type>` become its `x`, `year` and `train_mask`; what has a row per
    node and names no type belongs to `target_type` (default: the first). A name that begins with another type's is
    refused, and so is one that ends in another type's where the rows may be the target's: whose they are is not to be
    guessed. Two underscores before the type, `year__<type>`, say it without doubt. So are two arrays that would be one.
    """
    arrays = load_npz_arrays(path)
    try:
        return _build(describe(arrays))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def describe(arrays: Arrays, dense: Callable[..., Tensor] | None = None, folder: Path | None = None) -> Content:
    """Sorts the arrays of an `.npz` into nodes, edges and the rest.

    `dense` makes rows of features in CSR form; `folder` is where the graph will be, if not in memory.
    """
    if "edge_index" not in arrays:
        raise ValueError(f"has no edge_index, it holds {some(sorted(arrays))}")
    check_kinds(arrays)
    edge_index = arrays.pop("edge_index")
    check_edge_index(edge_index)
    sort = _typed if "edge_type_names" in arrays else _homogeneous
    return sort(edge_index, arrays, dense or _dense, folder)


def _homogeneous(edge_index: np.ndarray, arrays: Arrays, dense: Callable[..., Tensor], folder: Path | None) -> Content:
    info = _take_info(arrays)
    rows = _take_features(arrays, dense)
    num_nodes = _take_num_nodes(arrays, rows, edge_index, folder)
    num_edges = edge_index.shape[1]
    per_edge = {
        name: array
        for name, array in arrays.items()
        if mask_name(name) is None and is_per_edge(name, array, num_nodes, num_edges)
    }
    check_once((NODE, name, name) for name in (*rows, *arrays) if name not in per_edge)
    node_data = _take_splits(arrays, num_nodes) | rows
    node_data |= {name: as_rows(name, array) for name, array in arrays.items() if name not in per_edge}
    return Content(edge_index, [EDGE], None, {NODE: 0}, {NODE: num_nodes}, {NODE: node_data}, per_edge, info)


def _typed(edge_index: np.ndarray, arrays: Arrays, dense: Callable[..., Tensor], folder: Path | None) -> Content:
    names = edge_types_in(arrays.pop("edge_type_names"))
    edge_type = take(arrays, "edge_type", "edge_type_names")
    check_edge_type(edge_type, edge_index.shape[1], len(names))
    offsets = _take_offsets(arrays, names, edge_index, folder)
    info = _take_info(arrays)
    arrays.pop("node_type", None)  # the offsets say the same
    num_nodes = {node_type: end - begin for node_type, (begin, end) in offsets.items()}
    target: Any = info.get("target_type", next(iter(offsets), None))
    check_types(names, list(offsets), target)

    node_data: dict[NodeType, dict[str, Tensor]] = {node_type: {} for node_type in offsets}
    names_of = []  # node type, name there, name in the file
    for name, features in _take_features(arrays, dense, list(offsets)).items():
        of_type = name.removeprefix("x_") if name != "x" else target
        node_data[of_type]["x"] = features
        names_of.append((of_type, "x", name))
    edge_rows: Arrays = {}
    own_arrays: dict[NodeType, Arrays] = {node_type: {} for node_type in offsets}
    for name, array in arrays.items():
        owner, own_name = owner_of(name, array, num_nodes, target, edge_type.size)
        if owner is None:
            edge_rows[name] = array
        else:
            own_arrays[owner][own_name] = array
            names_of.append((owner, own_name, name))
    check_once(names_of)
    for node_type, own in own_arrays.items():
        node_data[node_type] |= _take_splits(own, num_nodes[node_type])
        node_data[node_type] |= {name: as_rows(name, array) for name, array in own.items()}
    first_node = {node_type: begin for node_type, (begin, _) in offsets.items()}
    return Content(edge_index, names, edge_type, first_node, num_nodes, node_data, edge_rows, info)


def _build(content: Content) -> Graph:
    edge_index = torch.from_numpy(content.edge_index)
    rows = {name: as_rows(name, array) for name, array in content.edge_rows.items()}
    if content.edge_type is None:
        edge_type = content.edge_types[0]
        return Graph.from_edge_indices(
            {edge_type: edge_index}, content.num_nodes, content.node_data, {edge_type: rows}, content.info
        )
    edges: dict[EdgeType, Tensor] = {}
    edge_data: dict[EdgeType, dict[str, Tensor]] = {}
    num_chosen = 0
    for i, (src, relation, dst) in enumerate(content.edge_types):
        chosen = torch.from_numpy(np.flatnonzero(content.edge_type == i))
        first = torch.tensor([[content.first_node[src]], [content.first_node[dst]]], device="cpu")
        num_chosen += chosen.numel()
        edges[src, relation, dst] = edge_index[:, chosen].long() - first
        edge_data[src, relation, dst] = {name: array[chosen] for name, array in rows.items()}
    assert num_chosen == content.edge_type.size, "every edge has exactly one type"
    return Graph.from_edge_indices(edges, content.num_nodes, content.node_data, edge_data, content.info)


def _take_offsets(
    arrays: Arrays, names: list[EdgeType], edge_index: np.ndarray, folder: Path | None
) -> dict[NodeType, tuple[int, int]]:
    """The range of ids of each node type."""
    if "node_type_offsets" in arrays:
        offsets = offsets_in(arrays.pop("node_type_offsets"), take(arrays, "node_type_names", "node_type_offsets"))
        check_num_nodes(max((end for _, end in offsets.values()), default=0), folder=folder)
        return offsets
    types = sorted({end for src, _, dst in names for end in (src, dst)})
    if len(types) != 1:
        raise ValueError(f"node types {some(types)} need node_type_offsets and node_type_names")
    return {types[0]: (0, _take_num_nodes(arrays, {}, edge_index, folder))}


def _take_num_nodes(arrays: Arrays, rows: dict[str, Tensor], edge_index: np.ndarray, folder: Path | None) -> int:
    if "num_nodes" in arrays:
        num_nodes = count_in("num_nodes", arrays.pop("num_nodes"))
        check_num_nodes(num_nodes, folder=folder)
        return num_nodes
    if "x" in rows:
        return rows["x"].shape[0]
    if "y" in arrays:
        check_has_rows("y", arrays["y"])
        return arrays["y"].shape[0]
    if edge_index.size == 0:
        return 0
    num_nodes = int(edge_index.max()) + 1
    check_num_nodes(num_nodes, edge=int(edge_index.argmax()) % edge_index.shape[1], folder=folder)
    return num_nodes


def _take_info(arrays: Arrays) -> dict[str, Any]:
    return {name: arrays.pop(name).tolist() for name in list(arrays) if arrays[name].dtype.kind == "U"}


def _take_features(
    arrays: Arrays, dense: Callable[..., Tensor], node_types: list[NodeType] | None = None
) -> dict[str, Tensor]:
    """`x` and `x_<type>`, dense or in CSR form, as tensors."""
    features = {}
    for name in ["x", *(f"x_{node_type}" for node_type in node_types or [])]:
        if name in arrays:
            check_has_rows(name, arrays[name])
            features[name] = torch.from_numpy(arrays.pop(name))
        elif f"{name}_data" in arrays:
            features[name] = dense(*(take(arrays, f"{name}_{part}", f"{name}_data") for part in _CSR_PARTS))
    return features


def _dense(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: np.ndarray) -> Tensor:
    num_rows, num_columns = check_csr(data, indices, indptr, shape)
    check_rows_fit(num_rows, num_columns, "x")
    dense = torch.zeros(num_rows, num_columns, device="cpu")
    row = np.repeat(np.arange(num_rows), np.diff(indptr))
    dense[torch.from_numpy(row), torch.from_numpy(indices.astype(np.int64))] = as_float32("x_data", data)
    return dense


def _take_splits(arrays: Arrays, num_nodes: int) -> dict[str, Tensor]:
    """`train_idx` and `train_masks` as masks with a row per node."""
    splits = {}
    for name in list(arrays):
        check_mask(name, arrays[name])
        becomes = mask_name(name)
        if becomes is None:
            continue
        if name.partition("_")[2] == "masks":
            check_masks(name, arrays[name])
            splits[becomes] = torch.from_numpy(arrays.pop(name).T.copy())
        else:
            mask = torch.zeros(num_nodes, dtype=torch.bool, device="cpu")
            mask[as_ids(torch.from_numpy(arrays.pop(name)), num_nodes, name)] = True
            splits[becomes] = mask
    return splits


def as_rows(name: str, array: np.ndarray) -> Tensor:
    """Labels and relation numbers are kept small on disk; torch wants them as int64."""
    rows = torch.from_numpy(array)
    return rows.long() if name in ("y", "edge_type") and not rows.is_floating_point() else rows
