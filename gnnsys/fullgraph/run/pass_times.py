"""What a pass took: seconds by what they were spent on, bytes sent, and records of each bin where some are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from gnnsys.observe import Span


@dataclass
class Times:
    """Seconds of one pass, there and back, by what they were spent on, payload bytes sent, and bytes that were copied
    to the device and back where rows live on the host."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    num_bytes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    spans: list[Span] | None = field(default=None, repr=False)  # None where no records are kept

    def computed(self, began: float, is_back: bool, step: int, number: int) -> None:
        """A bin, from `began` until now."""
        self.compute += self._note("backward" if is_back else "forward", began, step, number)

    def sent(self, began: float, step: int, number: int, num_bytes: int) -> None:
        self.send += self._note("send", began, step, number, num_bytes)

    def reduced(self, step: int) -> None:
        """The sum over ranks of what a step's parameters get begins."""
        self._note("reduce", time.perf_counter(), step, -1)

    def waited(self, began: float) -> None:
        self.wait += self._note("wait", began, -1, -1)

    def _note(self, what: str, began: float, step: int, number: int, num_bytes: int = 0) -> float:
        ended = time.perf_counter()
        if self.spans is not None:
            self.spans.append(Span(what, step, number, began, ended, num_bytes))
        return ended - began


class PassClock:
    """Seconds of one pass, there and back, without what a user does between; `done` is told when it is over.

    A GPU is waited for at the beginning and the end of both.
    """

    def __init__(self, device: torch.device, done: Callable[[float], None]) -> None:
        self._device, self._done = device, done
        self._seconds = 0.0

    @contextlib.contextmanager
    def running(self, *, is_back: bool) -> Iterator[None]:
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self._seconds += time.perf_counter() - began
        if is_back:
            self._done(self._seconds)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
