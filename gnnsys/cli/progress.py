"""A progress bar that needs nothing: redrawn in place on a terminal, a line now and then in a log.

Driven by steps (`advance`), or by what rooms report: a bar is itself a `progress(done, total, what)` function.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

WIDTH = 28
REDRAW_SECONDS = 0.1
LOG_SHARE = 0.25  # without a terminal: a line per quarter
LOG_SECONDS = 1.0  # and of what is reported, none sooner after the last one
MOST_COUNTED = 100_000  # a larger total is bytes or edges: percent say more


class Progress:
    """`with Progress(total, "epoch 1") as bar: bar.advance(note="loss 0.31")`.

    Nothing is shown before `patience` seconds have passed, and nothing at all of what ends sooner.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None, *, patience: float = 0.0) -> None:
        if total < 1:
            raise ValueError(f"total must be at least 1, got {total}")
        self._total, self._label, self._patience = total, label, patience
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._done, self._note = 0, ""
        self._start = time.perf_counter()
        self._drawn_at, self._drawn_done, self._drawn_total = -1.0, -1, total

    @classmethod
    def reported(cls, label: str, stream: TextIO | None = None, *, patience: float = 1.0) -> Progress:
        """For what reports its own: `with Progress.reported("verify") as bar: verify_parts(path, progress=bar)`."""
        return cls(1, label, stream, patience=patience)

    def __call__(self, done: int, total: int, what: str) -> None:
        """`done` of `total`, whatever they count, while doing `what`; a new total begins a new stage."""
        total = max(total, 1)
        self._done, self._total, self._note = min(done, total), total, what
        since = time.perf_counter() - self._drawn_at
        if self._is_terminal:
            due = since >= REDRAW_SECONDS
        else:
            restarted = total != self._drawn_total or self._done < self._drawn_done or self._drawn_done < 0
            moved = self._done - self._drawn_done >= LOG_SHARE * total
            due = since >= LOG_SECONDS and (restarted or moved)
        if due:
            self._draw()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if (self._drawn_done, self._drawn_total) != (self._done, self._total):
            self._draw()
        if self._is_terminal and self._drawn_done >= 0:
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
        now = time.perf_counter()
        if now - self._start < self._patience:
            return
        self._drawn_at, self._drawn_done, self._drawn_total = now, self._done, self._total
        filled = WIDTH * self._done // self._total
        bar = "#" * filled + "." * (WIDTH - filled)
        seconds = self._drawn_at - self._start
        counted = self._total <= MOST_COUNTED
        amount = f"{self._done}/{self._total}" if counted else f"{100 * self._done // self._total:3d}%"
        text = f"{self._label} [{bar}] {amount} {seconds:5.1f} s  {self._note}"
        self._stream.write(f"\r\x1b[2K{text}" if self._is_terminal else f"{text.rstrip()}\n")
        self._stream.flush()
