"""A feature source of the user's own kind: rows that come when they are let."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BRINGING = ("copy", "arrive")  # stages that a loader has where its batches go to a device
DEADLINE = 120.0  # seconds; a test that waits so long has failed


class Source:
    """Rows of a tensor, as if they were far away. `before_result(number)` is called in each read's result."""

    def __init__(
        self,
        rows: Tensor,
        mutable: bool | None = None,
        before_begin: Callable[[int], None] = lambda number: None,
        before_result: Callable[[int], None] = lambda number: None,
    ) -> None:
        if mutable is not None:
            self.mutable = mutable
        self.rows = rows
        self.begun: list[Tensor] = []
        self.finished: list[int] = []
        self._before_begin = before_begin
        self._before_result = before_result
        self._lock = threading.Lock()

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.rows, 0, ids, out=out)

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.read(ids)

    def begin_read(self, ids: Tensor, out: Tensor) -> Read:
        with self._lock:
            number = len(self.begun)
            self.begun.append(ids)
        self._before_begin(number)
        return Read(self, number, ids, out)


class Read:
    def __init__(self, source: Source, number: int, ids: Tensor, out: Tensor) -> None:
        self._source, self._number, self._ids, self._out = source, number, ids, out

    def result(self) -> Tensor:
        self._source._before_result(self._number)
        self._out.copy_(self._source.rows[self._ids])
        self._source.finished.append(self._number)
        return self._out


class Fresh(Source):
    """Reads return tensors of their own and leave `out` alone; `change` is done to them."""

    def __init__(
        self, rows: Tensor, mutable: bool | None = None, change: Callable[[Tensor], Any] = lambda r: r
    ) -> None:
        super().__init__(rows, mutable)
        self._change = change

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return self._change(self.rows[ids])

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> Any:
        return SimpleNamespace(result=lambda: self.read(ids))


class Barrier:
    """Lets nobody through before `number` have come."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._open = threading.Event()

    def come(self, number: int) -> None:
        if number + 1 >= self._number:
            self._open.set()

    def wait(self, number: int) -> None:
        assert self._open.wait(DEADLINE), f"only those before number {self._number} have come"
