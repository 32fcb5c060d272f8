"""Whose ids these are: groups ids by the contiguous ranges that parts own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, sort_bytes, tells_workspace


class Buckets(NamedTuple):
    """Ids grouped by bucket, in their own order within each: bucket b has the next counts[b] of them."""

    counts: Tensor  # int64 [num_buckets]
    order: Tensor  # int64 [num_ids], where in the input the j-th grouped id stands
    local: Tensor  # dtype of the ids [num_ids], the j-th grouped id minus its bucket's first id


def bucket_ids(ids: Tensor, bounds: Tensor) -> Buckets:
    """Groups `ids` by the range they fall into; bucket b owns [bounds[b], bounds[b + 1]), int64 from 0 on.

    >>> bucket_ids(torch.tensor([7, 0, 5, 6]), torch.tensor([0, 5, 9]))
    Buckets(counts=tensor([1, 3]), order=tensor([1, 0, 2, 3]), local=tensor([0, 2, 0, 1]))
    """
    return Buckets(*native.bucket_ids(ids.contiguous(), bounds))


_IDS_PER_THREAD = 1 << 14


@tells_workspace("bucket_ids", "cpu")
def _(expected: Expected, ids: Tensor, bounds: Tensor) -> int:
    return 4 * ids.numel() + 8 * (bounds.numel() - 1) * expected.shares(ids.numel(), _IDS_PER_THREAD)


@tells_workspace("bucket_ids", "cuda")
def _(expected: Expected, ids: Tensor, bounds: Tensor) -> int:
    key = 4 if ids.numel() < 2**31 else 8
    return 4 * key * ids.numel() + 8 * bounds.numel() + sort_bytes(ids.numel(), key)
