"""Room on the device for a loader's batches, set aside before parts, caches and copies take theirs.

Batches are small beside a device and come last, when everything else has taken its share of what was left. What they
will take follows from fanouts, seeds and widths of rows, so it is promised (`MemoryBudget`) when a loader is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader.fetch import Names
from gnnsys.ops import workspace_bytes
from gnnsys.sampling import AnyGraph, reverse_of
from gnnsys.store import MemoryBudget, MemoryPromise

NumNeighbors: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]]
_NODE_BYTES = 8  # of its id
_EDGE_BYTES = 24  # of its ends and its id
_THREADS = 2  # of a loader that chooses their number itself
_FOR_GROUPS = 0.25  # of what is left
_IN_USE = 2  # batches: one that is trained on, and one whose work is queued still


def sampled_sizes(
    graph: AnyGraph, num_neighbors: NumNeighbors, seeds: Mapping[NodeType, int], *,
    disjoint: bool = False, subgraph_type: str = "directional", expand: str = "new",
) -> tuple[dict[NodeType, int], dict[EdgeType, int]]:  # fmt: skip
    """The most nodes and edges that a sample around so many seeds has, as a NeighborLoader with these options draws it.

    Two are estimates, from what nodes have on average: where all neighbours are taken (-1), and the edges of an
    "induced" subgraph, which are those that its nodes have in the graph.

    >>> from gnnsys.graph import sbm
    >>> sampled_sizes(sbm(1000), [3, 2], {"node": 10})
    ({'node': 100}, {('node', 'to', 'node'): 90})
    >>> sampled_sizes(sbm(1000), [3, 2], {"node": 10}, subgraph_type="bidirectional")
    ({'node': 100}, {('node', 'to', 'node'): 180})
    """
    per_type = _by_type(graph, num_neighbors)
    trees = sum(seeds.values()) if disjoint else 1  # each has its own nodes
    most = {t: trees * max(graph.num_nodes(t), seeds.get(t, 0)) for t in graph.node_types}
    nodes = dict.fromkeys(graph.node_types, 0) | dict(seeds)
    edges, frontier = dict.fromkeys(per_type, 0), dict(nodes)
    for hop in range(max((len(of) for of in per_type.values()), default=0)):
        found = dict.fromkeys(graph.node_types, 0)
        for edge_type, fanouts in per_type.items():
            src, _, dst = edge_type
            if hop >= len(fanouts):
                continue
            drawn = frontier[dst] * (fanouts[hop] if fanouts[hop] >= 0 else _mean_degree(graph, edge_type))
            edges[edge_type] += drawn
            found[src] += drawn
        new = {t: min(count, most[t]) for t, count in found.items()}
        nodes = {t: min(nodes[t] + new[t], most[t]) for t in nodes}
        frontier = dict(nodes) if expand == "frontier" else new
    if subgraph_type == "bidirectional":
        reverses = {t: reverse_of(t, graph) for t in edges if not t[1].startswith("rev_")}
        for edge_type, reverse in reverses.items():
            if reverse is not None:
                edges[edge_type] = edges[reverse] = edges[edge_type] + edges.get(reverse, 0)
    elif subgraph_type == "induced":
        edges = {t: nodes[t[2]] * _mean_degree(graph, t) for t in graph.edge_types}
    return nodes, edges


def batch_bytes(
    graph: AnyGraph, num_neighbors: NumNeighbors, seeds: Mapping[NodeType, int], names: Names | None, **options: Any
) -> tuple[int, int]:
    """What a batch takes on a device, at most: itself, and while it is sampled. `options` are `sampled_sizes`'s."""
    nodes, edges = sampled_sizes(graph, num_neighbors, seeds, **options)
    of_node = _NODE_BYTES * (2 if options.get("disjoint") else 1)  # its tree's number, too
    num_bytes = sum(count * (of_node + _row_bytes(graph, t, names)) for t, count in nodes.items())
    num_bytes += sum(count * (_EDGE_BYTES + _row_bytes(graph, t, names)) for t, count in edges.items())
    number = {t: i for i, t in enumerate(graph.node_types)}
    ends = [number[end] for src, _, dst in graph.edge_types for end in (src, dst)]
    starts = [seeds.get(t, 0) for t in graph.node_types]
    return num_bytes, _sampling_bytes(ends, starts, sum(edges.values()))


def _sampling_bytes(ends: Sequence[int], seeds: Sequence[int], num_edges: int) -> int:
    """What a device takes while it samples so many edges; `ends` are the numbers of node types, two per edge type."""
    ids, num_relations = torch.empty(0, dtype=torch.int64, device="meta"), len(ends) // 2
    starts = [torch.empty(count, dtype=torch.int64, device="meta") for count in seeds]
    structure = (None, [ids] * num_relations, [0] * num_relations, None, None, None, None, ends, [0] * len(seeds))
    fanouts = [num_edges] * num_relations  # one hop of all edges: those of several are freed with it, too
    arguments = (*structure, starts, fanouts, None, False, False, None)
    return workspace_bytes("sample_hops", *arguments, device="cuda", num_found=num_edges)


class PlannedUse(NamedTuple):
    """What a loader has on a GPU beside the batch that is trained on: finished batches that wait, one in the hands of
    each of `making` threads, and what a thread takes while it samples there."""

    waiting: int
    making: int
    sampling_bytes: int


def planned_use(place: str, num_threads: int | None, prefetch: int, num_relations: int, num_edges: int) -> PlannedUse:
    """Of batches with `num_edges` edges, where the graph is on the "device", "pinned" or on the "host".

    The GPU samples what it can read. Of other graphs batches are made on the host, and one at a time is copied.

    >>> planned_use("host", None, 2, 1, 1000)
    PlannedUse(waiting=1, making=1, sampling_bytes=0)
    """
    if num_threads == 0:
        return PlannedUse(0, 0, 0)
    if place == "host":
        return PlannedUse(1, 1, 0)
    threads = num_threads if num_threads is not None else 1 if place == "device" else _THREADS
    return PlannedUse(prefetch, threads, _sampling_bytes([0] * 2 * num_relations, [1], num_edges))


def promise_batches(
    graph: AnyGraph, device: torch.device | None, num_neighbors: NumNeighbors, seeds: Mapping[NodeType, int], *,
    names: Names | None, num_threads: int | None, prefetch: int, **options: Any,
) -> MemoryPromise | None:  # fmt: skip
    """Sets room aside on a GPU for as many batches as a loader has at a time, at most half of what is left there. Keep
    it as long as the loader; None where batches stay on the host. `options` are `sampled_sizes`'s."""
    if device is None or device.type != "cuda":
        return None
    if not _are_fanouts(graph, num_neighbors):  # the sampler says better what is wrong with them
        return None
    each, sampling = batch_bytes(graph, num_neighbors, seeds, names, **options)
    return share_for_batches(MemoryBudget.of(device), each, sampling, num_threads=num_threads, prefetch=prefetch)


def share_for_batches(
    budget: MemoryBudget, each: int, sampling: int, *, num_threads: int | None, prefetch: int
) -> MemoryPromise:
    """A promise for batches of `each` bytes, for which `sampling` more are taken for a while."""
    threads = _THREADS if num_threads is None else max(num_threads, 1)
    promise = budget.promise_share(0.5, "batches of a loader")
    promise.shrink((prefetch + threads + _IN_USE) * each + threads * sampling)
    return promise


def room_for_groups(device: torch.device | None) -> int:
    """Bytes that sampled batches which wait for each other may take, on a device or the host: of a quarter of what is
    left, the part of this rank."""
    return int(_FOR_GROUPS * MemoryBudget.of(torch.device("cpu") if device is None else device).share())


def _by_type(graph: AnyGraph, num_neighbors: NumNeighbors) -> dict[EdgeType, list[int]]:
    if isinstance(num_neighbors, Mapping):
        return {t: [int(fanout) for fanout in of] for t, of in num_neighbors.items()}
    return {t: [int(fanout) for fanout in num_neighbors] for t in graph.edge_types}


def _are_fanouts(graph: AnyGraph, num_neighbors: NumNeighbors) -> bool:
    """Whether they are numbers, for edge types that there are."""
    lists = list(num_neighbors.values()) if isinstance(num_neighbors, Mapping) else [num_neighbors]
    if isinstance(num_neighbors, Mapping) and not set(num_neighbors) <= set(graph.edge_types):
        return False
    return all(isinstance(of, Sequence) and all(hasattr(fanout, "__index__") for fanout in of) for of in lists)


def _mean_degree(graph: AnyGraph, edge_type: EdgeType) -> int:
    return -(-graph.num_edges(edge_type) // max(graph.num_nodes(edge_type[2]), 1))


def _row_bytes(graph: AnyGraph, key: NodeType | EdgeType, names: Names | None) -> int:
    data = graph.edge_data.get(key, {}) if isinstance(key, tuple) else graph.node_data.get(key, {})
    named = names.get(key, ()) if isinstance(names, Mapping) else names
    rows = [of for name, of in data.items() if named is None or name in named]
    return sum(prod(of.shape[1:]) * of.dtype.itemsize for of in rows if hasattr(of, "dtype"))
