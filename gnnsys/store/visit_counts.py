"""How often batches ask for each row, counted by the device that reads them: one addition per id, and no wait.

Counts of every other batch are kept apart, in the two halves of a word. Rows that were chosen by one half are judged by
the other: whoever chooses and judges by the same counts takes luck for a habit.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import DeviceReads

_HALF = 32  # bits of a count
_MOST_IDS = 1 << 31  # that are counted: no count runs over


class Visits(NamedTuple):
    """Counts of `num_batches` batches each, int64 [num_rows] on the host."""

    even: Tensor
    odd: Tensor
    num_batches: int

    def per_batch(self) -> Tensor:
        """How often a batch reads each row, float64."""
        return (self.even + self.odd).double() / max(2 * self.num_batches, 1)


class VisitCounts:
    """Counts for the rows of one table, or of several that are read with the same ids.

    >>> counts = VisitCounts(3, torch.device("cpu"))
    >>> counts.add(torch.tensor([2, 0])), counts.add(torch.tensor([2]))
    (None, None)
    >>> counts.take()
    Visits(even=tensor([1, 0, 1]), odd=tensor([0, 0, 1]), num_batches=1)
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows, self._device = num_rows, device
        self._lock = threading.Lock()
        self._words, self._reads, self._num_added, self._num_ids = self._zeros(), DeviceReads(), 0, 0

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    @property
    def num_batches(self) -> int:
        """Of each half, so far."""
        return self._num_added // 2

    def add(self, ids: Tensor) -> None:
        """A batch reads these rows. `ids` are on the device; a row counts as often as it is named."""
        if not ids.numel():
            return
        with self._lock:
            if self._num_ids + ids.numel() >= _MOST_IDS:
                return
            words, one = self._words, 1 << (_HALF * (self._num_added % 2))
            self._num_added, self._num_ids = self._num_added + 1, self._num_ids + ids.numel()
            if self._device.type == "cuda":
                self._reads(self._device, words)
        words.index_add_(0, ids, torch.full((1,), one, dtype=torch.int64, device=self._device).expand(ids.numel()))

    def take(self) -> Visits:
        """What was counted, which begins anew. Waits for the device."""
        zeros = self._zeros()
        with self._lock:
            words, num_added = self._words, self._num_added
            self._words, self._reads, self._num_added, self._num_ids = zeros, DeviceReads(), 0, 0
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # others may count on any stream
        words = words.cpu()
        return Visits(words & ((1 << _HALF) - 1), words >> _HALF, num_added // 2)

    def _zeros(self) -> Tensor:
        words = torch.zeros(self._num_rows, dtype=torch.int64, device=self._device)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return words
