"""Fanouts: how many neighbours a hop takes of each node. What a user writes is checked here, when a sampler is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

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
    if isinstance(num_neighbors, Mapping):
        for edge_type in num_neighbors:
            graph.num_edges(edge_type)  # ValueError where there is no such type
        missing = [t for t in graph.edge_types if t not in num_neighbors]
        if missing:
            raise ValueError(
                f"num_neighbors must cover all edge types, missing {some(missing)} (use [0, ...] to skip one)"
            )
        fanouts = {t: _of_hops(num_neighbors[t]) for t in graph.edge_types}
    else:
        fanouts = dict.fromkeys(graph.edge_types, _of_hops(num_neighbors))
    if len({len(f) for f in fanouts.values()}) > 1:
        raise ValueError(f"num_neighbors: hops must be the same across all edge types, got {_lengths(fanouts)}")
    for edge_type, values in fanouts.items():
        if not values and graph.num_edges(edge_type) > 0:
            raise ValueError("num_neighbors must have at least one hop")
        if not all(map(is_fanout, values)):
            raise ValueError(
                f"num_neighbors must be -1 (all) or whole numbers >= 0, got {list(values)} for {edge_type}"
            )
    return {t: tuple(int(f) for f in values) for t, values in fanouts.items()}


def is_fanout(value: Any) -> bool:
    """Whether `value` is a whole number that a hop can take, or -1 for all. True and False are not."""
    value = value.item() if hasattr(value, "item") else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -1 <= value < MAX_FANOUT and float(value).is_integer()


def _of_hops(given: Any) -> tuple[Any, ...]:
    """The fanouts of all hops as a tuple; ValueError for what is no list."""
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        return tuple(f.item() if hasattr(f, "item") else f for f in given)  # of numpy and torch too
    numbers = re.findall(r"-?\d+", str(given)) if isinstance(given, (str, int)) else []
    write = f": write [{', '.join(numbers)}]" if numbers else ""
    raise ValueError(f"num_neighbors must be a list, a fanout per hop, got {given!r}{write}")


def check_no_idle_hop(fanouts: Mapping[EdgeType, Sequence[int]]) -> None:
    """ValueError for a hop without neighbours among others.

    Such a hop changes nothing in a batch of one structure, and a user may have meant all neighbours by 0.
    """
    found = idle_hop(fanouts)
    if found is not None:
        raise ValueError(found)


def idle_hop(fanouts: Mapping[EdgeType, Sequence[int]]) -> str | None:
    """Names the first hop without neighbours among others, and says what to write; None if there is none."""
    hops = [any(of_hop) for of_hop in zip(*fanouts.values(), strict=True)]
    if all(hops) or not any(hops):
        return None
    return (
        f"hop {hops.index(False) + 1} of num_neighbors={_listed(fanouts)} takes no neighbours of any node: leave it "
        "out, or write -1 for all neighbours"
    )


def seeds_alone(fanouts: Mapping[EdgeType, Sequence[int]]) -> str | None:
    """Says that batches have their seeds alone, if no hop takes neighbours; None otherwise."""
    if not any(fanouts.values()) or any(map(any, fanouts.values())):
        return None
    return f"num_neighbors={_listed(fanouts)} takes no neighbours, batches have their seeds alone: -1 takes all"


def _listed(fanouts: Mapping[EdgeType, Sequence[int]]) -> list[int] | dict[EdgeType, Sequence[int]]:
    """One list, if it is the same for all edge types."""
    lists = {tuple(of_hops) for of_hops in fanouts.values()}
    return list(lists.pop()) if len(lists) == 1 else dict(fanouts)


def _lengths(fanouts: Mapping[EdgeType, tuple[int, ...]]) -> str:
    """An edge type of each number of hops: all of them may be hundreds."""
    first = {len(values): edge_type for edge_type, values in reversed(list(fanouts.items()))}
    return ", ".join(f"{hops} for {edge_type}" for hops, edge_type in sorted(first.items()))
