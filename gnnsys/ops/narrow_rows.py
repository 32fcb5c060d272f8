"""Rows of which some columns were left out, made whole again where they are used: on the host, or on a device.

A row that was pulled by some of its columns stays narrow until it is where the batch goes. `place[c]` says which of its
columns a narrow row has column c in, or 0 where it has none: `dropped` names those, and `values` is what they get.
"""

from __future__ import annotations

from torch import Tensor

from gnnsys.ops.store import move_rows


def widen_rows(narrow: Tensor, out: Tensor, at: Tensor, place: Tensor, dropped: Tensor, values: Tensor) -> Tensor:
    """`out[at[j]]` is row j of `narrow` with its columns where they belong and `values` in the others; returns `out`.

    All on one device. `at` names a row at most once. Nothing waits for the device.

    >>> import torch
    >>> widen_rows(torch.tensor([[7.0]]), torch.zeros(2, 2), torch.tensor([1]), torch.tensor([0, 0]),
    ...            torch.tensor([0]), torch.tensor([5.0]))
    tensor([[0., 0.],
            [5., 7.]])
    """
    if out.is_cpu:
        move_rows(narrow, out, order=at, columns=place)
        out[at[:, None], dropped] = values
        return out
    wide = narrow.index_select(1, place)
    wide.index_copy_(1, dropped, values.expand(wide.shape[0], -1).contiguous())
    return out.index_copy_(0, at, wide)


def fill_columns(rows: Tensor, is_whole: Tensor, dropped: Tensor, values: Tensor) -> Tensor:
    """Puts `values` into the columns `dropped` of every row that is not to stay whole; returns `rows`.

    Nothing waits for the device: all rows are written, those that stay whole with what they have.
    """
    kept = rows.index_select(1, dropped)
    return rows.index_copy_(1, dropped, kept.where(is_whole[:, None], values))
