"""A stage: one step of a batch's way, a callable that takes the batch and returns it.

Stages know nothing of each other; what runs before, after and beside them is the pipeline's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """`run(batch) -> batch`, with its own threads and its own bound.

    `threads`: how many run it at once. 0: no thread of its own, whoever takes its result runs it (the next stage's
    thread, or the consumer behind the last stage). `depth`: how many finished batches may wait behind it; 0 is the
    same as no threads. `native_threads`: what `torch.set_num_threads` is told in each thread. `setup(worker)` is
    called once in each thread, with its number, before the first batch.
    """

    name: str
    run: Callable[[Any], Any]
    threads: int = 1
    depth: int = 2
    native_threads: int = 1
    setup: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.threads < 0 or self.depth < 0:
            raise ValueError(
                f"stage {self.name!r}: threads and depth must be >= 0, got threads={self.threads}, depth={self.depth}"
            )
        if self.native_threads < 1:
            raise ValueError(f"stage {self.name!r}: native_threads must be >= 1, got {self.native_threads}")

    @property
    def is_inline(self) -> bool:
        return self.threads == 0 or self.depth == 0


@dataclass
class StageCounters:
    """Where a stage's time went, summed over its threads (seconds), and how many batches wait behind it now."""

    batches: int = 0
    busy: float = 0.0  # inside run
    starved: float = 0.0  # waiting for a batch to work on
    blocked: float = 0.0  # waiting for room behind it
    waiting: int = 0

    def add(self, other: StageCounters) -> None:
        self.batches += other.batches
        self.busy += other.busy
        self.starved += other.starved
        self.blocked += other.blocked


@dataclass(frozen=True)
class Failure:
    """Travels in the place of a batch whose stage raised, so that it surfaces in its turn."""

    stage: str
    error: BaseException

    def raise_for(self, position: int) -> None:
        """Raises the stage's own exception, with its own traceback, and a note that says where it came from."""
        add_note(self.error, f"in stage {self.stage!r} of the loading pipeline, batch {position}")
        raise self.error


def add_note(error: BaseException, note: str) -> None:
    """PEP 678's note; Python 3.10 does not print notes, so there it joins the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({note})",)
