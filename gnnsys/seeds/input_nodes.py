"""What a user may write for `input_nodes`, and which seeds that means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import (
    EdgeType,
    Graph,
    GraphIds,
    IdsLike,
    NodeType,
    as_ids,
    check_numbering,
    chosen_ids,
    did_you_mean,
    numbered_ids,
    some,
)
from gnnsys.sampling import DistGraph, count_true, mask_column
from gnnsys.seeds.leftover import InputIds
from gnnsys.seeds.shares import Share
from gnnsys.store import read_rows

_OfOneType: TypeAlias = "Share | GraphIds | IdsLike | str | None"
InputNodes: TypeAlias = "_OfOneType | tuple[NodeType, GraphIds | IdsLike | str | None] | Mapping[NodeType, _OfOneType]"

_PIECE = 1 << 20  # rows of a mask that are read together


def resolve_nodes(graph: Graph | DistGraph, input_nodes: InputNodes) -> tuple[NodeType, Any]:
    """The node type and the ids that `input_nodes` stands for; ValueError where there are none.

    Ids are an int64 tensor on the host, or of a share whatever it holds: something with a length that a tensor indexes.
    """
    if isinstance(input_nodes, Share):
        return _from_share(graph, input_nodes)
    node_type, chosen = _split_type(graph, input_nodes)
    num_nodes = graph.num_nodes(node_type)
    if chosen is None or isinstance(chosen, str):
        check_alone(graph, node_type, chosen)
    if isinstance(chosen, str):
        chosen = read_mask(graph, node_type, chosen)
    elif chosen is None:
        chosen = range(num_nodes)
    else:
        chosen = numbered_ids(graph, chosen, node_type, "input_nodes")
    nodes = chosen_ids(chosen, num_nodes, "input_nodes").long().cpu()
    if nodes.numel() == 0:
        raise ValueError(f"input_nodes is empty: no seeds of node type {node_type!r}")
    return node_type, nodes


class SeedsByType:
    """Seeds of several node types, numbered one type after the other, as they were given."""

    def __init__(self, graph: Graph | DistGraph, given: Mapping[NodeType, Any]) -> None:
        if not given:
            raise ValueError("input_nodes is empty: no node types")
        for node_type in given:
            if node_type not in graph.node_types:
                known = graph.node_types
                raise ValueError(
                    f"input_nodes: there is no node type {node_type!r}, only {some(known, near=node_type)}"
                    f"{did_you_mean(node_type, known)}"
                )
        self.ids = {t: InputIds(_of_type(graph, t, nodes)) for t, nodes in given.items()}
        shares = [nodes for nodes in given.values() if isinstance(nodes, Share)]
        if shares and len(shares) != len(given):
            raise ValueError(
                "input_nodes: seeds of some types are a share and others are not: gnnsys.split all of them"
            )
        self.largest = sum(share.largest for share in shares) if shares else None

    def __len__(self) -> int:
        return sum(map(len, self.ids.values()))

    def by_type(self, chosen: Tensor) -> dict[NodeType, Tensor]:
        """Of chosen inputs, those of each type, numbered within it, in their order."""
        found, first = {}, 0
        for node_type, ids in self.ids.items():
            own = chosen[(chosen >= first) & (chosen < first + len(ids))]
            found[node_type] = own - first
            first += len(ids)
        return found


def _of_type(graph: Graph | DistGraph, node_type: NodeType, given: Any) -> Any:
    if isinstance(given, Share) and given.type != node_type:
        raise ValueError(f"input_nodes: the seeds given for {node_type!r} are a share of {given.type!r}")
    return resolve_nodes(graph, given if isinstance(given, Share) else (node_type, given))[1]


def check_share(graph: Graph | DistGraph, share: Share, name: str) -> None:
    """ValueError for a share of another graph's ids. A class of the user's own need not say whose ids it has."""
    check_numbering(graph, getattr(share, "numbering", graph.numbering), name)


def check_alone(graph: Graph | DistGraph, key: NodeType | EdgeType, mask: str | None) -> None:
    """ValueError where a graph in parts has several ranks: each would go through all of `mask`, or of everything."""
    placement = getattr(graph, "placement", None)
    if placement is None or placement.world_size == 1:
        return
    kind = "nodes" if isinstance(key, str) else "edges"
    what = f"all {kind} of {key!r}" if mask is None else f"all {kind} of {key!r} in {mask!r}"
    name = "None" if mask is None else f'"{mask.removesuffix("_mask")}"'
    of_type = "" if isinstance(key, str) and len(graph.node_types) == 1 else f", type={key!r}"
    raise ValueError(
        f"with {placement.world_size} ranks, every rank would go through {what}: write "
        f"gnnsys.split(graph, {name}{of_type}) for this rank's share, or give every rank graph.from_original(ids)"
    )


def read_mask(graph: Graph | DistGraph, node_type: NodeType, name: str) -> Tensor:
    """The mask `name` (or `name`_mask) of a node type, bool [num_nodes]; it may be spread over machines.

    Integers that are all 0 or 1 are a mask as well, as for `gnnsys.split`.
    """
    arrays = graph.node_data[node_type]
    found = _mask_called(arrays, name)
    if found is None:
        masks = [n for n in arrays if arrays[n].dtype == torch.bool]
        raise ValueError(
            f"input_nodes: nodes of type {node_type!r} have no mask {name!r}, only "
            f"{some(masks, near=name)}{did_you_mean(name, masks)}"
        )
    rows = arrays[found]
    label = f"input_nodes: {found!r} of {node_type!r}"
    mask_column(torch.empty(rows.shape, dtype=rows.dtype, device="meta"), None, label)  # before anything is read
    if isinstance(rows, Tensor):
        return _as_bools(rows, label)
    num_nodes = graph.num_nodes(node_type)
    ends = range(0, num_nodes, _PIECE)
    numbers = (torch.arange(first, min(first + _PIECE, num_nodes), device="cpu") for first in ends)
    pieces = [read_rows([(rows, ids)])[0] for ids in numbers]
    mask = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.bool, device="cpu")
    return _as_bools(mask, label)


def _as_bools(mask: Tensor, label: str) -> Tensor:
    count_true(mask, [0, mask.numel()], label)  # refuses integers that are not 0 or 1
    return mask.bool()


def _mask_called(arrays: Mapping[str, Any], name: str) -> str | None:
    """The mask that a user means by `name`: called so, or with `_mask` behind it, of bools where one of them is."""
    there = [n for n in (name, f"{name}_mask") if n in arrays]
    bools = [n for n in there if arrays[n].dtype == torch.bool]
    return next(iter(bools or reversed(there)), None)


def type_with_mask(graph: Graph | DistGraph, name: str) -> NodeType:
    """The only node type that has the mask; ValueError that says what to write where there is another number."""
    found = {t: _mask_called(graph.node_data[t], name) for t in graph.node_types}
    having = [t for t, n in found.items() if n is not None and not graph.node_data[t][n].dtype.is_floating_point]
    if len(having) == 1:
        return having[0]
    types = graph.node_types
    if having:
        raise ValueError(
            f"input_nodes={name!r}: {some(having)} have that mask: write input_nodes=({having[0]!r}, {name!r})"
        )
    raise ValueError(
        f"input_nodes: there is no node type {name!r}, and none with a mask of that name; node types are "
        f"{some(types, near=name)}{did_you_mean(name, types)}. Write a node type, or (node type, ids or a mask's name)"
    )


def _split_type(graph: Graph | DistGraph, input_nodes: Any) -> tuple[NodeType, Any]:
    if isinstance(input_nodes, tuple) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        return input_nodes
    if isinstance(input_nodes, GraphIds):
        return check_node_ids(graph, input_nodes), input_nodes
    if isinstance(input_nodes, str) and input_nodes in graph.node_types:
        return input_nodes, None
    if isinstance(input_nodes, str) and len(graph.node_types) != 1:
        return type_with_mask(graph, input_nodes), input_nodes
    if len(graph.node_types) != 1:
        raise ValueError(
            f"input_nodes must name a node type, as a name or (name, ids), one of {some(graph.node_types)}"
        )
    return graph.node_types[0], input_nodes


def check_node_ids(graph: Graph | DistGraph, given: GraphIds, name: str = "input_nodes") -> NodeType:
    """The node type of ids that carry one; ValueError for edges and links."""
    if given.type not in graph.node_types:
        raise ValueError(
            f"{name} must be ids of nodes, got {given!r}; the graph's node types are {some(graph.node_types)}"
        )
    assert isinstance(given.type, str)
    return given.type


def _from_share(graph: Graph | DistGraph, share: Share) -> tuple[NodeType, Any]:
    check_share(graph, share, "input_nodes")
    if share.type not in graph.node_types:
        raise ValueError(
            f"input_nodes are seeds of {share.type!r}, the graph's node types are {some(graph.node_types)}"
        )
    if share.largest == 0:
        raise ValueError(f"input_nodes is empty on every rank: no seeds of node type {share.type!r}")
    if isinstance(share.ids, (Tensor, np.ndarray, list, tuple, range)):
        return share.type, as_ids(share.ids, graph.num_nodes(share.type), "input_nodes").long().cpu()
    return share.type, share.ids
