"""Neighbour sampling on a CSC in several parts that are all at hand: typed face of `sample_parts`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, tells_workspace
from gnnsys.ops.sampling import Neighbors, drawing_bytes


class PartedCSC(NamedTuple):
    """In-edges of core nodes, part by part, in int32 local ids; lists have an entry per part.

    Local id i of part p is node `src_bounds[p] + i` as far as the part's core goes, the others are listed in its halo.
    """

    indptr: list[Tensor]  # int64 [num_columns + 1]
    indices: list[Tensor]  # int32 [num_edges]
    original: list[Tensor]  # original ids of the columns, all int32 or all int64
    halo: list[Tensor]  # global ids, all int32 or all int64
    dst_bounds: Tensor  # int64 [num_parts + 1], the first global id of each part's columns, and the end
    src_bounds: Tensor  # the same of its core nodes of the source type
    edge_bounds: Tensor  # the same of its edges


def sample_parts(
    csc: PartedCSC,
    seeds: Tensor,
    fanout: int,
    *,
    key: int,
    replace: bool = False,
    tree: Tensor | None = None,
    wide: bool,
) -> Neighbors:
    """Up to `fanout` in-edges of each seed (-1: all of them), uniformly, everything in global ids.

    What is drawn is what `sample_neighbors` draws with the original ids as `rng_ids`. Ids are int32 unless `wide`.
    """
    return Neighbors(*native.sample_parts(*csc, seeds, fanout, replace, key, tree, wide))


@torch.library.register_fake("gnnsys::sample_parts")
def _(
    indptr, indices, original, halo, dst_bounds, src_bounds, edge_bounds, seeds, fanout, replace, key, tree, wide
):  # fmt: skip
    size = torch.library.get_ctx().new_dynamic_size()
    ids = seeds.new_empty(size, dtype=torch.int64 if wide else torch.int32)
    return seeds.new_empty(seeds.shape[0] + 1, dtype=torch.int64), ids, seeds.new_empty(size, dtype=torch.int64)


@tells_workspace("sample_parts", "cpu")
def _(
    expected: Expected, indptr, indices, original, halo, dst_bounds, src_bounds, edge_bounds, seeds, fanout, *others
) -> int:  # fmt: skip
    return 24 * seeds.numel() + 80 * len(indptr) + drawing_bytes(expected, seeds.numel(), fanout)
