"""Hops over several parts: typed faces of `name_neighbors` and `stitch` (cpu/stitch.cpp, cuda/stitch.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, scan_bytes, takes_outputs_only, tells_workspace
from gnnsys.ops.sampling import Neighbors


class PartNeighbors(NamedTuple):
    """In-edges chosen for some seeds, one after the other, in global ids: what a part answers."""

    counts: Tensor  # int32 [num_seeds]
    ids: Tensor  # int32 or int64 [num_edges], the neighbours
    edges: Tensor  # int32 or int64 [num_edges]
    weight: Tensor | None = None  # float32 [num_edges], of all pieces of a draw or of none


def name_neighbors(
    neighbors: Neighbors,
    *,
    first: int,
    num_core: int,
    halo: Tensor,
    first_edge: int,
    order: Tensor | None,
    wide_ids: bool,
    wide_edges: bool,
) -> PartNeighbors:
    """What was sampled from a part's CSC (int32 local ids), in global ids.

    Local id i < num_core is node `first + i`, the others are listed in `halo`; the edge at position p is
    `first_edge + order[p]`, or `first_edge + p`. Ids and edges are int32 unless wide.
    """
    counts, ids, edges = native.name_neighbors(
        neighbors.indptr, neighbors.ids, neighbors.positions, first, num_core, halo, first_edge, order,
        wide_ids, wide_edges,
    )  # fmt: skip
    return PartNeighbors(counts, ids, edges, neighbors.weight)


def stitch_neighbors(
    order: Tensor, pieces: Sequence[PartNeighbors], segments: Sequence[tuple[int, int, int]], *, wide: bool
) -> Neighbors:
    """The answers for grouped seeds, in the order of the seeds: grouped seed j is seed `order[j]`.

    A segment (piece, first, size) says that grouped seeds first .. first + size are the next of that piece's. Ids are
    int32 unless `wide`, edges int64. Work: the seeds twice, every neighbour once; nothing is sorted. With `order` on a
    device, where each piece must be one segment, pieces may be on the host: they are copied.

    >>> one = PartNeighbors(*(torch.tensor(values, dtype=torch.int32) for values in ([2], [7, 8], [0, 1])))
    >>> two = PartNeighbors(*(torch.tensor(values, dtype=torch.int32) for values in ([1], [9], [5])))
    >>> stitch_neighbors(torch.tensor([1, 0]), [one, two], [(0, 0, 1), (1, 1, 1)], wide=True).ids
    tensor([9, 7, 8])
    """
    flat = [number for segment in segments for number in segment]
    dtype = torch.int64 if wide else torch.int32
    counts, edges = [p.counts for p in pieces], [p.edges for p in pieces]
    indptr, ids, positions = native.stitch(order, counts, [p.ids.to(dtype) for p in pieces], edges, flat, wide)
    weights = [p.weight.view(torch.int32) for p in pieces if p.weight is not None]
    if not weights:
        return Neighbors(indptr, ids, positions)
    if len(weights) != len(pieces):
        raise ValueError(f"{len(weights)} of {len(pieces)} pieces have weights: all of a draw have them, or none")
    _, bits, _ = native.stitch(order, counts, weights, edges, flat, False)  # moved as ids are, bit for bit
    return Neighbors(indptr, ids, positions, bits.view(torch.float32))


@torch.library.register_fake("gnnsys::name_neighbors")
def _(indptr, neighbors, positions, first, num_core, halo, first_edge, order, wide_ids, wide_edges):
    ids = neighbors.new_empty(neighbors.shape[0], dtype=torch.int64 if wide_ids else torch.int32)
    edges = neighbors.new_empty(neighbors.shape[0], dtype=torch.int64 if wide_edges else torch.int32)
    return neighbors.new_empty(indptr.shape[0] - 1), ids, edges


@torch.library.register_fake("gnnsys::stitch")
def _(order, counts, ids, edges, segments, wide):
    size = sum(piece.shape[0] for piece in ids)
    out = order.new_empty(size, dtype=torch.int64 if wide else torch.int32)
    return order.new_empty(order.shape[0] + 1), out, order.new_empty(size)


@tells_workspace("stitch", "cpu")
def _(expected: Expected, order, counts, ids, edges, segments, wide) -> int:
    """Each piece's offsets, and segments twice while their list grows."""
    return 8 * sum(each.numel() + 1 for each in counts) + 96 * (len(segments) // 3) + 8 * len(counts)


@tells_workspace("stitch", "cuda")
def _(expected: Expected, order, counts, ids, edges, segments, wide) -> int:
    """Copies of pieces on the host, where each seed's edges begin, and two scans."""
    copied = sum(each.nbytes for pieces in (counts, ids, edges) for each in pieces if not each.is_cuda)
    most = max((each.numel() for each in counts), default=0)
    return copied + 8 * (most + 1) + scan_bytes(order.numel()) + scan_bytes(most)


takes_outputs_only("name_neighbors", device_types=["cpu"])
