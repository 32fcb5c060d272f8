"""The steps of multilevel partitioning: cluster, contract, refine, on an undirected graph with weighted nodes.

A node has one weight per constraint. Every step gives the same result on any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC


class Neighbors32(NamedTuple):
    """The neighbours of the nodes from `first_row` on: an int64 indptr and int32 indices, which count from
    `first_column` in a range of `num_columns` nodes; `weight` int32 per edge, None where all weigh 1."""

    indptr: Tensor
    indices: Tensor
    first_row: int
    first_column: int
    num_columns: int
    weight: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Level:
    """An undirected graph: the union of its neighbour lists, every edge from both ends, loops ignored.

    The finest level is the user's graph as it is stored, two lists per edge type (its CSC and the transpose); coarser
    ones are a single list with weights. `node_weights` int64 [num_nodes, num_constraints].
    """

    lists: tuple[Neighbors32, ...]
    node_weights: Tensor

    @property
    def num_nodes(self) -> int:
        return self.node_weights.shape[0]

    @property
    def num_entries(self) -> int:
        """Entries of all lists: each edge twice."""
        return sum(part.indices.numel() for part in self.lists)

    def arguments(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
        offsets = [number for part in self.lists for number in part[2:5]]
        weight = [part.weight for part in self.lists if part.weight is not None]
        return [part.indptr for part in self.lists], [part.indices for part in self.lists], weight, offsets


def both_directions(csc: CSC, first_src: int = 0, first_dst: int = 0) -> tuple[Neighbors32, Neighbors32]:
    """A graph's edges from both ends: the CSC as it is (a copy only where its indices are int64), and the transpose."""
    indptr, indices, _ = native.transpose(csc.indptr, csc.indices, csc.num_src)
    into = Neighbors32(csc.indptr, csc.indices.int(), first_dst, first_src, csc.num_src)
    return into, Neighbors32(indptr, indices.int(), first_src, first_dst, csc.num_dst)


class RefinedCut(NamedTuple):
    """`cut` is the weight of edges between parts; `excess` the sum of what is over the limits, in average parts."""

    cut: int
    excess: float


def cluster_nodes(
    level: Level, limits: Tensor, *, part: Tensor | None = None, rounds: int = 3, key: int = 0
) -> tuple[Tensor, int]:
    """The cluster of every node, int32, and their number: nodes with heavy edges between them are together.

    No cluster weighs more than `limits` int64 [num_constraints], but where one of its nodes alone does; with `part`,
    none crosses parts.
    """
    return native.partition_cluster(*level.arguments(), level.node_weights, limits, part, rounds, key)


def contract_clusters(level: Level, clusters: Tensor, num_clusters: int, *, heaviest: bool = True) -> Level:
    """The graph of the clusters: edges between two of them are one edge of the sum of their weights.

    With `heaviest`, a coarse node keeps only so many of its heaviest edges that its degree is the average degree of
    its members (DistDGLv2 §5.3.1), where nodes would get more edges than that; one stays when either end keeps it.
    """
    indptr, indices, weight = native.partition_contract(*level.arguments(), clusters, num_clusters, heaviest)
    node_weights = level.node_weights.new_zeros(num_clusters, level.node_weights.shape[1])
    node_weights.index_add_(0, clusters.long(), level.node_weights)
    return Level((Neighbors32(indptr, indices, 0, 0, num_clusters, weight),), node_weights)


def refine_cut(
    level: Level, part: Tensor, num_parts: int, limits: Tensor, *, passes: int = 8, work: int = 0, key: int = 0
) -> RefinedCut:
    """Improves `part` (int32, in place): first within `limits` int64 [num_constraints], then a smaller cut.

    `passes` of improving moves, then searches that may climb, which look at no more than about `work` edges.
    """
    return RefinedCut(
        *native.partition_refine(*level.arguments(), level.node_weights, part, num_parts, limits, passes, work, key)
    )


@torch.library.register_fake("gnnsys::partition_contract")
def _contract(
    indptr: list[Tensor],
    indices: list[Tensor],
    weight: list[Tensor],
    offsets: list[int],
    cluster: Tensor,
    num_clusters: int,
    heaviest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    return indptr[0].new_empty(num_clusters + 1), cluster.new_empty(num_edges), cluster.new_empty(num_edges)
