"""Neighbour sampling on one CSC: typed face of `sample_neighbors` and `find_edges`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, power_above, scan_bytes, sort_bytes, tells_workspace
from gnnsys.ops.csc import CSC

_MASK = 0xFFFFFFFFFFFFFFFF
LABOR_ROW_BYTES = 48  # what LABOR keeps of a seed on a device


class Neighbors(NamedTuple):
    """The in-edges chosen for each seed, seed after seed."""

    indptr: Tensor  # int64 [num_seeds + 1]
    ids: Tensor  # dtype of csc.indices, the neighbours
    positions: Tensor  # int64, positions in the CSC
    weight: Tensor | None = None  # float32, where a rule of drawing gives one


def stream_key(*parts: int, after: int = 0x9E3779B97F4A7C15) -> int:
    """Folds integers (seed, epoch, batch, hop, edge type, ...) into one signed 64-bit Philox key.

    SplitMix64's finaliser after each part: order matters, and every bit of every part counts. `after` is the key of the
    parts before these, where it is known.

    >>> stream_key(3, 1, 4) == stream_key(4, after=stream_key(3, 1))
    True
    """
    state = after & _MASK
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


@torch.library.register_fake("gnnsys::find_edges")
def _(indptr: Tensor, indices: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    return indptr.new_empty(torch.library.get_ctx().new_dynamic_size())


_SEEDS_PER_THREAD = 256
_LANES = 16  # seeds whose random words are made together
_SMALL_FANOUT = 16  # drawn in registers
_LANES_FANOUT = 64  # drawn for many seeds side by side
_SHARED_FANOUT = 2048  # drawn in a device's shared memory
_SCRATCH_LIMIT = 256 << 20


def drawing_bytes(expected: Expected, num_seeds: int, fanout: int) -> int:
    """Scratch bytes of all threads. Each thread draws for many seeds at once."""
    return expected.threads(num_seeds, _SEEDS_PER_THREAD) * _bytes_to_draw(fanout, _LANES)


def _bytes_to_draw(fanout: int, lanes: int) -> int:
    """Random words, ranks and the set of those that were drawn."""
    if fanout <= 0:
        return 0
    drawn = 0 if fanout <= _SMALL_FANOUT else 4 * power_above(2 * fanout, 128)
    words = 4 * (fanout + 3) * lanes
    ranks = 4 * fanout * (lanes if fanout <= _LANES_FANOUT else 1)
    of_one_lane = 4 * fanout if lanes > 1 else 0
    return words + ranks + of_one_lane + drawn


def choosing_bytes(num_seeds: int, fanout: int) -> int:
    """On a device: scratch of blocks whose draws do not fit its shared memory."""
    padded = power_above(max(fanout, 1))
    return 0 if padded <= _SHARED_FANOUT else min(num_seeds * 13 * padded, max(_SCRATCH_LIMIT, 13 * padded)) + (1 << 12)


@tells_workspace("sample_neighbors", "cpu")
def _(
    expected, indptr, indices, seeds, fanout, replace, key, weight, time, node_time, time_sorted, seed_time, last,
    exclude, tree, rng_ids,
) -> int:  # fmt: skip
    """Uniform draws need the seeds' rows. Others are collected by threads, which keep a row's candidates at a
    time; arrays that grow are up to twice as long as what they hold, and three times while they grow."""
    num_seeds = seeds.numel()
    if weight is None and time is None and (exclude is None or exclude.numel() == 0):
        return 16 * num_seeds + drawing_bytes(expected, num_seeds, fanout)
    candidate = 0
    if weight is not None:
        candidate = 2 * 8 + 3 * (8 if replace else 16)
    elif time is not None and not time_sorted:
        candidate = 3 * 16
    threads = expected.threads(num_seeds, _SEEDS_PER_THREAD)
    collected = 2 * 8 * expected.taken(num_seeds, fanout, indices.numel())
    most = fanout if fanout >= 0 else expected.degree(indices.numel())
    drawing = _bytes_to_draw(most, 1) if weight is None else 0
    return collected + threads * (candidate * expected.degree(indices.numel()) + drawing)


@tells_workspace("sample_neighbors", "cuda")
def _(
    expected, indptr, indices, seeds, fanout, replace, key, weight, time, node_time, time_sorted, seed_time, last,
    exclude, tree, rng_ids,
) -> int:  # fmt: skip
    """A row and a gap per seed. Weights and unsorted times: all candidates of all seeds are listed and sorted."""
    num_seeds = seeds.numel()
    rows = 24 * num_seeds + 2 * scan_bytes(num_seeds)
    if weight is None and (time is None or time_sorted):
        return rows + choosing_bytes(num_seeds, fanout)
    listed = expected.edges_of(num_seeds, indices.numel())
    return rows + (8 + 16 + 8 + 16 + 1 + 8 + 8) * listed + sort_bytes(listed, 8) + 2 * scan_bytes(listed)


@tells_workspace("find_edges", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, src: Tensor, dst: Tensor) -> int:
    """What threads find, and all of it to be sorted; one edge per pair unless more are expected."""
    found = src.numel() if expected.num_found is None else expected.num_found
    return 32 * found


@tells_workspace("find_edges", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, src: Tensor, dst: Tensor) -> int:
    found = src.numel() if expected.num_found is None else expected.num_found
    return 8 * (src.numel() + 1) + 24 * found + sort_bytes(found, 8) + 2 * scan_bytes(src.numel() + found)
