"""When each operation of some batches begins: by a list, or the best of all schedules where there are few batches.

A resource serves one operation at a time, and none is broken off. With `in_order`, a batch's weights are those that the
step of the batch before has left, as training without staleness has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnnsys.planning.scheduling.operations import PlanGraph

EXACT_BATCHES = 4  # more are scheduled by lists
_MOST_NODES = 20_000  # of a search; its best is returned then, and is not called exact
_SAME = 1 + 1e-12


@dataclass(frozen=True)
class BatchSchedule:
    """`starts[b][k]`: when operation k of batch b begins. All have ended at `seconds`. `is_exact`: none is shorter."""

    seconds: float
    starts: tuple[tuple[float, ...], ...]
    is_exact: bool = False


def list_schedule(graphs: Sequence[PlanGraph], *, in_order: bool = False, longest_first: bool = False) -> BatchSchedule:
    """Whatever can begin first begins; of several, the one of the first batch, or the one with the longest tail.

    >>> from gnnsys.planning.scheduling.operations import Operation
    >>> one = PlanGraph([Operation("copy/up", "bus up", 2.0), Operation("spmm/device", "gpu", 3.0, (0,))])
    >>> list_schedule([one, one]).seconds
    8.0
    """
    return _by_priority(graphs, in_order, _tail_first(graphs) if longest_first else _batch_first)


def steady_seconds(graphs: Sequence[PlanGraph], *, rounds: int = 6, in_order: bool = True) -> float:
    """What a batch takes in a long run of these ones over and over, while the pipeline is full.

    Never less than the busiest resource has to do.
    """
    graphs = [graph.merged(in_order=in_order) for graph in graphs]
    half = list_schedule(list(graphs) * rounds, in_order=in_order).seconds
    whole = list_schedule(list(graphs) * (2 * rounds), in_order=in_order).seconds
    busy = [graph.busy() for graph in graphs]
    least = max(sum(one[resource] for one in busy) for resource in busy[0])
    return max(least, (whole - half) / rounds) / len(graphs)


def best_schedule(
    graphs: Sequence[PlanGraph], *, exact_up_to: int = EXACT_BATCHES, most_nodes: int = _MOST_NODES
) -> BatchSchedule:
    """The shortest schedule of few batches; of more, the shorter of two by lists. Steps are in any order."""
    lists = [_by_priority(graphs, False, rule) for rule in (_batch_first, _tail_first(graphs))]
    best = min(lists, key=lambda one: one.seconds)
    if len(graphs) > exact_up_to:
        return best
    return _Search(graphs, best, most_nodes).run()


def least_seconds(graphs: Sequence[PlanGraph]) -> float:
    """No schedule is shorter: the busiest resource, with the shortest way to it and from it; the longest chain."""
    return _Search(graphs, None, 0).bound()


Priority = Callable[[int, int], tuple[float, ...]]


def _batch_first(batch: int, operation: int) -> tuple[float, ...]:
    return (batch, operation)


def _tail_first(graphs: Sequence[PlanGraph]) -> Priority:
    tails = [graph.tails() for graph in graphs]
    return lambda batch, operation: (-tails[batch][operation], batch, operation)


def _by_priority(graphs: Sequence[PlanGraph], in_order: bool, priority: Priority) -> BatchSchedule:
    waiting = [[len(one.after) for one in graph.operations] for graph in graphs]
    followers = [_followers(graph) for graph in graphs]
    left = [len(graph) for graph in graphs]
    ended = [0.0] * len(graphs)
    ready_at = [[0.0] * len(graph) for graph in graphs]
    starts = [[0.0] * len(graph) for graph in graphs]
    free: dict[str, float] = {}
    weights_of: dict[int, list[int]] = {}
    if in_order:
        for b, graph in enumerate(graphs[1:], start=1):
            weights_of[b] = [k for k, one in enumerate(graph.operations) if one.needs_weights]
            for k in weights_of[b]:
                waiting[b][k] += 1
    ready = {(b, k) for b in range(len(graphs)) for k, count in enumerate(waiting[b]) if count == 0}
    while ready:

        def begins(at: tuple[int, int]) -> tuple[float, ...]:
            b, k = at
            return (max(ready_at[b][k], free.get(graphs[b].operations[k].resource, 0.0)), *priority(b, k))

        b, k = min(ready, key=begins)
        ready.remove((b, k))
        one = graphs[b].operations[k]
        starts[b][k] = begins((b, k))[0]
        end = free[one.resource] = starts[b][k] + one.seconds
        ended[b], left[b] = max(ended[b], end), left[b] - 1
        woken = [(b, other, end) for other in followers[b][k]]
        if left[b] == 0:
            woken += [(b + 1, other, ended[b]) for other in weights_of.get(b + 1, ())]
        for batch, other, time in woken:
            waiting[batch][other] -= 1
            ready_at[batch][other] = max(ready_at[batch][other], time)
            if waiting[batch][other] == 0:
                ready.add((batch, other))
    return BatchSchedule(max(ended), tuple(map(tuple, starts)))


def _followers(graph: PlanGraph) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in graph.operations]
    for number, one in enumerate(graph.operations):
        for before in one.after:
            followers[before].append(number)
    return followers


class _Search:
    """Branch and bound over active schedules (Giffler and Thompson, 1960), of which one is the best.

    At a node, the operation that could end first names a resource; one of those that could begin there before that end
    is next on it. All operations of all batches are numbered through.
    """

    def __init__(self, graphs: Sequence[PlanGraph], best: BatchSchedule | None, most_nodes: int) -> None:
        self._graphs, self._best, self._left = graphs, best, most_nodes
        self._seconds, self._tails = list[float](), list[float]()
        self._resource, self._after, self._not_before = list[str](), list[tuple[int, ...]](), dict[int, int]()
        firsts: list[int] = []
        for b, graph in enumerate(graphs):
            first = len(self._seconds)
            twin = next((a for a in range(b - 1, -1, -1) if graphs[a].operations == graph.operations), None)
            if twin is not None:  # of two that are alike, the first begins first
                self._not_before[first] = firsts[twin]
            firsts.append(first)
            self._tails += graph.tails()
            for one in graph.operations:
                self._seconds.append(one.seconds)
                self._resource.append(one.resource)
                self._after.append(tuple(first + before for before in one.after))
        self._firsts = firsts

    def bound(self) -> float:
        return self._least(self._heads({}, {}), {})

    def run(self) -> BatchSchedule:
        assert self._best is not None
        self._root = self.bound()
        self._descend({}, {})
        found = self._best
        return BatchSchedule(found.seconds, found.starts, is_exact=self._left > 0 or self._is_done())

    def _is_done(self) -> bool:
        return self._best is not None and self._best.seconds <= self._root * _SAME

    def _heads(self, starts: dict[int, float], free: dict[str, float]) -> list[float]:
        """When each operation can begin at best."""
        heads = [0.0] * len(self._seconds)
        for number, after in enumerate(self._after):
            if number in starts:
                heads[number] = starts[number]
                continue
            ready = max((heads[before] + self._seconds[before] for before in after), default=0.0)
            heads[number] = max(ready, free.get(self._resource[number], 0.0))
        return heads

    def _least(self, heads: list[float], starts: dict[int, float]) -> float:
        """No completion of a partial schedule is shorter."""
        least = 0.0
        on: dict[str, tuple[float, float, float]] = {}
        for number, (head, tail, seconds) in enumerate(zip(heads, self._tails, self._seconds, strict=True)):
            least = max(least, head + tail)
            if number not in starts:
                first, work, rest = on.get(self._resource[number], (float("inf"), 0.0, float("inf")))
                on[self._resource[number]] = (min(first, head), work + seconds, min(rest, tail - seconds))
        return max([least, *(first + work + rest for first, work, rest in on.values())])

    def _descend(self, starts: dict[int, float], free: dict[str, float]) -> None:
        assert self._best is not None
        if self._is_done() or self._left <= 0:
            return
        self._left -= 1
        heads = self._heads(starts, free)
        if len(starts) == len(heads):
            seconds = max(head + tail for head, tail in zip(heads, self._tails, strict=True))
            if seconds < self._best.seconds:
                self._best = BatchSchedule(seconds, self._by_batch(starts))
            return
        if self._least(heads, starts) * _SAME >= self._best.seconds:
            return
        ready = [n for n, after in enumerate(self._after) if n not in starts and all(b in starts for b in after)]
        first = min(ready, key=lambda n: (heads[n] + self._seconds[n], heads[n]))
        ends, resource = heads[first] + self._seconds[first], self._resource[first]
        nexts = [n for n in ready if self._resource[n] == resource and (heads[n] < ends or n == first)]
        nexts = [n for n in nexts if self._not_before.get(n, -1) in starts or n not in self._not_before]
        for n in sorted(nexts, key=lambda n: (heads[n], -self._tails[n])):
            self._descend({**starts, n: heads[n]}, {**free, resource: heads[n] + self._seconds[n]})

    def _by_batch(self, starts: dict[int, float]) -> tuple[tuple[float, ...], ...]:
        ends = [*self._firsts[1:], len(self._seconds)]
        return tuple(tuple(starts[n] for n in range(a, b)) for a, b in zip(self._firsts, ends, strict=True))
