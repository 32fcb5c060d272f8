"""Neighbour sampling on one CSC: typed face of `sample_neighbors`, `sample_hops` and `find_edges`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC

_MASK = 0xFFFFFFFFFFFFFFFF


class Neighbors(NamedTuple):
    """The in-edges chosen for each seed, seed after seed."""

    indptr: Tensor  # int64 [num_seeds + 1]
    ids: Tensor  # dtype of csc.indices, the neighbours
    positions: Tensor  # int64, positions in the CSC
    weight: Tensor | None = None  # float32, where a rule of drawing gives one


def stream_key(*parts: int) -> int:
    """Folds integers (seed, epoch, batch, hop, edge type, ...) into one signed 64-bit Philox key.

    SplitMix64's finaliser after each part: order matters, and every bit of every part counts.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state - (1 << 64) if state >> 63 else state


def sample_neighbors(
    csc: CSC,
    seeds: Tensor,
    fanout: int,
    *,
    key: int,
    replace: bool = False,
    weight: Tensor | None = None,
    time: Tensor | None = None,
    node_time: bool = False,
    time_sorted: bool = False,
    seed_time: Tensor | None = None,
    last: bool = False,
    exclude: Tensor | None = None,
    tree: Tensor | None = None,
    rng_ids: Tensor | None = None,
) -> Neighbors:
    """Up to `fanout` in-edges of each seed (-1: all of them).

    What is drawn for a seed is a function of `key`, its id and its tree alone. `weight` (by position; zero means never)
    makes draws proportional to it. With `time` (by position, or by source node when `node_time`) only edges of time <=
    `seed_time` count, uniformly or, with `last`, the most recent; candidates are then ordered by (time, position), and
    `time_sorted` promises that they are stored so. `exclude` are positions, ascending, that are never taken. `tree`
    gives each seed its own stream where trees are disjoint, `rng_ids` the original ids of relabelled seeds.

    Uniform sampling does O(fanout) work per seed whatever its degree, weighted sampling O(degree).
    """
    return Neighbors(
        *native.sample_neighbors(
            csc.indptr, csc.indices, seeds, fanout, replace, key, weight, time, node_time, time_sorted, seed_time,
            last, exclude, tree, rng_ids,
        )
    )  # fmt: skip


class SampledHops(NamedTuple):
    """All hops around a batch's seeds: nodes are the seeds as given, then others in the order they were first seen."""

    nodes: Tensor  # int64 [num_nodes], ids
    edge_index: Tensor  # int64 [2, num_edges], local ids of sources and destinations
    edge_ids: Tensor  # int64 [num_edges], or positions where the CSC has no ids
    counts: list[int]  # nodes per hop, the seeds first, then edges per hop
    weight: Tensor | None = None  # float32 [num_edges], where LABOR draws


class JoinedParts(NamedTuple):
    """A graph in parts as one structure: columns and edges are numbered over all parts, sources stay in local ids.

    Local id i of part p is node `bounds[0][p] + i` as far as the part's core goes, the others are listed in its halo.
    """

    indptr: Tensor  # int64 [num_columns + 1], over all parts
    indices: list[Tensor]  # int32 local ids, for each part
    halo: list[Tensor]  # global ids, for each part
    bounds: Tensor  # int64 [2, num_parts + 1] on the host: the first core node and the first edge of each, and the ends
    wide: bool  # whether global ids need 64 bits


def sample_hops(
    csc: CSC | JoinedParts,
    seeds: Tensor,
    fanouts: Sequence[int],
    *,
    keys: Sequence[int],
    replace: bool = False,
    labor: bool = False,
    on: Tensor,
    original: Tensor | None = None,
) -> SampledHops:
    """Hop after hop, up to `fanouts[hop]` in-edges (-1: all) of each node that the hop before it was the first to see.

    Each hop is a `sample_neighbors`, or with `labor` a `sample_labor`, by `keys[hop]`; `original` are the original ids
    of all nodes, where they were relabelled. On CUDA devices only: on the one that has the tensor `on`, which reads the
    structure in its own or in pinned memory. Seeds are on the host, int64. Waits once per hop, and once more.
    """
    if isinstance(csc, JoinedParts):
        indices, halo, bounds, edge_ids, wide = csc.indices, csc.halo, csc.bounds, None, csc.wide
    else:
        indices, halo, bounds, edge_ids, wide = [csc.indices], [], None, csc.edge_ids, False
    nodes, edge_index, edge_ids, counts, weight = native.sample_hops(
        csc.indptr, indices, halo, bounds, edge_ids, original, seeds, fanouts, keys, replace, labor, wide, on
    )
    return SampledHops(nodes, edge_index, edge_ids, counts.tolist(), weight if labor else None)


def find_edges(csc: CSC, src: Tensor, dst: Tensor) -> Tensor:
    """Positions of all edges src[i] -> dst[i] (parallel edges included), ascending: what `exclude` takes."""
    dtype = csc.indices.dtype
    for ids, bound, name in ((src, csc.num_src, "src"), (dst, csc.num_dst, "dst")):
        low, high = torch.stack(ids.aminmax()).tolist() if ids.numel() else (0, 0)  # on a device one wait for both
        if ids.numel() and not 0 <= low <= high < bound:
            raise ValueError(f"{name} must be in [0, {bound}), got {low} to {high}")
    return native.find_edges(csc.indptr, csc.indices, src.to(dtype).contiguous(), dst.to(dtype).contiguous())


@torch.library.register_fake("gnnsys::sample_neighbors")
def _(
    indptr, indices, seeds, fanout, replace, key, weight, time, node_time, time_sorted, seed_time, last, exclude, tree,
    rng_ids,
):  # fmt: skip
    size = torch.library.get_ctx().new_dynamic_size()
    return indptr.new_empty(seeds.shape[0] + 1), indices.new_empty(size), indptr.new_empty(size)


@torch.library.register_fake("gnnsys::sample_hops")
def _(indptr, indices, halo, bounds, edge_ids, original, seeds, fanouts, keys, replace, labor, wide, on):
    num_nodes, num_edges = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    nodes, edge_index = (on.new_empty(shape, dtype=torch.int64) for shape in ((num_nodes,), (2, num_edges)))
    weight = on.new_empty(num_edges if labor else 0, dtype=torch.float32)
    return nodes, edge_index, edge_index.new_empty(num_edges), seeds.new_empty(2 * len(fanouts) + 1), weight


@torch.library.register_fake("gnnsys::find_edges")
def _(indptr: Tensor, indices: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    return indptr.new_empty(torch.library.get_ctx().new_dynamic_size())
