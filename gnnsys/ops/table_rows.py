"""Rows of a table that lies in pieces, some of them with a copy in a faster place: how a device reads a part's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, sort_bytes, tells_workspace


def read_table(
    pieces: Sequence[Tensor],
    firsts: Sequence[int],
    ids: Tensor,
    out: Tensor,
    *,
    num_rows: int,
    cache: Tensor | None = None,
    slots: Tensor | None = None,
    hits: Tensor | None = None,
) -> Tensor:
    """Fills `out` with the rows of `ids` that are cached or lie in a piece, and leaves the others alone; returns `out`.

    `pieces[k]` has the rows `firsts[k]` and on of a table of `num_rows` rows; pieces ascend. Row i is read from
    `cache[slots[i]]` where `slots[i]` (int32 [num_rows]) is not negative, and the number of such reads is added to
    `hits` (int64 [1]). On a GPU the pieces are all on the device or all in host memory that it can read, which is to be
    kept as `gather_rows` says.

    >>> read_table([torch.tensor([[5.0], [6.0]])], [1], torch.tensor([2, 0]), torch.zeros(2, 1), num_rows=3)
    tensor([[6.],
            [0.]])
    """
    if ids.is_cuda:
        native.read_table(list(pieces), list(firsts), cache, slots, num_rows, ids.contiguous(), out, hits)
        return out
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise ValueError(f"ids must be in [0, {num_rows}), got {int(ids.min())} to {int(ids.max())}")
    is_cached = torch.zeros_like(ids, dtype=torch.bool) if slots is None else slots[ids.long()] >= 0
    for piece, first in zip(pieces, firsts, strict=True):
        at = ((ids >= first) & (ids < first + piece.shape[0]) & ~is_cached).nonzero().view(-1)
        out[at] = piece[ids[at].long() - first]
    if cache is not None and slots is not None:
        at = is_cached.nonzero().view(-1)
        out[at] = cache[slots[ids[at].long()].long()]
        if hits is not None:
            hits += at.numel()
    return out


@torch.library.register_fake("gnnsys::read_table")
def _(srcs, firsts, cache, slots, num_rows, index, out, hits) -> None:
    return None


@tells_workspace("read_table", "cuda")
def _(expected: Expected, srcs, firsts, cache, slots, num_rows, index, out, hits) -> int:
    """Where pieces are in the host's memory, ids are read in order; the pieces' places go to the device."""
    on_device = all(src.is_cuda for src in srcs)
    return (0 if on_device else 16 * index.numel() + 4 + sort_bytes(index.numel(), 4)) + 64 * len(srcs)
