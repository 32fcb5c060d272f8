"""What a batch takes, over some batches: loading and training, without what a user does between two epochs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = float | torch.cuda.Event


@dataclass(frozen=True)
class MeasuredTurn:
    """The ends of some intervals between two batches, and how many batches these are."""

    ends: tuple[tuple[Mark, Mark], ...]
    num_batches: int

    def seconds(self) -> float | None:
        """That a batch took, once a device has come so far, which is waited for. None for a clock that stood still."""
        total = sum(_between(first, last) for first, last in self.ends)
        return total / self.num_batches if total > 0 else None


def _between(first: Mark, last: Mark) -> float:
    if isinstance(first, torch.cuda.Event):
        assert isinstance(last, torch.cuda.Event)
        last.synchronize()
        return 1e-3 * first.elapsed_time(last)
    assert isinstance(last, float)
    return last - first


class TurnClock:
    """Marks the moments at which batches are given out: from one to the next a batch is trained on and another loaded.

    On a GPU a mark is an event in the order of its work, so nothing is waited for while batches are made and trained
    on: whoever waits has loading run ahead meanwhile, and finds it faster than it is. `by_host` takes the host's clock,
    for so many batches that what a device has queued does not matter. An interval in which an epoch ends is left out.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._is_gpu = device is not None and device.type == "cuda"
        self._skips = False
        self.forget()

    def forget(self) -> None:
        """Measures nothing until the next `begin`."""
        self.is_measuring = False
        self._pieces: list[list[Mark]] = []
        self.num_batches = 0

    def begin(self, *, by_host: bool = False) -> None:
        """The batches behind the one that was just given out count."""
        self.forget()
        self.is_measuring, self._by_host, self._skips = True, by_host or not self._is_gpu, False
        self._pieces = [[self._mark()]]

    def skip(self) -> None:
        """What happens until the next batch is given out is no training."""
        self._skips = True

    def tick(self) -> None:
        """The user is given a batch."""
        if not self.is_measuring:
            return
        self.num_batches += 1
        if self._skips:
            self._pieces.append([])
            self._skips = False
        self._pieces[-1].append(self._mark())

    def end(self, num_batches: int) -> MeasuredTurn | None:
        """What was measured; None unless it is of so many batches, and ends of epochs hide less than half of them."""
        pieces, is_whole = self._pieces, self.num_batches == num_batches
        self.forget()
        count = sum(len(piece) - 1 for piece in pieces)
        if not is_whole or 2 * count < num_batches or count < 1:
            return None
        return MeasuredTurn(tuple((piece[0], piece[-1]) for piece in pieces if len(piece) > 1), count)

    def _mark(self) -> Mark:
        if self._by_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
