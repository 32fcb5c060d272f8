"""Many steps of a loader's job through the model of the allocator, of which a few were traced.

Batches differ in size. A block that was freed is used again only where it is large enough, and what was reserved is
kept: so reserved memory grows over hundreds of steps. These effects are in the model:

- a step's storages, in its order, with the sizes of its own batch (`step_pattern.py`);
- a pool of memory per loading thread, for each has a stream of its own. Threads take batches in turn;
- while a batch is sampled, the workspaces of its hops, in their order;
- so many batches ahead as the loader has. The next one is begun before the one that was trained on is let go of, for
  the pipeline is fed when a batch is taken out of it;
- `is_late`: the memory of a batch comes back one step later, since its work was queued still (`record_stream`), and
  threads take batches by chance. This is the most that may be expected where the host is slower than the device.

Sizes of batches to come are drawn: of counts that are normal, with the means and covariances of the batches drawn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.planning.memory.caching_allocator import SMALL_SIZE, CachedBlock, CachingAllocator, round_size
from gnnsys.planning.memory.ledger import StorageRecord
from gnnsys.planning.memory.loader_batches import BatchCounts, HeldBatches
from gnnsys.planning.memory.step_pattern import StepPattern, TracedStep, count_values

MOST_STEPS = 2000
_PLACED = 64  # steps whose small blocks are placed; later ones are counted: their pool has grown by then
_SEED = 1


@dataclass(frozen=True)
class ManySteps:
    """`given` were there before the first step; those of a name in `copies` are the loading stream's. An epoch has
    `per_epoch` batches, and ends with one like `last` if that is there."""

    given: Sequence[StorageRecord]
    pattern: StepPattern
    drawn: Sequence[BatchCounts]
    held: HeldBatches
    workspaces: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[int]]
    num_steps: int
    is_sampled_there: bool
    per_epoch: int
    last: BatchCounts | None

    def replay(self, capacity: int | None = None, is_late: bool = False) -> CachingAllocator:
        """All of it; DeviceFull where `capacity` is too little."""
        memory = CachingAllocator(capacity)
        for record in self.given:
            if not record.on_host:
                memory.allocate(record.num_bytes, record.stream)
        window = self.held.lead
        batches = self._batches(window)
        loader = _Loader(self, memory, batches, is_late)
        main = _Trained(memory, self.pattern)
        for number in range(window):
            loader.make(number)
        for step in range(self.num_steps):
            loader.make(step + window)
            loader.let_go()
            main.run(step, batches.sizes[step])
            loader.trained(step)
        return memory

    def _batches(self, window: int) -> _Batches:
        """Those that were drawn, of which the first were traced, and more like them: an epoch's last one is shorter."""
        steps, total = self.pattern.steps, self.num_steps + window + 1
        traced = len(steps)
        counts = list(self.drawn[:total])
        whole, short = ([each for each in counts if each.is_whole is wanted] for wanted in (True, False))
        short += [self.last] if self.last is not None and not short else []
        more = iter(_like(whole, total - len(counts)))
        for number in range(len(counts), total):
            epoch, at = divmod(number, self.per_epoch)
            counts.append(short[epoch % len(short)] if short and at == self.per_epoch - 1 else next(more))
        values = torch.tensor([count_values(each) for each in counts], dtype=torch.float64, device="cpu")
        sizes = self.pattern.sizes(values).tolist()
        sizes[:traced] = [step.sizes for step in steps]
        return _Batches(counts, sizes)


@dataclass(frozen=True)
class _Batches:
    counts: list[BatchCounts]
    sizes: list[list[int]]  # of all storages of the step on each


class _Loader:
    """The memory of batches: made ahead by threads, let go of when the next one has come."""

    def __init__(self, steps: ManySteps, memory: CachingAllocator, batches: _Batches, is_late: bool) -> None:
        self._steps, self._memory, self._batches = steps, memory, batches
        self._num_streams = max(1, steps.held.making) if steps.is_sampled_there else 1
        self._by_chance = random.Random(_SEED) if is_late else None
        self._num_late, self._num_held = (1 if is_late else 0), 0
        self._made: dict[int, list[CachedBlock]] = {}
        self._trained: deque[list[CachedBlock]] = deque()
        memory.on_full = self._let_all_go

    def make(self, number: int) -> None:
        turn = number if self._by_chance is None else self._by_chance.randrange(self._num_streams)
        stream = 1 + turn % self._num_streams
        steps, memory = self._steps.pattern.steps, self._memory
        step: TracedStep = steps[min(number, len(steps) - 1)]
        counts, sizes = self._batches.counts[number], self._batches.sizes[number]
        scratch = [memory.allocate(size, stream) for size in self._steps.workspaces(counts.nodes, counts.edges)]
        made = [memory.allocate(sizes[slot], stream) for slot in step.given[: step.num_sampled]]
        for block in scratch:
            memory.free(block)
        made += [memory.allocate(sizes[slot], stream) for slot in step.given[step.num_sampled :]]
        self._made[number] = made

    def trained(self, number: int) -> None:
        self._trained.append(self._made.pop(number))
        self._num_held = 1  # until the next one has come

    def let_go(self) -> None:
        self._num_held = 0
        self._let_go_but(self._num_late)

    def _let_all_go(self) -> None:
        """Before it is out of memory torch waits for the device, and has back what was late."""
        if self._num_late:
            self._let_go_but(self._num_held)

    def _let_go_but(self, number: int) -> None:
        while len(self._trained) > number:
            for block in self._trained.popleft():
                self._memory.free(block)


class _Trained:
    """The memory of steps."""

    def __init__(self, memory: CachingAllocator, pattern: StepPattern) -> None:
        self._memory, self._pattern = memory, pattern
        lags = [event.lag or 0 for step in pattern.steps for event in step.events]
        self._made: deque[list[Any]] = deque(maxlen=1 + max(lags, default=0))  # of the last steps, by slot

    def run(self, number: int, sizes: Sequence[int]) -> None:
        memory, steps = self._memory, self._pattern.steps
        step = steps[min(number, len(steps) - 1)]
        is_placed = number < max(_PLACED, len(steps))
        made: list[Any] = [None] * len(sizes)
        self._made.appendleft(made)
        for slot, lag in step.events:
            if lag is None:
                size = sizes[slot]
                if is_placed or size > SMALL_SIZE:
                    made[slot] = memory.allocate(size)
                else:
                    made[slot] = size = round_size(size)
                    memory.count(size)
                continue
            if lag >= len(self._made):
                continue
            held, self._made[lag][slot] = self._made[lag][slot], None
            if isinstance(held, CachedBlock):
                memory.free(held)
            elif held is not None:
                memory.count(-held)


def _like(drawn: Sequence[BatchCounts], number: int) -> list[BatchCounts]:
    """More batches, of counts with the same means and covariances."""
    if number <= 0 or not drawn:
        return []
    first = drawn[0]
    lengths = [len(each) for each in (*first.nodes, *first.edges)]
    flat = torch.tensor([_flat(counts) for counts in drawn], dtype=torch.float64, device="cpu")
    mean = flat.mean(0)
    apart = (flat - mean) / max(1, len(drawn) - 1) ** 0.5  # [num_drawn, counts]: of which covariances are the squares
    drawer = torch.Generator("cpu").manual_seed(_SEED)
    normal = torch.randn(number, len(drawn), generator=drawer, dtype=torch.float64, device="cpu")
    return [_shaped(row, lengths, len(first.nodes)) for row in _rounded(mean + normal @ apart)]


def _rounded(counts: Tensor) -> list[list[int]]:
    return counts.round().clamp(min=0).to(torch.int64).tolist()  # type: ignore[no-any-return]


def _flat(counts: BatchCounts) -> list[int]:
    return [count for each in (*counts.nodes, *counts.edges) for count in each]


def _shaped(flat: Sequence[int], lengths: Sequence[int], num_node_types: int) -> BatchCounts:
    parts, at = [], 0
    for length in lengths:
        parts.append(tuple(flat[at : at + length]))
        at += length
    return BatchCounts(tuple(parts[:num_node_types]), tuple(parts[num_node_types:]))
