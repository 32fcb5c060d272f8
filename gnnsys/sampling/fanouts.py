"""Fanouts: how many neighbours a hop takes of each node. What a user writes is checked here, when a sampler is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from gnnsys.graph import EdgeType, some

MAX_FANOUT = 1 << 28  # what the kernel's 32-bit arithmetic on draws leaves room for
Fanouts: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]]


class Typed(Protocol):
    """What has edge types: a graph in memory, or a parted one."""

    @property
    def edge_types(self) -> list[EdgeType]: ...

    def num_edges(self, edge_type: EdgeType | None = None) -> int: ...


def check_fanouts(graph: Typed, num_neighbors: Fanouts) -> dict[EdgeType, tuple[int, ...]]:
    """A fanout per hop for every edge type of the graph; ValueError says what is wrong with the user's."""
    if isinstance(num_neighbors, int):
        raise ValueError(
            f"num_neighbors must be a list, a fanout per hop, got {num_neighbors}: write [{num_neighbors}]"
        )
    if isinstance(num_neighbors, Mapping):
        for edge_type in num_neighbors:
            graph.num_edges(edge_type)  # ValueError where there is no such type
        missing = [t for t in graph.edge_types if t not in num_neighbors]
        if missing:
            raise ValueError(
                f"num_neighbors must cover all edge types, missing {some(missing)} (use [0, ...] to skip one)"
            )
        fanouts = {t: tuple(num_neighbors[t]) for t in graph.edge_types}
    else:
        fanouts = {t: tuple(num_neighbors) for t in graph.edge_types}
    if len({len(f) for f in fanouts.values()}) > 1:
        raise ValueError(f"num_neighbors: hops must be the same across all edge types, got {_lengths(fanouts)}")
    for edge_type, values in fanouts.items():
        if not values and graph.num_edges(edge_type) > 0:
            raise ValueError("num_neighbors must have at least one hop")
        if any(int(f) != f or not -1 <= f < MAX_FANOUT for f in values):
            raise ValueError(
                f"num_neighbors must be -1 (all) or whole numbers >= 0, got {list(values)} for {edge_type}"
            )
    return {t: tuple(int(f) for f in values) for t, values in fanouts.items()}


def _lengths(fanouts: Mapping[EdgeType, tuple[int, ...]]) -> str:
    """An edge type of each number of hops: all of them may be hundreds."""
    first = {len(values): edge_type for edge_type, values in reversed(list(fanouts.items()))}
    return ", ".join(f"{hops} for {edge_type}" for hops, edge_type in sorted(first.items()))
