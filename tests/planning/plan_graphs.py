"""Small plan graphs, at random, and what must hold of any schedule of them."""

from __future__ import annotations

import itertools

from gnnsys.planning.scheduling.operations import RESOURCES, Operation, PlanGraph


def random_graph(generator, num_operations, *, share_zero=0.1):
    """Each operation waits for some of those before it."""
    operations = []
    for number in range(num_operations):
        after = tuple(before for before in range(number) if generator.random() < 0.6)
        seconds = 0.0 if generator.random() < share_zero else float(generator.integers(1, 10))
        resource = RESOURCES[int(generator.integers(4))]
        operations.append(Operation(f"operation {number}", resource, seconds, after, generator.random() < 0.2))
    return PlanGraph(operations)


def check(graphs, schedule, *, in_order=False):
    """Nothing begins before what it waits for has ended, and no resource does two things at once."""
    on, end_before = {}, 0.0
    for graph, starts in zip(graphs, schedule.starts, strict=True):
        ends = [start + one.seconds for start, one in zip(starts, graph.operations, strict=True)]
        for one, start, end in zip(graph.operations, starts, ends, strict=True):
            assert start >= 0 and all(start >= ends[before] - 1e-9 for before in one.after)
            assert not (in_order and one.needs_weights) or start >= end_before - 1e-9
            on.setdefault(one.resource, []).append((start, end))
        end_before = max(ends)
        assert max(ends) <= schedule.seconds + 1e-9
    for spans in on.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - 1e-9


def shortest_by_trying_all(graphs):
    """Over every order of all operations that keeps to what each waits for: an operation begins when it can."""
    best = float("inf")

    def go(done, free, ends, latest):
        nonlocal best
        if latest >= best:
            return
        if len(done) == sum(map(len, graphs)):
            best = latest
            return
        for b, graph in enumerate(graphs):
            for k, one in enumerate(graph.operations):
                if (b, k) in done or any((b, before) not in done for before in one.after):
                    continue
                start = max([free.get(one.resource, 0.0), *(ends[b, before] for before in one.after)])
                end = start + one.seconds
                go(done | {(b, k)}, {**free, one.resource: end}, {**ends, (b, k): end}, max(latest, end))

    go(frozenset(), {}, {}, 0.0)
    return best
