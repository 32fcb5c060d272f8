"""The threads of a pipeline and the channels between them.

Held by the pipeline and by the threads themselves, and holding neither the pipeline nor its source: so that a pipeline
nobody refers to is collected, and its finalizer ends the threads.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch

from gnnsys.pipeline.channel import Channel, Closed
from gnnsys.pipeline.stage import Failure, Stage, StageCounters

_JOIN_SECONDS = 10.0

Observer: TypeAlias = Callable[[int, str, float, float], None]
"""`observer(position, stage, began, ended)`: told of every piece of work on a batch, in the thread that did it."""


Scope: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""`scope(position)`: entered around all work on a batch, in the thread that does it."""


class Parcel(NamedTuple):
    """A batch on its way, or the Failure of one, with its number in the source."""

    position: int
    item: Any


class Run:
    """Stages that share a thread, as that thread runs them; `then` is the stage that the batch is brought to next.

    The first stage's `begin` has been called already if another thread brought the batch (`is_begun`).
    """

    def __init__(
        self, stages: Sequence[Stage], then: Stage | None, is_begun: bool, observer: Observer | None,
        scope: Scope | None = None,
    ) -> None:  # fmt: skip
        self.counters = [(stage, StageCounters()) for stage in stages]
        self._stages = tuple(self.counters)
        self._observer = observer
        self._scope = scope
        self._is_begun = is_begun
        self._then: tuple[Stage, StageCounters] | None = None
        if then is not None and then.begin is not None:
            self._then = then, StageCounters()
            self.counters.append(self._then)

    def __call__(self, parcel: Parcel) -> Parcel:
        """The batch as the stages leave it, or the Failure of the first that raised."""
        if self._scope is None:
            return self._run(parcel)
        with self._scope(parcel.position):
            return self._run(parcel)

    def _run(self, parcel: Parcel) -> Parcel:
        position, item = parcel
        for number, (stage, counter) in enumerate(self._stages):
            if stage.begin is not None and not (number == 0 and self._is_begun):
                item = self._begin(stage, counter, position, item)
            if isinstance(item, Failure):
                return Parcel(position, item)
            began = time.perf_counter()
            try:
                item = stage.run(item)
            except BaseException as error:
                return Parcel(position, Failure(stage.name, error))
            counter.batches += 1
            counter.busy += self._spent(position, stage, began)
        if self._then is not None:
            item = self._begin(*self._then, position, item)
        return Parcel(position, item)

    def _begin(self, stage: Stage, counter: StageCounters, position: int, item: Any) -> Any:
        assert stage.begin is not None
        began = time.perf_counter()
        try:
            item = stage.begin(item)
        except BaseException as error:
            return Failure(stage.name, error)
        counter.begun += self._spent(position, stage, began)
        return item

    def _spent(self, position: int, stage: Stage, began: float) -> float:
        ended = time.perf_counter()
        if self._observer is not None:
            self._observer(position, stage.name, began, ended)
        return ended - began


def total(counters: Sequence[tuple[Stage, StageCounters]]) -> dict[str, StageCounters]:
    """Counters by stage, summed over threads."""
    out: dict[str, StageCounters] = {}
    for stage, counter in counters:
        if stage.name not in out:
            out[stage.name] = StageCounters(counts={} if stage.counts is None else dict(stage.counts()))
        out[stage.name].add(counter)
    return out


class Workers:
    """One group of threads per stage that has threads; inline stages before it are run by its threads."""

    def __init__(
        self, groups: Sequence[Sequence[Stage]], then: Stage | None = None, observer: Observer | None = None,
        scope: Scope | None = None,
    ) -> None:  # fmt: skip
        self.first_live = 0  # batches with a smaller number were abandoned: passed on without work
        self.channels = [Channel(None), *(Channel(group[-1].depth) for group in groups)]
        self._groups = groups
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._runs: list[Run] = []
        started = threading.Semaphore(0)
        for number, group in enumerate(groups):
            following = groups[number + 1][0] if number + 1 < len(groups) else then
            for worker in range(group[-1].threads):
                run = Run(group, following, number > 0, observer, scope)
                self._runs.append(run)
                name = f"gnnsys-{group[-1].name}-{worker}"
                args = (group[-1], run, number, worker, started)
                self._threads.append(threading.Thread(target=self._work, args=args, name=name, daemon=True))
        native_threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            started.acquire(timeout=_JOIN_SECONDS)
        # A thread takes torch's process-wide count the first time it asks, and set_num_threads changes that count too:
        # the stages asked before they set theirs, and what held here is put back for threads to come.
        torch.set_num_threads(native_threads)

    def _work(self, stage: Stage, run: Run, number: int, worker: int, started: threading.Semaphore) -> None:
        counter = next(counter for of, counter in run.counters if of is stage)
        inbound, outbound = self.channels[number], self.channels[number + 1]
        broken = self._set_up(stage, worker)
        started.release()
        parcel: Any = None
        try:
            while True:
                began = time.perf_counter()
                index, parcel = inbound.take()
                counter.starved += time.perf_counter() - began
                if index < self.first_live:
                    parcel = Parcel(-1, None)
                elif not isinstance(parcel.item, Failure):
                    parcel = run(parcel) if broken is None else Parcel(parcel.position, broken)
                began = time.perf_counter()
                outbound.put(index, parcel)
                counter.blocked += time.perf_counter() - began
                parcel = None  # a batch must not live on because its thread waits for the next one
        except Closed:
            return

    def _set_up(self, stage: Stage, worker: int) -> Failure | None:
        try:
            torch.get_num_threads()
            torch.set_num_threads(stage.native_threads)
            if stage.setup is not None:
                stage.setup(worker)
        except BaseException as error:
            return Failure(stage.name, error)
        return None

    @property
    def counters(self) -> list[tuple[Stage, StageCounters]]:
        return [counter for run in self._runs for counter in run.counters]

    def add_waiting(self, counters: dict[str, StageCounters]) -> None:
        """How many finished batches wait behind each stage that has threads."""
        for group, channel in zip(self._groups, self.channels[1:], strict=True):
            counter = counters[group[-1].name]
            counter.waiting = len(channel)
            counter.waiting_most = channel.most_waiting
            counter.waiting_mean = channel.mean_waiting

    def backlog(self) -> str:
        """Who holds what up, for the message of a timeout: the first stage with nothing behind it."""
        waiting = ", ".join(
            f"{group[-1].name}: {len(channel)}" for group, channel in zip(self._groups, self.channels[1:], strict=True)
        )
        return f"finished batches per stage {{{waiting}}}"

    def close(self) -> None:
        """Ends every thread once its current call returns; also called by the finalizer and at exit."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads
        for channel in self.channels:
            channel.close()
        if threading.current_thread() in self._threads:
            return  # a collection inside a stage: this thread cannot wait for itself, all end on their own
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                message = f"{thread.name} is still inside its stage {_JOIN_SECONDS:.0f} s after the pipeline was closed"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
