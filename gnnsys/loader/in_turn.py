"""A loader's batches made one after the other in the caller's thread, with a fixed number of them under way.

What a pipeline does depends on when its threads run: which batches are in flight together, and so which rows they
share. Here it depends on nothing but `ahead`, and each stage's own time can be measured: for counting what a run will
ask for, before there is one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from gnnsys.comm import RequestContext, use_context
from gnnsys.loader.batch import Batch
from gnnsys.loader.loader import Loader
from gnnsys.loader.sampled import Inputs, Sampled
from gnnsys.pipeline import Stage

_MOST_KEPT = 1 << 30  # bytes of samples


@dataclass
class BatchInTurn:
    """A batch, its number, and seconds of the caller's thread by stage; what asks for rows ahead is of its stage."""

    position: int
    batch: Batch
    seconds: dict[str, float] = field(default_factory=dict)


class KeptSamples:
    """Structures of a loader's batches, for other loaders of the same schedule on the same graph, wherever its parts
    are: a batch's structure is the same everywhere. What does not fit `most_bytes` is not kept."""

    def __init__(self, most_bytes: int = _MOST_KEPT) -> None:
        self._room, self._kept = most_bytes, dict[int, Sampled]()

    def keep(self, position: int, sampled: Sampled) -> None:
        size = sum(tensor.nbytes for tensor in sampled.tensors())
        if position not in self._kept and size <= self._room:
            self._room -= size
            self._kept[position] = replace(sampled, trace=None)

    def take(self, position: int, inputs: Inputs) -> Sampled | None:
        kept = self._kept.get(position)
        return None if kept is None else replace(kept, trace=inputs.trace)


def in_turn(
    loader: Loader, num_batches: int, *, ahead: int = 0, clock: Callable[[], float] = time.thread_time,
    samples: KeptSamples | None = None,
) -> Iterator[BatchInTurn]:  # fmt: skip
    """The first `num_batches` batches. `ahead` batches have been sampled, and their rows asked for, when the rows of
    one are waited for; 0 is what a loader without threads does.

    Batches of `samples` are not sampled again (they have no seconds of that stage); others are kept there. The pipeline
    of the loader itself is not used: iterate over one or the other.
    """
    stages, schedule = loader.stages_in_turn(), loader.schedule
    first = next((number for number, stage in enumerate(stages) if stage.begin is not None), len(stages))
    under_way: deque[tuple[int, Any, dict[str, float]]] = deque()
    for position, ticket in enumerate(islice(schedule.tickets(0), num_batches)):
        seconds: dict[str, float] = {}
        with use_context(_context(loader, position)):
            item: Any = ticket
            for stage in stages[:first]:
                kept = None if samples is None or stage.name != "sample" else samples.take(position, item)
                item = _timed(stage, stage.run, item, seconds, clock) if kept is None else kept
                if samples is not None and stage.name == "sample":
                    samples.keep(position, item)
            if first < len(stages):
                begin = stages[first].begin
                assert begin is not None
                item = _timed(stages[first], begin, item, seconds, clock)
        under_way.append((position, item, seconds))
        if len(under_way) > ahead:
            yield _finish(loader, under_way.popleft(), stages[first:], clock)
    while under_way:
        yield _finish(loader, under_way.popleft(), stages[first:], clock)


def _context(loader: Loader, position: int) -> RequestContext:
    """Who makes batches in turn waits for each of them."""
    return replace(loader.context.at(position), consumer=None)


def _finish(
    loader: Loader, begun: tuple[int, Any, dict[str, float]], stages: list[Stage], clock: Callable[[], float]
) -> BatchInTurn:
    position, item, seconds = begun
    with use_context(_context(loader, position)):
        for number, stage in enumerate(stages):
            if number and stage.begin is not None:
                item = _timed(stage, stage.begin, item, seconds, clock)
            item = _timed(stage, stage.run, item, seconds, clock)
    return BatchInTurn(position, item, seconds)


def _timed(
    stage: Stage, work: Callable[[Any], Any], item: Any, seconds: dict[str, float], clock: Callable[[], float]
) -> Any:
    began = clock()
    made = work(item)
    seconds[stage.name] = seconds.get(stage.name, 0.0) + clock() - began
    return made
