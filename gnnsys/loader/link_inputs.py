"""What a user gives for negatives and labels of links, checked and read where it lives, and the seeder made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, did_you_mean, is_source, some
from gnnsys.loader.link_seeds import NODE_TYPE_AT, LinkSeeder
from gnnsys.loader.links import EdgeInputs, LinkReader, Links, check_link_weights
from gnnsys.loader.negative_kinds import LinkEnd
from gnnsys.loader.negatives import NegativeSampling
from gnnsys.sampling import AnyGraph
from gnnsys.store import DistTensor, as_source, read_rows


def make_seeder(
    graph: AnyGraph,
    edge_type: EdgeType,
    negatives: NegativeSampling | None,
    disjoint: bool,
    time_attr: str | None,
    num_links: int | None = None,
    has_edge_ids: bool = False,
) -> LinkSeeder:
    """The seeder of a graph's links; negatives of temporal links need the times of all their nodes.

    `has_edge_ids`: whether links are edges of the graph, so that candidates may be rows of edges.
    """
    names = None if isinstance(graph, Graph) else graph
    if negatives is None:
        return LinkSeeder(edge_type, None, disjoint, {}, names)
    kind, drawn = negatives.kind, negatives.drawn_ends
    weights = {
        end: _weights(graph, edge_type[NODE_TYPE_AT[end]], getattr(negatives, f"{end}_weight"), f"{end}_weight")
        for end in drawn
    }
    ends = {}
    for end in drawn:
        node_type = edge_type[NODE_TYPE_AT[end]]
        if graph.num_nodes(node_type) == 0:
            raise ValueError(f"neg_sampling: there are no nodes of type {node_type!r} to draw negatives from")
        rows = graph.node_data[node_type].get(time_attr) if time_attr else None
        if rows is not None and not kind.takes_times:
            raise ValueError(
                f"neg_sampling: {kind!r} does not know that nodes of type {node_type!r} have times, {time_attr!r}: use "
                "'uniform' or 'joint'"
            )
        time = None if rows is None else _by_original(graph, node_type, rows)
        ends[end] = LinkEnd(graph, edge_type, node_type, end, weights[end], time)
    negatives = replace(negatives, src_weight=weights.get("src"), dst_weight=weights.get("dst"))
    drawers = {end: kind.prepare(of) for end, of in ends.items()}
    candidates = _candidates(graph, edge_type, kind.reads, num_links, has_edge_ids)
    return LinkSeeder(edge_type, negatives, disjoint, drawers, names, candidates)


def _candidates(graph: AnyGraph, edge_type: EdgeType, given: Any, num_links: int | None, has_edge_ids: bool) -> Any:
    """Rows of candidates, by link or by edge; ValueError for what is none."""
    if given is None:
        return None
    if isinstance(given, str):
        rows = graph.edge_data[edge_type].get(given)
        if rows is None:
            known = graph.edge_data[edge_type]
            raise ValueError(
                f"HardNegatives: edges {edge_type!r} have no array {given!r}, only "
                f"{some(known, near=given)}{did_you_mean(given, known)}"
            )
        if not has_edge_ids:
            raise ValueError(
                f"HardNegatives: {given!r} is by edge, and links were given by their ends: give an edge type or "
                "gnnsys.split of it as edge_label_index, or candidates [num_links, k]"
            )
        rows = rows.cpu() if isinstance(rows, Tensor) else rows
        candidates: Any = as_source(rows)
        shape, dtype = rows.shape, rows.dtype
    else:
        candidates = torch.as_tensor(given, device="cpu")
        shape, dtype = candidates.shape, candidates.dtype
        if num_links is not None and shape[:1] != (num_links,):
            raise ValueError(f"HardNegatives: candidates must have a row per link, {num_links}, got {list(shape)}")
    if len(shape) != 2 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"HardNegatives: candidates must be integers [num_links, k], got {list(shape)} {dtype}")
    return candidates


def _weights(graph: AnyGraph, node_type: NodeType, given: Any, name: str) -> Tensor | None:
    """The weights of all nodes of a type, in the order of the user's own ids; named ones are read where they live."""
    if given is None:
        return None
    if isinstance(given, str):
        arrays = graph.node_data[node_type]
        if given not in arrays:
            raise ValueError(
                f"neg_sampling: {name}: nodes of type {node_type!r} have no array {given!r}, only "
                f"{some(arrays, near=given)}{did_you_mean(given, arrays)}"
            )
        weight = _by_original(graph, node_type, arrays[given])
    elif is_source(given):
        if not isinstance(graph, Graph) and not isinstance(given, DistTensor):
            raise ValueError(
                f"neg_sampling: {name}: rows of a source are ambiguous on parts: give a tensor with an entry per node "
                "by your own ids, or the name of an array of the graph"
            )
        weight = _by_original(graph, node_type, given)
    else:
        weight = torch.as_tensor(given, device="cpu")
    return weight.reshape(-1) if weight.dim() == 2 and weight.shape[1] == 1 else weight


def _by_original(graph: AnyGraph, node_type: NodeType, rows: Any) -> Tensor:
    """Rows of all nodes in the order of the user's own ids."""
    if isinstance(graph, Graph) and isinstance(rows, Tensor):
        return rows
    num_nodes = graph.num_nodes(node_type)
    if rows.shape[0] != num_nodes:
        raise ValueError(f"neg_sampling: rows of {node_type!r} must be {num_nodes}, one per node, got {rows.shape[0]}")
    ids = torch.arange(num_nodes, device="cpu")
    return read_rows([(rows, ids if isinstance(graph, Graph) else graph.global_ids(ids, node_type))])[0]


def give_weights(graph: AnyGraph, edge_type: EdgeType, links: LinkReader, num_links: int, given: Any) -> Tensor | None:
    """Weighs the links: one number each, or an array of their edges by its name. Numbers of links are returned.

    ValueError for what are no weights, and for an array of edges where links are none.
    """
    if given is None:
        return None
    assert isinstance(links, Links | EdgeInputs)
    if not isinstance(given, str):
        weight = _one_each(torch.as_tensor(given, device="cpu"), num_links, "edge_label_weight")
        links.weight = check_link_weights(weight, "edge_label_weight")
        return links.weight
    arrays = graph.edge_data[edge_type]
    if given not in arrays:
        raise ValueError(
            f"edge_label_weight: edges {edge_type!r} have no array {given!r}, only "
            f"{some(arrays, near=given)}{did_you_mean(given, arrays)}"
        )
    if not links.has_edge_ids:
        raise ValueError(
            f"edge_label_weight: {given!r} is by edge, and links were given by their ends: give an edge type or "
            "gnnsys.split of it as edge_label_index, or one weight per link"
        )
    rows = arrays[given].cpu() if isinstance(arrays[given], Tensor) else arrays[given]
    what = f"edge_label_weight: {given!r}"
    weight = _one_each(rows, graph.num_edges(edge_type), what)
    if isinstance(links, Links):  # the i-th link is the i-th edge
        weight = weight if isinstance(weight, Tensor) else read_rows([(weight, links.input_id)])[0].reshape(-1)
        links.weight = check_link_weights(weight, what)
    else:
        links.edge_weight, links.edge_weight_name = weight, given  # checked batch by batch: other edges are not read
    return None


def _one_each(rows: Any, number: int, what: str) -> Any:
    """The same rows; ValueError where they are not `number` floating point numbers."""
    shape = list(rows.shape)
    if shape == [number, 1] and isinstance(rows, Tensor):
        rows = rows.reshape(-1)
    elif shape not in ([number], [number, 1]):
        raise ValueError(f"{what} must have one entry per link, {number}, got {shape}")
    if not rows.dtype.is_floating_point:
        raise ValueError(f"{what} must be floating point numbers, got {rows.dtype}")
    return rows


def check_labels(negatives: NegativeSampling | None, label: Any) -> Any:
    """The labels as loaders keep them: with drawn negatives 0 means negative, so classes that start at 0 move up."""
    if label is None or negatives is None:
        return label
    if negatives.is_triplet:
        raise ValueError(
            "edge_label must be None for triplet negative sampling: src_index, dst_pos_index and dst_neg_index of the "
            "batch tell positives from negatives"
        )
    return label + 1 if label.numel() and int(label.min()) == 0 else label
