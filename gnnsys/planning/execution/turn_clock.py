"""What a batch takes, over some batches: loading and training, without what a user does between two epochs."""

from __future__ import annotations

import time

import torch


class TurnClock:
    """Loading is the time in `next`, training the time until the next one; both are averaged by themselves.

    So a batch behind which an epoch ends counts with its loading alone. At both ends of a turn a GPU is waited for;
    many batches need no such wait (`waits=False`).
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._is_gpu = device is not None and device.type == "cuda"
        self._entered = 0.0
        self._left: float | None = None
        self._skips = False
        self.forget()

    def forget(self) -> None:
        """Measures nothing until the next `begin`."""
        self.is_measuring = False
        self._loading: list[float] = []
        self._training: list[float] = []

    def begin(self, *, waits: bool = True) -> None:
        """The batches from here on count."""
        self.forget()
        self.is_measuring = True
        self._left = self._now(waits)

    def skip(self) -> None:
        """What happens until the next batch is asked for is no training."""
        self._skips = True

    def enter(self) -> None:
        """The user asks for a batch."""
        self._entered = time.perf_counter()
        if self.is_measuring and self._left is not None and not self._skips:
            self._training.append(self._entered - self._left)
        self._skips = False

    def leave(self) -> None:
        """The user has a batch."""
        self._left = time.perf_counter()
        if self.is_measuring:
            self._loading.append(self._left - self._entered)

    @property
    def num_batches(self) -> int:
        """That count so far."""
        return len(self._loading)

    def end(self, num_batches: int, *, waits: bool = True) -> float | None:
        """Seconds a batch took; None unless so many were measured, and training was, which ends of epochs hide."""
        if len(self._loading) != num_batches or not self._training or self._left is None:
            self.forget()
            return None
        self._loading[-1] += self._now(waits) - self._left
        seconds = sum(self._loading) / len(self._loading) + sum(self._training) / len(self._training)
        self.forget()
        return seconds if seconds > 0 else None

    def _now(self, waits: bool) -> float:
        if waits and self._is_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
