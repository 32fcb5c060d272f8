"""Rows of which some have a copy in a faster place: the two-level gather under every device cache."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, takes_outputs_only, tells_workspace
from gnnsys.ops.rows import ordering_bytes


def gather_cached(
    cache: Tensor, slots: Tensor, src: Tensor, index: Tensor, out: Tensor, hits: Tensor | None = None
) -> Tensor:
    """`src[index]` into `out`, where row i is read from `cache[slots[i]]` unless `slots[i]` is negative; returns `out`.

    `slots` is int32 [len(src)]; `cache` has rows of src's shape and dtype, and is trusted to hold what `src` does. Cast
    to out's dtype between floating dtypes. The number of rows read from the cache is added to `hits` (int64 [1]), which
    waits for nothing. On a GPU everything but `src` is on the device; `src` may be pinned host memory, to be kept as
    `gather_rows` says.

    >>> gather_cached(torch.tensor([[7.0]]), torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([[6.0], [7.0]]),
    ...               torch.tensor([1, 0]), torch.empty(2, 1))
    tensor([[7.],
            [6.]])
    """
    native.gather_cached(cache, slots, src, index.contiguous(), out, hits)
    return out


@torch.library.register_fake("gnnsys::gather_cached")
def _(cache: Tensor, slots: Tensor, src: Tensor, index: Tensor, out: Tensor, hits: Tensor | None) -> None:
    return None


@tells_workspace("gather_cached", "cuda")
def _(expected: Expected, cache, slots, src, index, out, hits) -> int:
    return ordering_bytes(src, index)


takes_outputs_only("gather_cached", device_types=["cpu"])
