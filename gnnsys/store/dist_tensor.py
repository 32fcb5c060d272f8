"""DistTensor: a table as one tensor, read and written by global row number, wherever its rows are."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import IdsLike, ids_of
from gnnsys.store.candidates import Located, Policy, remote_positions
from gnnsys.store.pull import PendingPull, Pull
from gnnsys.store.source import HOST, ReadContext

if TYPE_CHECKING:
    from gnnsys.store.store import Store


class DistTensor:
    """A view of the table `name` of `store`; a source of rows. `policy` is what its reads choose by, if given.

    >>> table = store.create("scores", 1000, (16,))  # doctest: +SKIP
    >>> table[torch.tensor([3, 999])] = torch.ones(2, 16)  # doctest: +SKIP
    >>> table[torch.tensor([999])].sum()  # doctest: +SKIP
    tensor(16.)
    """

    device = HOST

    def __init__(self, store: Store, name: str, policy: Policy | None = None) -> None:
        self.store, self.name, self.policy = store, name, policy

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
        """Whether some rows come from another process."""
        return self.store.is_remote(self.name, self.policy)

    @property
    def placement(self) -> Hashable:
        """Tables of one store that are cut alike have the rows of an id in the same place."""
        return id(self.store), self.store.spec(self.name).bounds

    def with_policy(self, policy: Policy | None) -> DistTensor:
        """The same table, read by another policy."""
        return DistTensor(self.store, self.name, policy)

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        """The ids grouped by part, with all candidates for their rows and the one that serves them."""
        return self.store.locate(self.name, ids, policy or self.policy)

    def remote_positions(self, ids: Tensor) -> Tensor:
        """Where in `ids` those stand whose rows come from another process, int64, ascending by part."""
        return remote_positions(self.locate(ids) if self.is_remote else [], ids.numel())

    def begin(
        self,
        ids: Tensor,
        out: Tensor | None,
        context: ReadContext,
        at: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> TableRead:
        """Adds a pull to those that leave with the context, one message per machine for all tables of the store.

        `columns` (int64) takes some values of the flattened row.
        """
        dtype, wire_dtype = self.dtype, context.wire_dtype
        ids = context.on(ids, HOST)
        if out is None and context.buffers is not None:
            row_shape = self.shape[1:] if columns is None else (columns.numel(),)
            out = context.empty((ids.numel(), *row_shape), dtype)
        narrows = wire_dtype is not None and dtype.is_floating_point and wire_dtype.itemsize < dtype.itemsize
        pull = Pull(
            self.name, ids, out=out, columns=columns, wire_dtype=wire_dtype if narrows else None, at=at,
            policy=context.policy or self.policy,
        )  # fmt: skip
        return context.collect(self.store, lambda: StorePulls(self.store)).add(pull)

    def pull(
        self,
        ids: IdsLike | slice,
        out: Tensor | None = None,
        columns: Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The rows of `ids`: a tensor, an array, a list, a range or a slice of row numbers, or a mask; see `Pull`."""
        return self.store.pull(
            [Pull(self.name, self._ids(ids), out, columns, wire_dtype, policy=self.policy)]
        ).result()[0]

    def read(self, ids: IdsLike | slice, out: Tensor | None = None) -> Tensor:
        """The rows of `ids`, in `out` if one is given."""
        return self.pull(ids, out)

    def begin_read(self, ids: IdsLike | slice, out: Tensor | None = None) -> TableRead:
        """Starts a read; `.result()` has the rows."""
        context = ReadContext()
        read = self.begin(self._ids(ids), out, context)
        context.send()
        return read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: IdsLike | slice) -> Tensor:
        return self.pull(ids)

    def __setitem__(self, ids: IdsLike | slice, rows: Any) -> None:
        if not isinstance(rows, Tensor):
            is_typed = isinstance(rows, np.ndarray)
            rows = torch.as_tensor(rows, device="cpu")
            rows = rows if is_typed else self._as_own(rows)
        self.store.push(self.name, self._ids(ids), rows).result()

    def _as_own(self, rows: Tensor) -> Tensor:
        """Whole numbers of a Python list in the table's dtype, where it holds them; other rows as they are."""
        if rows.dtype != torch.int64:
            return rows
        own = rows.to(self.dtype)
        return own if own.is_floating_point() or torch.equal(own.long(), rows) else rows

    def _ids(self, ids: IdsLike | slice) -> Tensor:
        if isinstance(ids, slice):
            return torch.arange(*ids.indices(self.shape[0]), device="cpu")
        return ids_of(ids, self.shape[0], f"index of table {self.name!r}", "row")

    def __repr__(self) -> str:
        return f"DistTensor({self.name!r}, {list(self.shape)}, {self.dtype})"


class StorePulls:
    """The pulls of one store that leave with a context: one message per machine for all of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pulls: list[Pull] = []
        self._context: ReadContext | None = None
        self._pending: PendingPull | None = None
        self._rows: list[Tensor] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def add(self, pull: Pull) -> TableRead:
        self._pulls.append(pull)
        return TableRead(self, len(self._pulls) - 1)

    @contextmanager
    def sending(self, context: ReadContext) -> Iterator[None]:
        self._context = context
        try:
            self._pending = self._store.pull(self._pulls, batch=context.batch)
        except BaseException as error:
            self._error = error
            raise
        yield

    def result(self) -> list[Tensor]:
        """The rows of every pull. Any thread may ask, again and again: the first one waits and puts rows in place."""
        assert self._context is not None, "context.send() comes before the result of a read"
        with self._lock:
            if self._pending is not None:
                try:
                    self._finish(self._pending, self._context)
                except BaseException as error:
                    self._error = error
                self._pending = None
        if self._error is not None:
            raise self._error
        return self._rows

    def _finish(self, pending: PendingPull, context: ReadContext) -> None:
        self._rows = pending.result()
        context.count(
            rows_asked=pending.rows_remote, bytes_remote=pending.bytes_remote, bytes_local=pending.bytes_local,
            bytes_left_out=pending.bytes_left_out,
        )  # fmt: skip


class TableRead:
    """A read of one table, under way with others."""

    def __init__(self, pulls: StorePulls, number: int) -> None:
        self._pulls, self._number = pulls, number

    def result(self) -> Tensor:
        return self._pulls.result()[self._number]
