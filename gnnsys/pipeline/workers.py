"""The threads of a pipeline and the channels between them.

Held by the pipeline and by the threads themselves, and holding neither the pipeline nor its source: so that a pipeline
nobody refers to is collected, and its finalizer ends the threads.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gnnsys.pipeline.channel import Channel, Closed
from gnnsys.pipeline.stage import Failure, Stage, StageCounters

_JOIN_SECONDS = 10.0


def run_stages(stages: Sequence[Stage], item: Any, counters: Sequence[StageCounters]) -> Any:
    """Runs one batch through stages that share a thread; returns the batch, or the Failure of the first that raised."""
    for stage, counter in zip(stages, counters):
        began = time.perf_counter()
        try:
            item = stage.run(item)
        except BaseException as error:
            return Failure(stage.name, error)
        counter.batches += 1
        counter.busy += time.perf_counter() - began
    return item


class Workers:
    """One group of threads per stage that has threads; inline stages before it are run by its threads."""

    def __init__(self, groups: Sequence[Sequence[Stage]]) -> None:
        self.first_live = 0  # batches with a smaller number were abandoned: passed on without work
        self.channels = [Channel(None), *(Channel(group[-1].depth) for group in groups)]
        self._groups = groups
        self._pid = os.getpid()
        self._counters: list[tuple[Stage, StageCounters]] = []
        self._threads: list[threading.Thread] = []
        started = threading.Semaphore(0)
        for number, group in enumerate(groups):
            for worker in range(group[-1].threads):
                counters = [StageCounters() for _ in group]
                self._counters += zip(group, counters)
                name = f"gnnsys-{group[-1].name}-{worker}"
                args = (group, number, worker, counters, started)
                self._threads.append(threading.Thread(target=self._work, args=args, name=name, daemon=True))
        native_threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            started.acquire(timeout=_JOIN_SECONDS)
        # A thread takes torch's process-wide count the first time it asks, and set_num_threads changes that count too:
        # the stages asked before they set theirs, and what held here is put back for threads to come.
        torch.set_num_threads(native_threads)

    def _work(
        self,
        stages: Sequence[Stage],
        number: int,
        worker: int,
        counters: Sequence[StageCounters],
        started: threading.Semaphore,
    ) -> None:
        stage, counter = stages[-1], counters[-1]
        inbound, outbound = self.channels[number], self.channels[number + 1]
        broken = self._set_up(stage, worker)
        started.release()
        item: Any = None
        try:
            while True:
                began = time.perf_counter()
                index, item = inbound.take()
                counter.starved += time.perf_counter() - began
                if index < self.first_live:
                    item = None
                elif not isinstance(item, Failure):
                    item = broken or run_stages(stages, item, counters)
                began = time.perf_counter()
                outbound.put(index, item)
                counter.blocked += time.perf_counter() - began
                item = None  # a batch must not live on because its thread waits for the next one
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

    def counters(self) -> dict[str, StageCounters]:
        out: dict[str, StageCounters] = {}
        for stage, counter in self._counters:
            out.setdefault(stage.name, StageCounters()).add(counter)
        for group, channel in zip(self._groups, self.channels[1:]):
            out[group[-1].name].waiting = len(channel)
        return out

    def backlog(self) -> str:
        """Who holds what up, for the message of a timeout: the first stage with nothing behind it."""
        waiting = ", ".join(
            f"{group[-1].name}: {len(channel)}" for group, channel in zip(self._groups, self.channels[1:])
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
