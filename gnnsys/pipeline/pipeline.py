"""The loop that drives stages: batches leave in the order in which the source gives them.

The caller's thread feeds the pipeline: each `next` first puts more batches from the source into the first stage, then
takes the next result. So the source may use the caller's random generators, and no stage runs further ahead than its
depth.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from gnnsys.pipeline.channel import ChannelClosed
from gnnsys.pipeline.stage import Failure, OfThisProcess, Stage, StageCounters
from gnnsys.pipeline.workers import Observer, Parcel, Scope, StageChain, Workers, total

Source: TypeAlias = Callable[[int], Iterable[Any]]
"""`source(position)` yields the batches from number `position` on, the same ones at every call; it may be endless."""


class Pipeline:
    """An iterator over `source` passed through `stages`.

    If a stage raises, `next` raises the same exception when that batch would be delivered, and closes the pipeline.
    `close` (also called on garbage collection and at exit) ends every thread. `state_dict` counts the batches that the
    caller has received, not those in flight; after loading it, the next batch is the one after those.
    `on_ask(position, waits)` is called when the caller asks for a batch, in its thread; `waits`: it is not there yet.

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
        on_ask: Callable[[int, bool], None] | None = None,
    ) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages must have different names, got {names}")
        self._of_this_process = OfThisProcess("pipeline")
        self._source, self._on_ask = source, on_ask
        self._timeout = timeout
        self._position = position
        self._batches: Iterator[Parcel] | None = _parcels(source, position)
        self._fed = self._taken = 0  # batches put in and taken out since the threads started
        self._delivered = 0
        self._waited = 0.0
        groups, inline = _group(stages)
        self._inline = StageChain(inline, None, bool(groups), observer, scope)
        self._window = sum(group[-1].threads + group[-1].depth for group in groups)
        self._workers = Workers(groups, inline[0] if inline else None, observer, scope) if groups else None
        self._is_closed, self._pid = False, os.getpid()
        if self._workers is not None:
            weakref.finalize(self, self._workers.close)
            self._feed()

    # -- iterating ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Any:
        if self.is_closed:
            why = "was closed, or ended by an error" if self._is_closed else "has its threads in another process"
            raise RuntimeError(f"this pipeline {why}: make a new one")
        if self._on_ask is not None:
            waits = self._workers is not None and self._workers.channels[-1].would_wait()
            self._on_ask(self._position, waits)
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
            except ChannelClosed:
                raise RuntimeError("the pipeline was closed while a batch was waited for") from None
            except KeyboardInterrupt:  # the batch may be lost: what is in flight cannot be trusted
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
                break
            except Exception as error:  # raised after the batches before it
                parcel, self._batches = Parcel(-1, Failure("source", error)), None
            self._workers.channels[0].put(self._fed, parcel)
            self._fed += 1
        if self._batches is None:
            self._workers.finish(self._fed)

    # -- position and state ------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The number of the batch that `next` returns, counted from the start of the source."""
        return self._position

    @property
    def is_closed(self) -> bool:
        """Closed, or in a forked child, which has none of its threads."""
        return self._is_closed or (self._workers is not None and os.getpid() != self._pid)

    def seek(self, position: int, source: Source | None = None) -> None:
        """Continues at `position`, of another source if given, with the same threads. Drops what is in flight."""
        if self.is_closed:
            raise RuntimeError("this pipeline was closed: make a new one")
        if source is not None:
            self._source = source
        self._position = position
        self._batches = _parcels(self._source, position)
        if self._workers is not None:
            self._workers.first_live = self._fed
            self._workers.finish(None)
            self._feed()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seek(int(state["position"]))

    # -- counters and end --------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, StageCounters]:
        """Counters of each stage, in order, then of `consumer`: batches delivered, seconds waited for them."""
        behind = [] if self._workers is None else self._workers.counters
        out = total([*behind, *self._inline.counters])
        if self._workers is not None:
            self._workers.add_waiting(out)
        out["consumer"] = StageCounters(batches=self._delivered, starved=self._waited)
        return out

    def close(self) -> None:
        self._is_closed = True
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
    """Splits stages into groups that each end with a threaded stage, and the inline stages after the last group."""
    groups: list[list[Stage]] = []
    inline: list[Stage] = []
    for stage in stages:
        inline.append(stage)
        if not stage.is_inline:
            groups.append(inline)
            inline = []
    return groups, inline
