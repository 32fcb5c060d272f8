"""Visiting a symmetric adjacency run by run: typed face of csrc/cpu/partition/stream_*.cpp.

A run is some neighbouring nodes with all their neighbours. What the functions know of other nodes is in arrays of one
entry per node, which they change in place; visiting the runs in order visits every node once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native


class NodeRun(NamedTuple):
    """Nodes first, first + 1, ...: `indptr` is their slice of the adjacency's, `indices` their neighbours."""

    first: int
    indptr: Tensor
    indices: Tensor


def stream_cluster(
    run: NodeRun, weight: Tensor, label: Tensor, size: Tensor, counts: Tensor, limit: int, orphans: Tensor | None = None
) -> int:
    """Moves each node of the run to the cluster most of its neighbours are in, where that stays within `limit`.

    `weight` int64 is the run's, `label` int32 and `size` int64 are the clusters' so far, `counts` int32 zeros. With
    `orphans` (int32, -1), nodes alone whose favourite cluster has no room gather. Returns how many nodes moved.
    """
    return native.stream_cluster(run.indptr, run.indices, run.first, weight, label, size, counts, orphans, limit)


class PairTable:
    """Edges between clusters, in a table of `num_slots` (a power of two) that forgets the lightest when it is full."""

    def __init__(self, num_slots: int) -> None:
        self._keys = torch.full((num_slots,), -1, dtype=torch.int64, device="cpu")
        self._counts = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self._state = torch.zeros(2, dtype=torch.int64, device="cpu")

    def add(self, run: NodeRun, label: Tensor, counts: Tensor) -> None:
        """The run's edges between clusters; nodes of cluster -1 have none. `counts` int32 zeros."""
        native.stream_contract(run.indptr, run.indices, run.first, label, counts, self._keys, self._counts, self._state)

    @property
    def forgotten(self) -> int:
        """Edges that went with a pair that was forgotten."""
        return int(self._state[1])

    def pairs(self) -> tuple[Tensor, Tensor]:
        """int64 [2, num_pairs], smaller cluster first, and the edges between the two, int64 [num_pairs]."""
        used = self._keys >= 0
        keys = self._keys[used]
        return torch.stack([keys >> 32, keys & 0xFFFFFFFF]), self._counts[used]


def stream_refine(
    run: NodeRun, weights: Tensor, part: Tensor, load: Tensor, limit: Tensor, price: float = 0.0
) -> tuple[int, int]:
    """Moves each node of the run to the part with most of its neighbours where every constraint has room.

    `weights` int64 [num_constraints, size of the run]; `part` int32, -1 for a node without one, which then gets one;
    `load` and `limit` int64 [num_constraints, num_parts]. A node of an overloaded part leaves it for up to `price`
    neighbours lost per unit of the limit by which the excess lessens. Returns the nodes moved and the change in
    the number of cut edges.
    """
    return native.stream_refine(run.indptr, run.indices, run.first, weights, part, load, limit, price)


def stream_cut(run: NodeRun, part: Tensor) -> int:
    """Neighbours in other parts; over all nodes, twice the number of cut edges."""
    return native.stream_cut(run.indptr, run.indices, run.first, part)


def drop_pages(rows: Tensor) -> None:
    """Takes the pages of a mapped file out of memory; they are read again when needed. Harmless on other memory."""
    native.drop_pages(rows)
