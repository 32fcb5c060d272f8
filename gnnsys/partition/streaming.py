"""Parts for a graph larger than memory: O(nodes) of memory beside files that are read from front to back.

Semi-external multilevel partitioning (after Akhremtsev, Sanders and Schulz, ESA 2015): clusters by label propagation
under a size limit; METIS on the graph between the clusters, which fits in memory; then restreaming refinement with any
number of constraints. Everything native runs node after node, so the result depends on the input alone.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import Graph, room_for
from gnnsys.ops import CSC, NodeRun, PairTable, stream_cluster, stream_cut, stream_refine
from gnnsys.partition.adjacency import Adjacency
from gnnsys.partition.array_pieces import Progress
from gnnsys.partition.constraints import constraints_of
from gnnsys.partition.memory import (
    BYTES_PER_CLUSTER,
    BYTES_PER_COARSE_PAIR,
    STREAM_FLOOR,
    STREAM_SORT_SHARE,
    least_memory,
)

Weight: TypeAlias = Tensor | Callable[[int, int], Tensor]
Report: TypeAlias = Callable[[str, float], None]

_CLUSTER_PASSES = 5
_ORPHAN_PASSES = 2  # the last ones of them, in which lone nodes gather
_CLUSTERS_PER_PART = (16, 256)  # what a cluster may weigh is a part's share over this, by the memory there is
_UNIT = 1 << 40  # of the combined weight of all nodes
_PLAIN_PASSES = 8
_LOOSENED = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0)  # rounds of refinement: by how many times the slack is widened first
_LOOSE_PASSES = 2
_PRICES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0, math.inf)  # for leaving an overloaded part, in average neighbours
_LAST_PASSES = 3
_PIECE = 1 << 20  # nodes at a time where something is looked up for each
_STALLED = 0.001  # of the cut edges: a pass that gains less is the last of its kind


@dataclass(frozen=True)
class StreamedParts:
    """`part` int32 [num_nodes], node types one after the other; `num_cut` edges of `num_edges` join two parts.

    `load` and `limit` are int64 [num_constraints, num_parts]; `excess` lists the constraints (row numbers) that could
    not be kept.
    """

    part: Tensor
    num_cut: int
    num_edges: int
    load: Tensor
    limit: Tensor
    num_passes: int

    @property
    def excess(self) -> list[int]:
        return (self.load > self.limit).any(1).nonzero().view(-1).tolist()


def stream_assignment(
    graph: Graph,
    num_parts: int,
    weights: Tensor | Sequence[Weight] | None = None,
    limits: Tensor | None = None,
    *,
    memory_limit: int,
    imbalance: float = 1.05,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> StreamedParts:
    """Assigns every node of `graph`, whose arrays may be mapped files larger than memory, to a part.

    A constraint is a weight per node: a tensor of integers or bools, or a function of (begin, end) that gives int64;
    nodes of several types are numbered type after type. By default nodes and in-edges are constrained. `limits` int64
    [num_constraints] or [num_constraints, num_parts] is what a part may carry, by default `imbalance` times its fair
    share, or its heaviest node. Few edges between parts, every constraint within its limit; where that cannot be,
    `excess` of the result says so.

    `memory_limit` bounds what is allocated, O(num_nodes) at least (`gnnsys.partition.least_memory` says how much); the
    cut is better with more of it. Temporary files of up to 32 bytes per edge go to `folder`, by default the system's
    place for them.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    num_nodes = sum(graph.num_nodes(node_type) for node_type in graph.node_types)
    if memory_limit < least_memory(num_nodes):
        raise ValueError(
            f"memory_limit must be at least {least_memory(num_nodes)} for {num_nodes} nodes, got {memory_limit}"
        )
    report = _reporter(progress)
    place = tempfile.gettempdir() if folder is None else folder
    files = tempfile.TemporaryDirectory(prefix=".stream-", dir=place)
    with room_for("temporary files of partitioning", place), files as work:
        memory = (memory_limit - STREAM_FLOOR) // STREAM_SORT_SHARE
        adjacency = Adjacency.build(graph, Path(work), memory, lambda share: report("adjacency", share))
        weights = list(constraints_of(graph, ["edges"]).columns.values()) if weights is None else weights
        constraints = _Constraints(num_nodes, weights)
        limit = constraints.limits(limits, num_parts, imbalance)
        stream = _Stream(adjacency, constraints, num_parts, limit, report)
        budget = memory_limit - least_memory(num_nodes)
        part, num_cut, load = stream.refine(_first_parts(adjacency, constraints, num_parts, budget, report))
    num_edges = sum(graph.num_edges(edge_type) for edge_type in graph.edge_types)
    return StreamedParts(part, num_cut, num_edges, load, limit, stream.num_passes)


class _Constraints:
    """Weights per node of every constraint, made for a run of nodes at a time."""

    def __init__(self, num_nodes: int, weights: Tensor | Sequence[Weight]) -> None:
        self._weights = list(weights)
        self._num_nodes = num_nodes
        for i, weight in enumerate(self._weights):
            if isinstance(weight, Tensor) and (weight.shape != (num_nodes,) or weight.is_floating_point()):
                got = f"{weight.dtype} {list(weight.shape)}"
                raise ValueError(f"weights[{i}] must be integers [{num_nodes}], one per node, got {got}")
        if not self._weights:
            raise ValueError("weights must name at least one constraint")
        self.total, self.heaviest = self._sums()

    def of(self, first: int, size: int) -> Tensor:
        """int64 [num_constraints, size]."""
        rows = [w[first : first + size] if isinstance(w, Tensor) else w(first, first + size) for w in self._weights]
        return torch.stack([row.to(torch.int64) for row in rows])

    def combined(self, first: int, size: int) -> Tensor:
        """The shares of all constraints added up, int64, _UNIT for a whole constraint: one weight for clusters."""
        return (self.of(first, size).double() * (_UNIT / self.total.clamp(min=1).double())[:, None]).sum(0).long()

    def limits(self, given: Tensor | None, num_parts: int, imbalance: float) -> Tensor:
        """int64 [num_constraints, num_parts]."""
        if given is None:
            if imbalance < 1:
                raise ValueError(f"imbalance must be at least 1, got {imbalance}")
            given = (self.total.double() * imbalance / num_parts).ceil().long().maximum(self.heaviest)
        limit = (given[:, None] if given.dim() == 1 else given).to(torch.int64)
        if limit.shape[0] != len(self._weights) or limit.shape[1] not in (1, num_parts):
            raise ValueError(
                f"limits must be [{len(self._weights)}] or [{len(self._weights)}, {num_parts}], got {list(given.shape)}"
            )
        return limit.expand(-1, num_parts).contiguous()

    def _sums(self) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(self._weights), dtype=torch.int64, device="cpu")
        heaviest = torch.zeros_like(total)
        for first in range(0, self._num_nodes, _PIECE):
            weight = self.of(first, min(_PIECE, self._num_nodes - first))
            if bool((weight < 0).any()):
                raise ValueError(f"weights must be >= 0, got {int(weight.min())}")
            total += weight.sum(1)
            heaviest = heaviest.maximum(weight.amax(1))
        return total, heaviest


# -- a first assignment --------------------------------------------------------------------------------------------


def _first_parts(
    adjacency: Adjacency, constraints: _Constraints, num_parts: int, budget: int, report: Report
) -> Iterator[Tensor]:
    """Assignments to start from: METIS on clusters, by bisection and k-way, or nothing where clusters do not help.

    A node without neighbours is in no cluster, and in no part (-1) yet.
    """
    nobody = torch.full((adjacency.num_nodes,), -1, dtype=torch.int32, device="cpu")
    if num_parts == 1 or adjacency.num_neighbors == 0:
        yield nobody
        return
    # With little memory, clusters so large that it holds most pairs of them.
    per_part = int(math.sqrt(2 * max(budget, 0) / BYTES_PER_COARSE_PAIR) / num_parts)
    num_least = num_parts * min(max(per_part, _CLUSTERS_PER_PART[0]), _CLUSTERS_PER_PART[1])
    label = _cluster(adjacency, constraints, num_least, report)
    num_clusters = _number(label, adjacency)
    pair_budget = budget - num_clusters * BYTES_PER_CLUSTER
    if num_clusters < 2 * num_parts or pair_budget < 64 * BYTES_PER_COARSE_PAIR:
        yield nobody
        return
    most = min(pair_budget // BYTES_PER_COARSE_PAIR, adjacency.num_neighbors)
    table = PairTable(1 << max(int(most * 8 / 5).bit_length() - 1, 6))
    counts = torch.zeros(adjacency.num_nodes, dtype=torch.int32, device="cpu")
    for run in adjacency.runs():
        table.add(run, label, counts)
        report("contracting", _share(run, adjacency))
    del counts, nobody
    coarse = _metis(table, _cluster_weights(label, num_clusters, adjacency, constraints), num_parts)
    del table
    for part_of_cluster in coarse:
        yield _spread(part_of_cluster, label)


def _spread(value: Tensor, label: Tensor) -> Tensor:
    """value[label], -1 where the label is."""
    out = torch.full_like(label, -1)
    for first in range(0, label.numel(), _PIECE):
        piece = label[first : first + _PIECE]
        out[first : first + _PIECE] = torch.where(piece >= 0, value[piece.clamp(min=0).long()], -1)
    return out


def _cluster(adjacency: Adjacency, constraints: _Constraints, num_least: int, report: Report) -> Tensor:
    """The cluster of every node, named by one of them; none weighs more than 1 / `num_least` of all nodes."""
    num_nodes = adjacency.num_nodes
    label = torch.arange(num_nodes, dtype=torch.int32, device="cpu")
    size = torch.empty(num_nodes, dtype=torch.int64, device="cpu")
    for run in adjacency.runs():
        size[run.first : run.first + _size(run)] = constraints.combined(run.first, _size(run))
    limit = int(size.sum()) // num_least
    counts = torch.zeros(num_nodes, dtype=torch.int32, device="cpu")
    for i in range(_CLUSTER_PASSES):
        gathers = i >= _CLUSTER_PASSES - _ORPHAN_PASSES
        orphans = torch.full((num_nodes,), -1, dtype=torch.int32, device="cpu") if gathers else None
        for run in adjacency.runs():
            weight = constraints.combined(run.first, _size(run))
            stream_cluster(run, weight, label, size, counts, limit, orphans)
            report("clustering", (i + _share(run, adjacency)) / _CLUSTER_PASSES)
    return label


def _number(label: Tensor, adjacency: Adjacency) -> int:
    """Numbers the clusters from 0, in place; nodes without neighbours leave theirs (-1)."""
    used = torch.zeros(label.numel(), dtype=torch.bool, device="cpu")
    for run in adjacency.runs():
        mine = label[run.first : run.first + _size(run)]
        mine[run.indptr.diff() == 0] = -1
        used[mine[mine >= 0].long()] = True
    number = used.cumsum(0, dtype=torch.int32) - 1
    label.copy_(_spread(number, label))
    return int(used.sum())


def _cluster_weights(label: Tensor, num_clusters: int, adjacency: Adjacency, constraints: _Constraints) -> Tensor:
    weight = torch.zeros(num_clusters, dtype=torch.int64, device="cpu")
    for run in adjacency.runs():
        mine = label[run.first : run.first + _size(run)]
        held = mine >= 0
        weight.index_add_(0, mine[held].long(), constraints.combined(run.first, _size(run))[held])
    return weight


def _metis(table: PairTable, weight: Tensor, num_parts: int) -> list[Tensor]:
    """Two partitions of the clusters, int32 [num_clusters]: bisection is more even, k-way now and then cuts less."""
    import pymetis

    pairs, count = table.pairs()
    csc = CSC.from_edge_index(torch.cat([pairs, pairs.flip(0)], 1), weight.numel())
    edge_weight = torch.cat([count, count])
    if csc.edge_ids is not None:
        edge_weight = edge_weight[csc.edge_ids]
    del pairs, count
    # METIS may have been built for 32 bits: sums must fit.
    edge_weight = edge_weight.div(max(int(edge_weight.sum()) >> 30, 1), rounding_mode="floor").clamp(min=1)
    weight = weight.div(max(int(weight.sum()) >> 30, 1), rounding_mode="floor").clamp(min=1)
    graph = pymetis.CSRAdjacency(csc.indptr.numpy(), csc.indices.numpy())
    parts = []
    for recursive in (True, False):
        _, part = pymetis.part_graph(
            num_parts, graph, vweights=weight.numpy(), eweights=edge_weight.numpy(), recursive=recursive
        )
        parts.append(torch.as_tensor(part, dtype=torch.int32, device="cpu"))
    return parts


# -- refinement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    rank: tuple[float, int]  # by how much limits are exceeded, edges cut
    part: Tensor
    load: Tensor


class _Stream:
    """An assignment under refinement, pass by pass, and the best one so far that keeps every limit."""

    def __init__(
        self, adjacency: Adjacency, constraints: _Constraints, num_parts: int, limit: Tensor, report: Report
    ) -> None:
        self._adjacency, self._constraints, self._report = adjacency, constraints, report
        self._limit = limit
        self._fair = (constraints.total.double() / num_parts).floor().long()[:, None]
        self._average = adjacency.num_neighbors / num_parts  # neighbours of a part's share of the nodes
        self.num_passes = 0

    def refine(self, starts: Iterable[Tensor]) -> tuple[Tensor, int, Tensor]:
        """The best assignment found: part, cut edges, load."""
        best: _Found | None = None
        for part in starts:
            self._start(part)
            for i in range(_PLAIN_PASSES):
                if self._pass(self._limit, 0.0) > -_STALLED * self._num_cut and i > 0:
                    break
            self._relieve()
            best = self._better(best)
        assert best is not None
        self._restore(best)
        for widened in _LOOSENED:
            for _ in range(_LOOSE_PASSES):
                self._pass(self._widened(widened), 0.0)
            self._relieve()
            best = self._better(best)
        self._restore(best)
        for _ in range(_LAST_PASSES):
            if self._pass(self._limit, math.inf) > -_STALLED * self._num_cut:
                break
        return self._part, self._num_cut, self._load

    def _start(self, part: Tensor) -> None:
        self._part = part
        self._load = torch.zeros_like(self._limit)
        for run in self._adjacency.runs():
            mine = part[run.first : run.first + _size(run)]
            held = mine >= 0
            self._load.index_add_(1, mine[held].long(), self._constraints.of(run.first, _size(run))[:, held])
        # A node without a part has no neighbours, unless no node has one.
        is_empty = bool((part < 0).all())
        self._num_cut = 0 if is_empty else sum(stream_cut(run, part) for run in self._adjacency.runs()) // 2

    def _better(self, best: _Found | None) -> _Found:
        """What there is now, or `best` where that keeps the limits better, or as well with fewer cut edges."""
        over = ((self._load - self._limit).clamp(min=0).double() / self._limit.clamp(min=1)).sum()
        now = float(over), self._num_cut
        if best is not None and best.rank <= now:
            return best
        return _Found(now, self._part.clone(), self._load.clone())

    def _restore(self, found: _Found) -> None:
        self._num_cut = found.rank[1]
        self._part.copy_(found.part)
        self._load.copy_(found.load)

    def _pass(self, limit: Tensor, price: float) -> int:
        """Every node once; the change in cut edges."""
        change = 0
        for run in self._adjacency.runs():
            weights = self._constraints.of(run.first, _size(run))
            change += stream_refine(run, weights, self._part, self._load, limit, price)[1]
        self._num_cut += change
        self.num_passes += 1
        self._report("refining", 1 - 1 / (1 + self.num_passes / 8))
        return change

    def _relieve(self) -> None:
        """Brings every part within its limits, cheapest nodes first; in the end at any price and with room to spare."""
        for price in _PRICES:
            if not self._is_over():
                return
            self._pass(self._limit, price * self._average)
        for _ in range(_LAST_PASSES):
            if not self._is_over():
                return
            self._pass(self._widened(0.5), math.inf)
            self._pass(self._limit, math.inf)

    def _is_over(self) -> bool:
        return bool((self._load > self._limit).any())

    def _widened(self, factor: float) -> Tensor:
        """The limits with `factor` times the slack above a fair share."""
        slack = (self._limit - self._fair).clamp(min=0)
        return self._limit + ((factor - 1) * slack.double()).long()


def _reporter(progress: Progress | None) -> Report:
    """`progress` in the words of this module: what is being done, and the share of it that is."""
    return lambda stage, share: None if progress is None else progress(int(100 * share), 100, stage)


def _size(run: NodeRun) -> int:
    return run.indptr.numel() - 1


def _share(run: NodeRun, adjacency: Adjacency) -> float:
    return (run.first + _size(run)) / adjacency.num_nodes
