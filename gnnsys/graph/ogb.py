"""OGB's node and link datasets (`ogbn-*`, `ogbl-*`), from the library-agnostic dictionaries that `ogb` documents.

A graph is {"edge_index", "edge_feat", "node_feat", "num_nodes", ...} of numpy arrays, or, as in ogbn-mag, the same with
`_dict` keys by type. Further `node_*` and `edge_*` entries become rows under the rest of their name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.graph import Graph
from gnnsys.graph.names_in_errors import some
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType
from gnnsys.graph.user_ids import as_ids

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_FEATURE_NAMES = {"node_feat": "x", "edge_feat": "edge_attr"}

Arrays = Mapping[Any, Any]


def from_ogb(dataset: Any, root: str = "dataset") -> Graph:
    """A loaded `NodePropPredDataset` or `LinkPropPredDataset`, or the name of one, kept or downloaded under `root`.

    Labels become `y` (int64 [num_nodes] for one task, -1 where OGB has none) and splits `train_mask`, `val_mask`
    and `test_mask`. Node ids are OGB's own, so that what `dataset.get_edge_split()` returns fits the graph as it is.
    """
    if isinstance(dataset, str):
        dataset = _open(dataset, root)
    item = dataset[0]
    graph, labels = item if isinstance(item, tuple) else (item, None)
    split = dataset.get_idx_split() if labels is not None else None
    info = {"source": "ogb", "name": str(getattr(dataset, "name", ""))}
    return from_ogb_dict(graph, labels, split, info)


def _open(name: str, root: str) -> Any:
    if not name.startswith(("ogbn-", "ogbl-")):
        raise ValueError(f"dataset must be an ogbn-* or ogbl-* name, got {name!r}")
    try:
        if name.startswith("ogbn-"):
            from ogb.nodeproppred import NodePropPredDataset as Dataset
        else:
            from ogb.linkproppred import LinkPropPredDataset as Dataset
    except ImportError as error:
        raise ImportError(f"{name} is read by the ogb package: pip install ogb") from error
    return Dataset(name=name, root=root)


def from_ogb_dict(
    graph: Arrays, labels: Any = None, split: Arrays | None = None, info: Mapping[str, Any] | None = None
) -> Graph:
    """OGB's graph dictionary with its labels and split, each by type where the graph is typed."""
    num_nodes: dict[NodeType, int]
    if "edge_index_dict" in graph:
        num_nodes = {node_type: int(count) for node_type, count in graph["num_nodes_dict"].items()}
        edge_index = {edge_type: _tensor(edges) for edge_type, edges in graph["edge_index_dict"].items()}
        labels, split = labels or {}, split or {}
    elif "edge_index" in graph:
        num_nodes = {NODE: int(graph["num_nodes"])}
        edge_index = {EDGE: _tensor(graph["edge_index"])}
        labels = {} if labels is None else {NODE: labels}
        split = {part: {NODE: ids} for part, ids in (split or {}).items()}
    else:
        raise ValueError(f"graph must have 'edge_index' or 'edge_index_dict', got {some(sorted(map(str, graph)))}")

    node_data: dict[NodeType, dict[str, Tensor]] = {node_type: {} for node_type in num_nodes}
    edge_data: dict[EdgeType, dict[str, Tensor]] = {edge_type: {} for edge_type in edge_index}
    for key, value in graph.items():
        name = key.removesuffix("_dict")
        if value is None or name in ("edge_index", "num_nodes"):
            continue
        if not name.startswith(("node_", "edge_")):
            raise ValueError(f"graph[{key!r}] is neither node_* nor edge_*: remove it or add it to the Graph by hand")
        rows_by_type = value if isinstance(value, Mapping) else {NODE if name.startswith("node_") else EDGE: value}
        target: dict[Any, dict[str, Tensor]] = node_data if name.startswith("node_") else edge_data
        for type_, rows in rows_by_type.items():
            if rows is not None:
                _of_type(target, type_, key)[_FEATURE_NAMES.get(name, name[5:])] = _rows(rows)
    for node_type, rows in labels.items():
        _of_type(node_data, node_type, "labels")["y"] = _labels(rows)
    for part, ids_by_type in split.items():
        for node_type, ids in ids_by_type.items():
            rows = _of_type(node_data, node_type, "split")
            mask = torch.zeros(num_nodes[node_type], dtype=torch.bool, device="cpu")
            mask[as_ids(_tensor(ids), num_nodes[node_type], f"split[{part!r}]")] = True
            rows[_MASKS.get(part, f"{part}_mask")] = mask
    return Graph.from_edge_indices(edge_index, num_nodes, node_data, edge_data, info)


def _of_type(data: dict[Any, dict[str, Tensor]], type_: Any, what: str) -> dict[str, Tensor]:
    if type_ not in data:
        raise ValueError(f"{what} names type {type_!r}, the graph has {some(data, near=type_)}")
    return data[type_]


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def _rows(values: Any) -> Tensor:
    """One column of numbers per node (a year, a relation) is one number per node."""
    rows = _tensor(values)
    return rows.view(-1) if rows.dim() == 2 and rows.shape[1] == 1 and not rows.is_floating_point() else rows


def _labels(values: Any) -> Tensor:
    """[num_nodes, 1] -> int64 [num_nodes] with -1 for NaN; several tasks stay as they are."""
    labels = _tensor(values)
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.view(-1)
    if labels.dim() == 1:
        return labels.nan_to_num(-1).long() if labels.is_floating_point() else labels.long()
    return labels
