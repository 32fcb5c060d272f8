"""Batches in turn (DAHA, section 3.2.1): a group is sampled by host and device together, then trained. Of which size?

The paper gives no rule for the size g of a group. Here every size is predicted, with what it costs to go from one stage
to the other: the pipeline runs empty, and fills again. g = 0 is no turns: sampling overlaps training. It is always a
candidate, and stays unless turns are clearly faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gnnsys.planning.scheduling.operations import Operation, PlanGraph
from gnnsys.planning.scheduling.simulate import list_schedule, steady_seconds

_CLEARLY = 0.98  # of the time without turns
_NEARLY = 1.01  # of the best size's time: a smaller group holds less memory
_SIMULATED = 32  # batches; from there on one more takes what a batch takes in the long run


@dataclass(frozen=True)
class TurnGroup:
    """Groups of `size` batches take `seconds` a batch, and `num_bytes` for structure that waits."""

    size: int
    seconds: float
    num_bytes: float = 0.0


@dataclass(frozen=True)
class SamplingStage:
    """What sampling one batch takes on each side, and the bytes of its structure, which is kept until it is trained."""

    host: float
    device: float
    structure_bytes: float

    def seconds(self, size: int) -> float:
        """Of a group of batches of this size, dealt as well as can be."""
        if self.host + self.device == 0:
            return 0.0
        on_host = int(size * self.device / (self.host + self.device))
        ways = (on_host, min(size, on_host + 1))
        return min(max(count * self.host, (size - count) * self.device) for count in ways)


@dataclass(frozen=True)
class CacheRefill:
    """A group's visits are known before its rows move: `seconds` to fill the cache by them, and a batch's work then."""

    seconds: float
    training: PlanGraph


def without_sampling(graph: PlanGraph) -> PlanGraph:
    """What is left of a batch when its structure is there."""
    dropped = {n for n, one in enumerate(graph.operations) if one.operator.startswith("sample/")}
    kept = [n for n in range(len(graph)) if n not in dropped]
    if any(graph.operations[n].after for n in dropped):
        raise ValueError("sampling waits for nothing")
    place = {n: number for number, n in enumerate(kept)}
    made = []
    for n in kept:
        one = graph.operations[n]
        after = tuple(place[before] for before in one.after if before not in dropped)
        made.append(Operation(one.operator, one.resource, one.seconds, after, one.needs_weights))
    return PlanGraph(made)


def predict_groups(
    training: PlanGraph, sampling: SamplingStage, *, overlapped: float, budget: float, num_batches: int,
    switch: float = 0.0, refill: CacheRefill | None = None,
) -> tuple[TurnGroup, list[TurnGroup]]:  # fmt: skip
    """The best size, and all that were looked at, g = 0 first: `overlapped` seconds a batch.

    Sizes go up to `num_batches` and to what `budget` bytes hold. `switch` are seconds that a change of stage takes
    beside the pipeline that fills.
    """
    if overlapped < 0 or num_batches < 1:
        raise ValueError(f"a batch takes 0 seconds or more, and there is one: got {overlapped}, {num_batches}")
    groups = [TurnGroup(0, overlapped)]
    most = num_batches if sampling.structure_bytes <= 0 else int(min(num_batches, budget // sampling.structure_bytes))
    for size in _sizes(most):
        stage = sampling.seconds(size) + 2 * switch
        plain = (stage + _training_seconds(training, size)) / size
        if refill is not None:
            plain = min(plain, (stage + refill.seconds + _training_seconds(refill.training, size)) / size)
        groups.append(TurnGroup(size, plain, size * sampling.structure_bytes))
    least = min(group.seconds for group in groups)
    if groups[0].seconds * _CLEARLY <= least:
        return groups[0], groups
    return next(group for group in groups[1:] if group.seconds <= _NEARLY * least), groups


def _sizes(most: int) -> Iterator[int]:
    size = 1
    while size < most:
        yield size
        size *= 2
    if most >= 1:
        yield most


def _training_seconds(graph: PlanGraph, size: int) -> float:
    """Of so many batches in order, from an empty pipeline to an empty one."""
    merged = graph.merged()
    simulated = list_schedule([merged] * min(size, _SIMULATED), in_order=True).seconds
    return simulated + max(0, size - _SIMULATED) * steady_seconds([merged])
