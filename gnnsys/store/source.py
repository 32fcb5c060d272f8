"""Where features come from: anything that reads rows by id. A table is one; so is what a user writes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class PendingRead(Protocol):
    """A read under way."""

    def result(self) -> Tensor:
        """The rows, when they have come: `out` where the read has filled it, else a tensor of the source's own.

        Whoever began the read copies the latter; it has a row per id, of the source's row shape and dtype.
        """
        ...


@runtime_checkable
class FeatureSource(Protocol):
    """Rows by id. A user's own class may stand wherever a table or a tensor of features does.

    `shape` is [num_rows, *row_shape]. A source may say `mutable = False`: its rows never change, so that batches in
    flight may share them.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of `ids`: `out`, filled, or a tensor of its own, which the caller copies."""
        ...

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> PendingRead:
        """Starts a read and returns at once where that is possible. `out` may be filled until `result` returns."""
        ...


def put_rows(rows: Tensor, out: Tensor, name: str) -> Tensor:
    """`out` with the rows that a source returned, copied where it returned a tensor of its own.

    ValueError where they cannot be the rows that were asked for: another shape, another dtype, or no tensor.
    """
    if rows is out:
        return out
    if not isinstance(rows, Tensor) or rows.shape != out.shape or rows.dtype != out.dtype:
        got = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"the source of {name!r} must return rows {list(out.shape)} {out.dtype}, got {got}")
    return out.copy_(rows.detach())
