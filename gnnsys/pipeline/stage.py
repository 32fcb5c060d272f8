"""A stage: one step of a batch's way, a callable that takes the batch and returns it.

A stage does not know the others. The pipeline decides what runs before, after and beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BatchGroup:
    """`size` finished batches wait for each other behind a stage, fewer where they take `most_bytes` (None: no limit).

    `num_bytes(batch)` says what one takes.
    """

    size: int
    most_bytes: int | None = None
    num_bytes: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a group has a batch at least, got size={self.size}")


@dataclass(frozen=True)
class Stage:
    """`run(batch) -> batch`, with its own threads and its own bound.

    `threads`: how many threads run it. With 0 it is inline: the next stage's threads run it, or the consumer if it is
    the last. `depth`: how many finished batches may wait behind it; 0 makes it inline too. `native_threads`: the value
    for `torch.set_num_threads` in each thread. `setup(worker)` is called once in each thread, with the thread's number,
    before the first batch.

    `begin(batch) -> batch` is called before `run`, in the thread that brings the batch. A stage that waits for a
    network sends its request in `begin` and waits in `run`, so that the requests of several batches overlap.
    `counts()` returns totals of the stage's own, such as bytes, which are shown with its counters. `after` names the
    stage to follow, for a stage that a user adds to a loader. `group`: finished batches are passed on group by group,
    and those of the next group when the last of this one was taken; `depth` is then the group's size.
    """

    name: str
    run: Callable[[Any], Any]
    threads: int = 1
    depth: int = 2
    native_threads: int = 1
    setup: Callable[[int], None] | None = None
    begin: Callable[[Any], Any] | None = None
    counts: Callable[[], Mapping[str, int]] | None = None
    after: str | None = None
    group: BatchGroup | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            object.__setattr__(self, "depth", self.group.size)
        if self.threads < 0 or self.depth < 0:
            raise ValueError(
                f"stage {self.name!r}: threads and depth must be >= 0, got threads={self.threads}, depth={self.depth}"
            )
        if self.native_threads < 1:
            raise ValueError(f"stage {self.name!r}: native_threads must be >= 1, got {self.native_threads}")

    @property
    def is_inline(self) -> bool:
        return self.threads == 0 or self.depth == 0


class OfThisProcess:
    """A member of objects that own threads. Pickling or copying such an object raises an error that says why.

    Without it the error would be about a lock somewhere inside.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {self._owner} has threads and cannot be sent to another process, such as a spawned worker: make it "
            "there, in the function that the process runs"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"a {self._owner} has threads and cannot be copied: make another one")


@dataclass
class StageCounters:
    """Where a stage's time went, in seconds summed over its threads, and how many finished batches wait behind it."""

    batches: int = 0
    busy: float = 0.0  # inside run
    begun: float = 0.0  # inside begin, in the thread that brought the batch
    starved: float = 0.0  # waiting for a batch to work on
    blocked: float = 0.0  # waiting for room behind it
    waiting: int = 0  # finished batches behind it, now
    waiting_most: int = 0  # ... at most
    waiting_mean: float = 0.0  # ... on average, as each batch was taken
    counts: dict[str, int] = field(default_factory=dict)  # the stage's own

    def add(self, other: StageCounters) -> None:
        self.batches += other.batches
        self.busy += other.busy
        self.begun += other.begun
        self.starved += other.starved
        self.blocked += other.blocked


@dataclass(frozen=True)
class Failure:
    """Takes the place of a batch whose stage raised, so that the error is raised in the batch's turn."""

    stage: str
    error: BaseException

    def raise_for(self, position: int) -> None:
        """Raises the stage's own exception, with its own traceback, and a note that says where it came from."""
        add_note(self.error, f"in stage {self.stage!r} of the loading pipeline, batch {position}")
        raise self.error


def add_note(error: BaseException, note: str) -> None:
    """Adds a note (PEP 678). Python 3.10 has no notes: there it becomes part of the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({note})",)
