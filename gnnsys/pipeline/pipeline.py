"""The loop that drives stages: batches go in where the schedule says and come out in the same order.

The consumer feeds: each `next` tops up what is in flight from the source, in the caller's thread, then takes the next
result. So the source may draw from the caller's generators, and nothing runs further ahead than the stages' depths.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from gnnsys.pipeline.channel import Closed
from gnnsys.pipeline.stage import Failure, OfThisProcess, Stage, StageCounters
from gnnsys.pipeline.workers import Observer, Parcel, Run, Scope, Workers, total

Source: TypeAlias = Callable[[int], Iterable[Any]]
"""`source(position)` gives the batches from number `position` on, always the same: a schedule, possibly endless."""


class Pipeline:
    """An iterator over `source` passed through `stages`.

    A stage's exception is raised by `next` in its batch's turn, with its own traceback, and closes the pipeline.
    `close` (also on garbage collection and at exit) ends every thread. What `state_dict` says is what the consumer
    has seen, whatever is in flight; loading it makes the next batch the one after.

    >>> squares = Pipeline(lambda start: range(start, 4), [Stage("square", lambda x: x * x, threads=2)])
    >>> list(squares)
    [0, 1, 4, 9]
    """

    def __init__(
        self,
        source: Source,
        stages: Sequence[Stage],
        *,
        position: int = 0,
        timeout: float | None = None,
        observer: Observer | None = None,
        scope: Scope | None = None,
    ) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages must have different names, got {names}")
        self._of_this_process = OfThisProcess("pipeline")
        self._source = source
        self._timeout = timeout
        self._position = position
        self._batches: Iterator[Parcel] | None = _parcels(source, position)
        self._fed = self._taken = 0  # numbers of batches put in and taken out since the threads were started
        self._delivered = 0
        self._waited = 0.0
        groups, inline = _group(stages)
        self._inline = Run(inline, None, bool(groups), observer, scope)
        self._window = sum(group[-1].threads + group[-1].depth for group in groups)
        self._workers = Workers(groups, inline[0] if inline else None, observer, scope) if groups else None
        self.is_closed = False
        if self._workers is not None:
            weakref.finalize(self, self._workers.close)
            self._feed()

    # -- iterating ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Any:
        if self.is_closed:
            raise RuntimeError("this pipeline was closed, or ended by an error: make a new one")
        parcel = self._next_from_source() if self._workers is None else self._next_from_threads(self._workers)
        if not isinstance(parcel.item, Failure):
            parcel = self._inline(parcel)
        if isinstance(parcel.item, Failure):
            self.close()
            parcel.item.raise_for(self._position)
        self._position += 1
        self._delivered += 1
        return parcel.item

    def _next_from_source(self) -> Parcel:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    def _next_from_threads(self, workers: Workers) -> Parcel:
        self._feed()
        began = time.perf_counter()
        while self._taken < self._fed:
            try:
                index, parcel = workers.channels[-1].take(self._timeout)
            except TimeoutError:
                message = f"batch {self._position} was not ready within timeout={self._timeout} s; {workers.backlog()}"
                raise RuntimeError(message) from None
            except Closed:
                raise RuntimeError("the pipeline was closed while a batch was waited for") from None
            except KeyboardInterrupt:  # the batch may have been taken already: what is in flight cannot be trusted
                self.close()
                raise
            self._taken += 1
            self._feed()
            if index >= workers.first_live:
                self._waited += time.perf_counter() - began
                return parcel
        raise StopIteration

    def _feed(self) -> None:
        assert self._workers is not None
        while self._batches is not None and self._fed - self._taken < self._window:
            try:
                parcel = next(self._batches)
            except StopIteration:
                self._batches = None
                return
            except Exception as error:  # surfaces after the batches before it
                parcel, self._batches = Parcel(-1, Failure("source", error)), None
            self._workers.channels[0].put(self._fed, parcel)
            self._fed += 1

    # -- position and state ------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The number, in the source, of the batch that `next` returns."""
        return self._position

    def seek(self, position: int, source: Source | None = None) -> None:
        """Continues at `position` (of another source, if given) with the same threads; drops what is in flight."""
        if self.is_closed:
            raise RuntimeError("this pipeline was closed: make a new one")
        if source is not None:
            self._source = source
        self._position = position
        self._batches = _parcels(self._source, position)
        if self._workers is not None:
            self._workers.first_live = self._fed
            self._feed()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seek(int(state["position"]))

    # -- counters and end --------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, StageCounters]:
        """Per stage, in order, then `consumer`: what it got and how long it had to wait for it."""
        behind = [] if self._workers is None else self._workers.counters
        out = total([*behind, *self._inline.counters])
        if self._workers is not None:
            self._workers.add_waiting(out)
        out["consumer"] = StageCounters(batches=self._delivered, starved=self._waited)
        return out

    def close(self) -> None:
        self.is_closed = True
        self._batches = None
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _parcels(source: Source, position: int) -> Iterator[Parcel]:
    return (Parcel(number, item) for number, item in enumerate(source(position), start=position))


def _group(stages: Sequence[Stage]) -> tuple[list[list[Stage]], list[Stage]]:
    """Splits stages into runs that end with a threaded one, and the inline ones behind the last of them."""
    groups: list[list[Stage]] = []
    inline: list[Stage] = []
    for stage in stages:
        inline.append(stage)
        if not stage.is_inline:
            groups.append(inline)
            inline = []
    return groups, inline
