"""The threads of a pipeline and the channels between them.

The pipeline and the threads refer to `Workers`; it refers to neither the pipeline nor its source. So a pipeline that
nobody refers to is garbage collected, and its finalizer ends the threads.
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

from gnnsys.pipeline.channel import Channel, ChannelClosed
from gnnsys.pipeline.group_channel import GroupChannel
from gnnsys.pipeline.stage import Failure, Stage, StageCounters

_JOIN_SECONDS = 10.0

Observer: TypeAlias = Callable[[int, str, float, float], None]
"""`observer(position, stage, began, ended)` is called after each piece of work on a batch, in its thread."""


Scope: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""`scope(position)`: entered around all work on a batch, in the thread that does it."""


class Parcel(NamedTuple):
    """A batch (or the Failure that took its place) with its number in the source."""

    position: int
    item: Any

    @property
    def is_passed_on(self) -> bool:
        """Whether nothing is done with it any more: it was dropped by `seek`, or failed."""
        return self.item is None or isinstance(self.item, Failure)


class StageChain:
    """Consecutive stages that one thread runs, and then the `begin` of the stage `then` that follows them.

    `is_begun`: the `begin` of the first stage was called by the thread that brought the batch.
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
        """The batch after all stages, or the Failure of the first stage that raised."""
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


def _channel_behind(stage: Stage) -> Channel:
    return Channel(stage.depth) if stage.group is None else GroupChannel(stage.group)


class Workers:
    """Threads for each group of stages: one stage with threads, and the inline stages before it, which they run too."""

    def __init__(
        self, groups: Sequence[Sequence[Stage]], then: Stage | None = None, observer: Observer | None = None,
        scope: Scope | None = None,
    ) -> None:  # fmt: skip
        self.first_live = 0  # batches with a smaller number were dropped by `seek`: passed on without work
        self.channels = [Channel(None), *(_channel_behind(group[-1]) for group in groups)]
        self._groups = groups
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._chains: list[StageChain] = []
        started = threading.Semaphore(0)
        for number, group in enumerate(groups):
            following = groups[number + 1][0] if number + 1 < len(groups) else then
            for worker in range(group[-1].threads):
                chain = StageChain(group, following, number > 0, observer, scope)
                self._chains.append(chain)
                name = f"gnnsys-{group[-1].name}-{worker}"
                args = (group[-1], chain, number, worker, started)
                self._threads.append(threading.Thread(target=self._work, args=args, name=name, daemon=True))
        native_threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            started.acquire(timeout=_JOIN_SECONDS)
        # set_num_threads in a stage's thread also changes torch's process-wide count, which later threads start with.
        # So the count of before is restored here. The stages keep theirs: a thread reads the process-wide count only
        # once, and `_set_up` has made each of them read it.
        torch.set_num_threads(native_threads)

    def _work(self, stage: Stage, chain: StageChain, number: int, worker: int, started: threading.Semaphore) -> None:
        counter = next(counter for of, counter in chain.counters if of is stage)
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
                    parcel = chain(parcel) if broken is None else Parcel(parcel.position, broken)
                began = time.perf_counter()
                outbound.put(index, parcel)
                counter.blocked += time.perf_counter() - began
                parcel = None  # do not keep a batch alive while waiting for the next
        except ChannelClosed:
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
        return [counter for chain in self._chains for counter in chain.counters]

    def add_waiting(self, counters: dict[str, StageCounters]) -> None:
        """Adds how many finished batches wait behind each stage that has threads."""
        for group, channel in zip(self._groups, self.channels[1:], strict=True):
            counter = counters[group[-1].name]
            counter.waiting = len(channel)
            counter.waiting_most = channel.most_waiting
            counter.waiting_mean = channel.mean_waiting

    def backlog(self) -> str:
        """Finished batches per stage, for the message of a timeout: the first stage with none is the slow one."""
        waiting = ", ".join(
            f"{group[-1].name}: {len(channel)}" for group, channel in zip(self._groups, self.channels[1:], strict=True)
        )
        return f"finished batches per stage {{{waiting}}}"

    def finish(self, count: int | None) -> None:
        """Says that there are `count` batches in all, for groups that would wait for more; None: there are more."""
        for channel in self.channels:
            if isinstance(channel, GroupChannel):
                channel.finish(count)

    def close(self) -> None:
        """Ends every thread after its current call. The finalizer calls it too, and so does exit."""
        if os.getpid() != self._pid:
            return  # a forked child has no threads
        for channel in self.channels:
            channel.close()
        if threading.current_thread() in self._threads:
            return  # called by the garbage collector inside a stage: a thread cannot join itself
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                message = f"{thread.name} is still inside its stage {_JOIN_SECONDS:.0f} s after the pipeline was closed"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
