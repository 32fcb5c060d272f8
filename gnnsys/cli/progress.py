"""A progress bar that needs nothing: redrawn in place on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

WIDTH = 28
REDRAW_SECONDS = 0.1
LOG_SHARE = 0.25  # without a terminal: a line per quarter


class Progress:
    """`with Progress(total, "epoch 1") as bar: bar.advance(note="loss 0.31")`."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        if total < 1:
            raise ValueError(f"total must be at least 1, got {total}")
        self._total, self._label = total, label
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._done, self._note = 0, ""
        self._start = time.perf_counter()
        self._drawn_at, self._drawn_done = -1.0, -1

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if self._drawn_done != self._done:
            self._draw()
        if self._is_terminal:
            self._stream.write("\n")
        self._stream.flush()

    def advance(self, steps: int = 1, note: str = "") -> None:
        self._done = min(self._done + steps, self._total)
        self._note = note or self._note
        if self._is_terminal:
            due = time.perf_counter() - self._drawn_at >= REDRAW_SECONDS
        else:
            due = self._done - max(self._drawn_done, 0) >= LOG_SHARE * self._total
        if due or self._done == self._total:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at, self._drawn_done = time.perf_counter(), self._done
        filled = WIDTH * self._done // self._total
        bar = "#" * filled + "." * (WIDTH - filled)
        seconds = self._drawn_at - self._start
        text = f"{self._label} [{bar}] {self._done}/{self._total} {seconds:5.1f} s  {self._note}"
        self._stream.write(f"\r\x1b[2K{text}" if self._is_terminal else f"{text.rstrip()}\n")
        self._stream.flush()
