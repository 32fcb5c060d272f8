"""One epoch of a PyG-style loader: torch's samplers choose the seeds, our pipeline loads ahead of the caller.

Our own code runs in background threads. The user's code (transforms, samplers, remote stores) runs in the calling
thread, unless `num_workers` was given.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from gnnsys.comm import BatchLoop, use_context
from gnnsys.loader import warn_of_no_batch
from gnnsys.pipeline import Pipeline, Stage
from gnnsys.pyg.elastic import first_number, first_seed, left_batches
from gnnsys.pyg.sampler import draw_seed
from gnnsys.sampling import SampleKey

if TYPE_CHECKING:
    from gnnsys.pyg.threaded_loader import ThreadedLoader


class BatchRequest(NamedTuple):
    """A batch to be made: the inputs that torch's sampler chose, and the key of everything random in it."""

    index: Any
    key: SampleKey


class Running:
    """An epoch and its pipeline. Refers to no loader, so a loader with persistent workers can be garbage collected."""

    def __init__(self, loader: ThreadedLoader) -> None:
        self.epoch = _begin(loader)
        self.pipeline = self._start(loader)

    def begin_again(self, loader: ThreadedLoader) -> None:
        """Starts the next epoch, with the same threads unless an error has ended them."""
        self.epoch = _begin(loader)
        if self.pipeline.is_closed:
            self.pipeline = self._start(loader)
        else:
            loader.forget()
            self.pipeline.seek(self.epoch.position, self.epoch.requests)

    def _start(self, loader: ThreadedLoader) -> Pipeline:
        loader.forget()
        timeout = loader.timeout if loader.timeout > 0 else None
        context = loader.context

        def scope(position: int) -> AbstractContextManager[None]:
            return use_context(context.at(position))

        clients = loader.clients

        def on_ask(position: int, waits: bool) -> None:
            context.await_batch(position, clients, waits)

        return Pipeline(
            self.epoch.requests, make_stages(loader), position=self.epoch.position, timeout=timeout, scope=scope,
            on_ask=on_ask,
        )  # fmt: skip


class EpochIterator:
    """What `iter(loader)` returns. With `persistent_workers` all iterators of a loader share the last epoch begun."""

    def __init__(self, loader: ThreadedLoader, running: Running) -> None:
        self._loader = loader
        self._running = running
        self._loop: BatchLoop | None = None  # from the first batch on: until then another epoch may be used

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        epoch = self._running.epoch
        if self._loop is None:
            self._loop = BatchLoop()
        try:
            batch = next(self._running.pipeline)
        except StopIteration:
            if self._loader.progress is epoch:
                self._loader.progress = None
                if 0 < epoch.start == epoch.seen:
                    warn_of_no_batch(epoch.number, self._loader.ranks.rank)
            self._leave()
            raise
        self._loop.use(self._loader.context.at(epoch.first + epoch.seen))
        epoch.seen += 1
        self._loader.progress = epoch
        return batch

    def __del__(self) -> None:  # an epoch that was left early
        self._leave()

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.leave()


def _begin(loader: ThreadedLoader) -> Epoch:
    """Begins an epoch. The loader's state is that of this epoch now, even if the one before was not finished."""
    epoch = Epoch(loader)
    loader.progress = epoch
    return epoch


class Epoch:
    """The seeds of an epoch, their order and the sampling key, all drawn from torch's generators when it begins.

    It keeps the generator's state of that moment, so that a saved epoch can begin again with the same seeds, order and
    neighbours, and skip the batches that were seen. After that, the loader's own `generator` is where an unbroken run
    would have it, so later epochs are the same too. torch's global generator is restored instead: the model draws from
    it as well, and the loader cannot know how much. An epoch that was left over by other ranks takes its batches and
    seed from their generators.
    """

    def __init__(self, loader: ThreadedLoader) -> None:
        state = loader.take_resume_state()
        random = loader.generator if loader.generator is not None else torch.default_generator
        before = random.get_state()
        if state is not None:
            random.set_state(state["generator"])
        self.generator_state = random.get_state()
        drawn = draw_seed(loader.generator)
        self.number = loader.next_epoch() if state is None else int(state["epoch"])
        self.seed, self._epoch = (drawn, 0) if loader.seed is None else (loader.seed, self.number)
        self.first = first_number(loader, self.number, _num_batches(loader))  # the batch number of its first batch
        batches = _on_host(loader._index_sampler)
        self.start = self.seen = 0 if state is None else int(state["batch"])
        # A RandomSampler draws when its first batch is asked for: do that here, not in a thread.
        first = list(itertools.islice(batches, self.start, self.start + 1))
        self._batches: Iterator[Any] = itertools.chain(first, batches)
        if state is not None and loader.generator is None:
            random.set_state(before)
        self._leftover = None if state is None else state.get("leftover")
        if state is not None and self._leftover is not None:
            assert loader.leftover is not None
            self._batches = left_batches(loader, loader.leftover, self.start)
            if loader.seed is None:
                self.seed = first_seed(loader, state)

    @property
    def position(self) -> int:
        """The number of the batch that the epoch begins or goes on with."""
        return self.first + self.start

    def requests(self, position: int) -> Iterator[BatchRequest]:
        for number, index in enumerate(self._batches, start=position - self.first):
            yield BatchRequest(index, SampleKey(self.seed, self._epoch, number))

    def state(self) -> dict[str, Any]:
        state = {"epoch": self.number, "batch": self.seen, "generator": self.generator_state}
        return {**state, "leftover": self._leftover}


def _num_batches(loader: ThreadedLoader) -> int:
    """Of an epoch; 0 where the user's sampler does not say: numbers then begin anew with every epoch."""
    try:
        return len(loader)
    except TypeError:
        return 0


def _on_host(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches, drawn on the CPU, where generators of samplers are, whatever the default device is."""
    left = iter(batches)
    while True:
        with torch.device("cpu"):
            batch = next(left, None)
        if batch is None:
            return
        yield batch


def make_stages(loader: ThreadedLoader) -> list[Stage]:
    """The stages of a loader, with their threads. Threads refer to the loader weakly, or they would keep it alive."""
    workers = loader.num_workers
    threads = workers or (loader.own_threads if loader.samples_ahead else 0)
    depth = max(1, (loader.prefetch_factor or 1) * workers if workers else 2)
    steps: list[tuple[str, Callable[[Any], Any], bool]] = [("sample", loader.sample_step, threads > 0)]
    begin = None
    if loader.joins_ahead:
        begin = loader.begin_join if loader.waits else None
        steps.append(("join", loader.join_step if begin is None else loader.finish_join, threads > 0))
        if loader.transform is not None:
            steps.append(("transform", loader.transform, workers > 0))
    else:
        steps.append(("filter", loader.filter_step, workers > 0 and loader.filter_per_worker))
    if loader.pin_memory and _can_pin():
        steps.append(("pin", pin_memory, workers > 0 and loader.filter_per_worker))
    last = max((i for i, step in enumerate(steps) if step[2]), default=-1)
    setup = _setup(loader) if workers else None
    stages = [
        Stage(name, _weakly(loader, run), threads if i == last else 0, depth, setup=setup)
        for i, (name, run, _) in enumerate(steps)
    ]
    if begin is not None:
        stages[1] = replace(stages[1], begin=_weakly(loader, begin))
        if last == 1:  # no user code: sampling threads send requests for rows, and one other thread waits for them
            stages[0] = replace(stages[0], threads=threads)
            stages[1] = replace(stages[1], threads=1, setup=None)
    return stages


def _weakly(loader: ThreadedLoader, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if getattr(function, "__self__", None) is not loader:
        return function
    reference = weakref.WeakMethod(function)

    def call(item: Any) -> Any:
        method = reference()
        assert method is not None, "the iterator holds its loader"
        return method(item)

    return call


def _setup(loader: ThreadedLoader) -> Callable[[int], None]:
    reference = weakref.ref(loader)

    def setup(worker: int) -> None:
        loader = reference()
        if loader is not None and loader.worker_init_fn is not None:
            loader.worker_init_fn(worker)

    return setup


def _can_pin() -> bool:
    if torch.accelerator.is_available():
        return True
    warnings.warn("pin_memory=True, but no accelerator is found: memory will not be pinned", stacklevel=4)
    return False
