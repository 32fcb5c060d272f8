"""What every loader is: a schedule, the stages a batch passes, and a pipeline that runs them across epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gnnsys.graph import Graph
from gnnsys.loader.batch import Batch
from gnnsys.loader.device import copy_stages, resolve
from gnnsys.loader.join import Join, Rows, Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.ops.buffers import BufferPool
from gnnsys.pipeline import Pipeline, Stage, StageCounters

_CALL = Ticket(epoch=-1, batch=0)  # the random stream of loader(ids), apart from every epoch's


class Loader:
    """Iterates over an epoch's batches, loaded ahead by `num_threads` threads, `prefetch` of them waiting.

    With `num_threads=0` everything happens in `next`. With `across_epochs` the pipeline runs on into the next epoch
    while this one ends; without it nothing is loaded between epochs (choose that if rows of the graph change then).
    Subclasses give the sample stage: a callable that turns a `Ticket` and the chosen inputs into a `Sampled`.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        sample: Callable[[Ticket, torch.Tensor], Sampled],
        *,
        transform: Callable[[Batch], Batch] | None,
        num_threads: int,
        prefetch: int,
        device: torch.device | str | None,
        across_epochs: bool,
    ) -> None:
        if num_threads < 0 or prefetch < 1:
            raise ValueError(f"num_threads must be >= 0 and prefetch >= 1, got {num_threads} and {prefetch}")
        target = resolve(device)
        self.graph = graph
        self._schedule = schedule
        self._sample = sample
        self._transform = transform
        num_arrays = sum(len(rows) for rows in (*graph.node_data.values(), *graph.edge_data.values()))
        pool = BufferPool(max_free=(prefetch + num_threads + 1) * num_arrays)  # what waits, is made, and is used
        self._join = Join(graph, Rows(pool, pin=target is not None))
        self._device = target
        self._across_epochs = across_epochs
        self._stages = self._make_stages(num_threads, prefetch)
        self._pipeline: Pipeline | None = None
        self._position = 0  # of the next batch, counted across epochs
        self._is_resuming = False
        self._iteration = 0

    def _make_stages(self, num_threads: int, prefetch: int) -> list[Stage]:
        # These must not refer to the loader: threads hold the stages, and would keep it alive.
        schedule, sample, join = self._schedule, self._sample, self._join
        stages = [Stage("sample", lambda ticket: sample(ticket, schedule.inputs(ticket)), threads=0)]
        stages.append(Stage("gather", join, threads=0 if self._transform else num_threads, depth=prefetch))
        if self._transform is not None:
            stages.append(Stage("transform", self._transform, threads=num_threads, depth=prefetch))
        if self._device is not None:
            stages += copy_stages(self._device, threads=min(1, num_threads))
        return stages

    # -- epochs ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._schedule)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position // max(1, len(self))

    def __iter__(self) -> Iterator[Batch]:
        if len(self) == 0:
            return iter(())
        if not self._is_resuming:  # an epoch that was left early is over
            self._position = -(-self._position // len(self)) * len(self)
        self._is_resuming = False
        self._iteration += 1
        return self._epoch(self._iteration, self._pipeline_at(self._position))

    def _epoch(self, iteration: int, pipeline: Pipeline) -> Iterator[Batch]:
        end = (self.epoch + 1) * len(self)
        try:
            while self._position < end:
                if iteration != self._iteration:
                    raise RuntimeError("another iteration over this loader has begun: use one loader for each")
                batch = next(pipeline)
                self._position += 1
                yield batch
                del batch  # not kept while the next one is waited for
        finally:
            if not self._across_epochs and iteration == self._iteration:
                self.close()

    def _pipeline_at(self, position: int) -> Pipeline:
        if self._pipeline is None or self._pipeline.is_closed:
            self._pipeline = Pipeline(self._source, self._stages, position=position)
        elif self._pipeline.position != position:
            self._pipeline.seek(position)
        return self._pipeline

    @property
    def _source(self) -> Callable[[int], Iterator[Ticket]]:
        schedule = self._schedule
        if self._across_epochs:
            return schedule.tickets
        return lambda position: schedule.tickets(position, end=(position // len(schedule) + 1) * len(schedule))

    def __call__(self, index: torch.Tensor | list[int]) -> Batch:
        """The batch of the given inputs (positions in what the loader was given), made here and now."""
        chosen = torch.as_tensor(index, dtype=torch.int64)
        if chosen.dim() != 1 or (chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < self._num_inputs):
            raise ValueError(f"index must be one-dimensional with values in [0, {self._num_inputs}), got {index}")
        batch = self._join(self._sample(_CALL, chosen))
        batch = batch if self._transform is None else self._transform(batch)
        return batch if self._device is None else batch.to(self._device)

    @property
    def _num_inputs(self) -> int:
        return self._schedule.num_inputs

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the consumer has seen; loaded into a loader made alike, the next batch is the one after."""
        epoch, batch = divmod(self._position, max(1, len(self)))
        return {"epoch": epoch, "batch": batch, **self._schedule.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `iter` go on where `state` was taken: with the rest of that epoch."""
        for name, ours in self._schedule.state().items():
            if state[name] != ours:
                raise ValueError(f"this state is of a loader with {name}={state[name]}, here it is {ours}")
        self._position = int(state["epoch"]) * len(self) + int(state["batch"])
        self._is_resuming = True
        self._iteration += 1

    # -- counters and end --------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, StageCounters]:
        """Batches and seconds per stage since the pipeline was started; empty before."""
        return {} if self._pipeline is None else self._pipeline.counters()

    def close(self) -> None:
        """Ends the threads; iterating again starts new ones. Also done on garbage collection and at exit."""
        if self._pipeline is not None:
            self._pipeline.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._num_inputs:,} inputs, {len(self)} batches per epoch)"
