"""What every step of a loader's job does to memory, learned from the few that were traced.

Steps on sampled batches make and free the same storages in the same order. Only their sizes differ. The size of a
storage follows one count of the batch, such as the nodes within two hops:

    bytes = slope * count + fixed

Of a batch that was not traced the storages are those of its counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.planning.memory.ledger import GIVEN, StorageRecord
from gnnsys.planning.memory.loader_batches import BatchCounts

_FEWEST = 3  # steps that are alike: a line goes through any two
_MOST_OFF = 0.02  # of the bytes of a step
_SAMPLED_FIRST = ("n_id", "e_id", "edge_index")  # a sampler's results, in the order from last to first


class StepEvent(NamedTuple):
    """Storage number `slot` of a step is made; or it is freed, `lag` steps after its own."""

    slot: int
    lag: int | None = None


class TracedStep(NamedTuple):
    """The events of one step on the device, without its batch's, and the sizes of all storages that it made. Those of
    the batch are `given`; `sampled` of them are a sampler's results."""

    events: tuple[StepEvent, ...]
    sizes: list[int]
    given: tuple[int, ...]
    num_sampled: int


class SizeLine(NamedTuple):
    """The count that a size follows, by its number in `count_values`."""

    follows: int
    slope: float
    fixed: float


class StepPattern(NamedTuple):
    """Steps as they were traced, and the line of every storage of those to come, which are like the last one."""

    steps: list[TracedStep]
    lines: list[SizeLine]

    def sizes(self, counts: Tensor) -> Tensor:
        """Of batches with such counts [num_batches, num_counts]: the bytes of every storage of their steps."""
        which = torch.tensor([line.follows for line in self.lines], dtype=torch.int64, device="cpu")
        slope = torch.tensor([line.slope for line in self.lines], dtype=torch.float64, device="cpu")
        fixed = torch.tensor([line.fixed for line in self.lines], dtype=torch.float64, device="cpu")
        return (counts[:, which] * slope + fixed).round().clamp(min=1).to(torch.int64)


def find_pattern(
    changes: Sequence[tuple[StorageRecord, int]], starts: Sequence[int], drawn: Sequence[BatchCounts]
) -> StepPattern | None:
    """The pattern of traced steps on the first batches that were drawn. None where steps are not alike, or where sizes
    do not follow from counts."""
    steps = _traced_steps(changes, starts)
    if len(drawn) < len(steps) or len({_shape(counts) for counts in drawn}) != 1:
        return None
    shapes = Counter((step.events, step.given) for step in steps)
    shape, times = shapes.most_common(1)[0]
    if times < _FEWEST:
        return None
    alike = [number for number, step in enumerate(steps) if (step.events, step.given) == shape]
    steps = steps[: alike[-1] + 1]
    last = steps[-1]
    counts = [count_values(drawn[number]) for number in alike]
    lines = [_line(counts, [steps[number].sizes[slot] for number in alike]) for slot in range(len(last.sizes))]
    pattern = StepPattern(steps, lines)
    found = pattern.sizes(torch.tensor(counts, dtype=torch.float64, device="cpu"))
    real = torch.tensor([steps[number].sizes for number in alike], device="cpu")
    off = (found - real).abs().sum(1) / real.sum(1).clamp(min=1)
    return pattern if float(off.max()) <= _MOST_OFF else None


def count_values(counts: BatchCounts) -> list[float]:
    """What sizes may follow: nodes and edges within each number of hops, per type, and those of single hops."""
    values = []
    for each in (*counts.nodes, *counts.edges):
        values += [*accumulate(each), *each[1:]]
    return [float(value) for value in [*values, counts.num_nodes, counts.num_edges]]


def _shape(counts: BatchCounts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(len, counts.nodes)), tuple(map(len, counts.edges))


def _traced_steps(changes: Sequence[tuple[StorageRecord, int]], starts: Sequence[int]) -> list[TracedStep]:
    place: dict[int, tuple[int, int]] = {}  # of a storage: its step, its number there
    steps = []
    for number, (low, high) in enumerate(pairwise([*starts, len(changes)])):
        events: list[StepEvent] = []
        sizes: list[int] = []
        given: list[tuple[str, int]] = []
        for record, change in changes[low:high]:
            if record.on_host:
                continue
            if change > 0:
                place[id(record)] = number, len(sizes)
                if record.op == GIVEN:
                    given.append((record.module, len(sizes)))
                else:
                    events.append(StepEvent(len(sizes)))
                sizes.append(record.num_bytes)
            elif id(record) in place and record.op != GIVEN:
                step, slot = place[id(record)]
                events.append(StepEvent(slot, number - step))
        rank = {name: at for at, name in enumerate(_SAMPLED_FIRST, 1)}
        given.sort(key=lambda each: -rank.get(each[0].rpartition(".")[2], 0))
        num_sampled = sum(name.rpartition(".")[2] in rank for name, _ in given)
        steps.append(TracedStep(tuple(events), sizes, tuple(slot for _, slot in given), num_sampled))
    return steps


def _line(counts: Sequence[Sequence[float]], sizes: Sequence[int]) -> SizeLine:
    """The line through sizes over that count which they are nearest to."""
    mean = sum(sizes) / len(sizes)
    best, least = SizeLine(0, 0.0, mean), max(abs(size - mean) for size in sizes)
    for number, values in enumerate(zip(*counts, strict=True)):
        if least == 0:
            break
        middle = sum(values) / len(values)
        spread = sum((value - middle) ** 2 for value in values)
        if spread == 0:
            continue
        slope = sum((v - middle) * (size - mean) for v, size in zip(values, sizes, strict=True)) / spread
        fixed = mean - slope * middle
        off = max(abs(slope * value + fixed - size) for value, size in zip(values, sizes, strict=True))
        if slope > 0 and off < least - 1e-6:
            best, least = SizeLine(number, slope, fixed), off
    return best
