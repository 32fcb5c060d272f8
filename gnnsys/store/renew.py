"""A pull of a table that was dropped and made anew since this process looked at it: it is looked at again, once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gnnsys.store.pull import PendingPull
from gnnsys.store.rows import Outdated


class RenewedPull(PendingPull):
    """`pending`, or what `start` starts in its place where the tables it asks for are gone."""

    def __init__(self, pending: PendingPull, start: Callable[[], PendingPull]) -> None:
        self._pending, self._start = pending, start
        self.bytes_remote = 0

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> list[Tensor]:
        try:
            rows = self._pending.result()
        except Outdated:
            self._pending = self._start()
            rows = self._pending.result()
        self.bytes_remote = self._pending.bytes_remote
        return rows
