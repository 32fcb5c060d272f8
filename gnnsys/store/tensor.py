"""DistTensor: a table as one tensor, read and written by global row number, wherever its rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnsys.store.pull import PendingPull, Pull

if TYPE_CHECKING:
    from gnnsys.store.store import Store


class DistTensor:
    """A view of the table `name` of `store`; a FeatureSource.

    >>> table = store.create("scores", 1000, (16,))  # doctest: +SKIP
    >>> table[torch.tensor([3, 999])] = torch.ones(2, 16)  # doctest: +SKIP
    >>> table[torch.tensor([999])].sum()  # doctest: +SKIP
    tensor(16.)
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.store.spec(self.name).shape

    @property
    def dtype(self) -> torch.dtype:
        return self.store.spec(self.name).dtype

    @property
    def mutable(self) -> bool:
        """Whether rows change while they are read: such rows are never fetched ahead."""
        return self.store.spec(self.name).mutable

    @property
    def is_remote(self) -> bool:
        """Whether some rows can only be had from another process."""
        return any(places[0].rows is None for places in self.store.places(self.name))

    def remote_positions(self, ids: Tensor) -> Tensor:
        """Where in `ids` those stand whose rows can only be had from another process, int64, ascending by part."""
        if not self.is_remote:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        found = []
        for run in self.store.locate(self.name, ids):
            if run.places[0].rows is None:
                found.append(torch.arange(ids.numel(), device="cpu") if run.order is None else run.order)
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")

    def pull(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        columns: Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The rows of `ids`; see `Pull`."""
        return self.store.pull([Pull(self.name, ids, out, columns, wire_dtype)]).result()[0]

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of `ids`, in `out` if one is given."""
        return self.pull(ids, out)

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> Reading:
        """Starts a read; `.result()` has the rows."""
        return Reading(self.store.pull([Pull(self.name, ids, out)]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Tensor | slice) -> Tensor:
        return self.pull(self._ids(ids))

    def __setitem__(self, ids: Tensor | slice, rows: Tensor) -> None:
        self.store.push(self.name, self._ids(ids), rows).result()

    def _ids(self, ids: Tensor | slice) -> Tensor:
        if isinstance(ids, slice):
            return torch.arange(*ids.indices(self.shape[0]), device="cpu")
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"table {self.name!r} is indexed by int32 or int64 row numbers or a slice, got {ids!r}")
        return ids

    def __repr__(self) -> str:
        return f"DistTensor({self.name!r}, {list(self.shape)}, {self.dtype})"


class Reading:
    """A read under way."""

    def __init__(self, pending: PendingPull) -> None:
        self._pending = pending

    def result(self) -> Tensor:
        return self._pending.result()[0]
