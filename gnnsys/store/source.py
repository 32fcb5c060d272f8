"""Where features come from: anything that reads rows by id. A table is one; so is what a user writes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class PendingRead(Protocol):
    """A read under way."""

    def result(self) -> Tensor:
        """The rows, when they have come."""
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
        """The rows of `ids`, in `out` if one is given."""
        ...

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> PendingRead:
        """Starts a read and returns at once where that is possible."""
        ...
