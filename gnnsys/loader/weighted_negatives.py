"""Negatives from all nodes of a type: uniform, by weights that the user gives, or by degree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.loader.negative_kinds import Choice, Drawn, LinkEnd, NegativeKind, NegativesWanted, NodeDrawer
from gnnsys.sampling import AnyGraph

_BLOCK = 64  # nodes whose weights are added up together: no process keeps those of all
_PIECE = 1 << 20  # nodes whose degrees are asked for together
_SCALE = 4096  # by which degree ** power is multiplied before it is rounded
_LARGEST_BITS = 50  # of a sum of weights, less those of the scale


@dataclass(frozen=True)
class UniformNegatives(NegativeKind):
    """Any node, with equal chance, or in proportion to `src_weight` and `dst_weight`. PyG's kind: both ends are drawn.

    A drawn pair may happen to be an edge. In time a negative exists at its link's time.
    """

    @property
    def takes_times(self) -> bool:
        return True

    @property
    def takes_weights(self) -> bool:
        return True

    @property
    def corrupts(self) -> str:
        return "both"

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        name = f"neg_sampling: {end.name}_weight"
        return _DrawUniform(NodeDraw(end.graph.num_nodes(end.node_type), end.weight, end.time, name))


class _DrawUniform:
    needs_links = False

    def __init__(self, nodes: NodeDraw) -> None:
        self._nodes = nodes

    def draw(self, wanted: NegativesWanted) -> Drawn:
        return Drawn(original=self._nodes.draw(wanted.count, wanted.stream, wanted.limit))


class NodeDraw:
    """Draws nodes of one type: uniformly or by weight, all of them or those whose time is not later than a limit.

    Nodes are kept in order of time with the running sum of their weights, so that the nodes allowed at a time are a
    prefix and one draw is one binary search.
    """

    def __init__(self, num_nodes: int, weight: Tensor | None, time: Tensor | None, name: str) -> None:
        weight, time = (None if rows is None else rows.cpu() for rows in (weight, time))  # as the generator is
        self._num_nodes = num_nodes
        self._order = None if time is None else torch.argsort(time, stable=True)
        self._time = None if time is None or self._order is None else time[self._order]
        self._running: Tensor | None = None
        if weight is not None:
            self._running = self._running_sum(weight, name)

    def _running_sum(self, weight: Tensor, name: str) -> Tensor:
        if weight.shape != (self._num_nodes,):
            raise ValueError(f"{name} must have one entry per node, {self._num_nodes}, got {tuple(weight.shape)}")
        if not bool((torch.isfinite(weight) & (weight >= 0)).all()) or not float(weight.sum()) > 0:
            raise ValueError(f"{name} must be finite, not negative and not all zero")
        weight = weight.double() if self._order is None else weight.double()[self._order]
        return weight.cumsum(0)

    def draw(self, count: int, stream: torch.Generator, limit: Tensor | None = None) -> Tensor:
        """`count` nodes; the i-th has time <= limit[i % len(limit)] (where none has: the earliest with weight)."""
        if self._time is None or limit is None:
            if self._running is None:
                return torch.randint(self._num_nodes, (count,), generator=stream, device="cpu")
            allowed = torch.full((count,), self._num_nodes, device="cpu")
        else:
            allowed = torch.searchsorted(self._time, limit.contiguous(), right=True)
            allowed = allowed.repeat(-(-count // max(1, limit.numel())))[:count]
        chance = torch.rand(count, generator=stream, dtype=torch.float64, device="cpu")
        first = 0
        if self._running is None:
            place = (chance * allowed).long()
        else:
            total = self._running[(allowed - 1).clamp_(min=0)]
            place = torch.searchsorted(self._running, chance * total, right=True)
            first = int(torch.searchsorted(self._running, 0.0, right=True))  # a node without weight is never drawn
        place = torch.minimum(place, allowed - 1).clamp_(min=first)
        return place if self._order is None else self._order[place]


@dataclass(frozen=True)
class DegreeNegatives(NegativeKind):
    """A destination in proportion to (how many edges of the type lead to it) ** `power`; 0.75 is word2vec's.

    Weights are whole numbers, degree ** power times a power of two, so that sums are exact wherever they are taken. On
    parts a process keeps one sum for every 64 nodes, and looks up the degrees of those that a batch's draws fall upon.
    """

    power: float = 0.75

    def __post_init__(self) -> None:
        if not (isinstance(self.power, (int, float)) and math.isfinite(self.power) and self.power >= 0):
            raise ValueError(f"DegreeNegatives: power must be a number >= 0, got {self.power!r}")

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        if end.name != "dst":
            raise ValueError("DegreeNegatives draws destinations: leave corrupt away, or write corrupt='dst'")
        return _DrawByDegree(end.graph, end.edge_type, float(self.power))


class _DrawByDegree:
    """A binary search among sums of blocks, then one among the weights of a block.

    So a node is the first up to which, itself included, weights add up to more than a number in [0, sum of all).
    """

    needs_links = False

    def __init__(self, graph: AnyGraph, edge_type: EdgeType, power: float) -> None:
        self._graph, self._edge_type, self._power = graph, edge_type, power
        self._num_nodes, num_edges = graph.num_nodes(edge_type[2]), graph.num_edges(edge_type)
        if num_edges == 0:
            raise ValueError(f"DegreeNegatives: there are no edges of {edge_type!r} to draw by")
        if max(1.0, power) * math.log2(num_edges) > _LARGEST_BITS:
            raise ValueError(f"DegreeNegatives: degrees to the power of {power} are too large to be added up")
        self._indptr = graph.csc(edge_type).indptr.cpu() if isinstance(graph, Graph) else None
        sums = [self._block_sums(first) for first in range(0, self._num_nodes, _PIECE)]
        self._ends = torch.cat(sums).cumsum(0)

    def _block_sums(self, first: int) -> Tensor:
        nodes = torch.arange(first, min(first + _PIECE, self._num_nodes), device="cpu")
        if not isinstance(self._graph, Graph):
            nodes = self._graph.global_ids(nodes, self._edge_type[2])
        weights = self._weights(self._begin_degrees(nodes)())
        return torch.nn.functional.pad(weights, (0, -weights.numel() % _BLOCK)).view(-1, _BLOCK).sum(1)

    def _begin_degrees(self, ids: Tensor) -> Callable[[], Tensor]:
        if isinstance(self._graph, Graph):
            indptr = self._indptr
            assert indptr is not None
            return lambda: indptr[ids + 1] - indptr[ids]
        return self._graph.begin_in_degrees(ids, self._edge_type)

    def _weights(self, degrees: Tensor) -> Tensor:
        """Whole numbers: equal degrees weigh the same wherever they are computed."""
        values, at = torch.unique(degrees, return_inverse=True)
        scaled = [round(value**self._power * _SCALE) if value else 0 for value in values.tolist()]
        return torch.tensor(scaled, dtype=torch.int64, device="cpu")[at]

    def draw(self, wanted: NegativesWanted) -> Drawn:
        """All nodes of the blocks that draws fall upon; their degrees are looked up when their ids are known."""
        chance = torch.randint(int(self._ends[-1]), (wanted.count,), generator=wanted.stream, device="cpu")
        blocks, of_block = torch.unique(torch.searchsorted(self._ends, chance, right=True), return_inverse=True)
        nodes = blocks[:, None] * _BLOCK + torch.arange(_BLOCK, device="cpu")
        before = torch.where(blocks > 0, self._ends[(blocks - 1).clamp(min=0)], 0)

        def then(ids: Tensor, ends: Tensor, others: Tensor) -> Choice:
            degrees = self._begin_degrees(ids)

            def choose() -> Tensor:
                weights = torch.zeros(nodes.numel(), dtype=torch.int64, device="cpu")
                weights[: ids.numel()] = self._weights(degrees())
                running = weights.view(-1, _BLOCK).cumsum(1) + before[:, None]
                place = torch.searchsorted(running[of_block], chance[:, None], right=True).view(-1)
                return of_block * _BLOCK + place

            return choose

        nodes = nodes.view(-1)
        return Drawn(original=nodes[nodes < self._num_nodes], then=then)  # the last block alone may be cut short
