"""The longest path through the tasks and flows of all iterations: §V-B's execution DAG."""

from __future__ import annotations

import numpy as np

from gnnsys.planning.simulation.engine_result import EngineInput
from gnnsys.planning.simulation.machines import Floats, Ints
from gnnsys.planning.simulation.tasks import AFTER_START


def longest_path(given: EngineInput, flow_seconds: Floats) -> float:
    """Length of the longest path: tasks weigh `given.seconds`, flows [N, E] weigh `flow_seconds`.

    Times follow (8)-(12) as if nothing was shared: a task starts when all that it waits for is there. Edges within an
    iteration are taken level by level, so that each level is one array operation.
    """
    crossing = given.crossing()
    from_start = given.mode == AFTER_START
    levels = _edges_by_level(given)
    later = [(int(lag), np.flatnonzero(given.lag == lag)) for lag in np.unique(given.lag) if lag > 0]
    arrives = np.zeros((given.iterations, given.num_edges))
    end = np.zeros(given.num_tasks)
    for n in range(given.iterations):
        start = end.copy()
        for lag, edges in later:
            if n >= lag:
                np.maximum.at(start, given.target[edges], arrives[n - lag, edges])
        before = arrives[n - 1] if n else np.zeros(given.num_edges)
        sent = np.zeros(given.num_edges)
        for edges in levels:  # every task that sends over these has its final start
            sender = given.source[edges]
            sent[edges] = start[sender] + np.where(from_start[edges], 0.0, given.seconds[n, sender])
            flows = np.maximum(sent[edges], before[edges]) + flow_seconds[n, edges]
            arrives[n, edges] = np.where(crossing[edges], flows, sent[edges])
            same = given.lag[edges] == 0
            np.maximum.at(start, given.target[edges[same]], arrives[n, edges[same]])
        end = start + given.seconds[n]
    return float(end.max())


def _edges_by_level(given: EngineInput) -> list[Ints]:
    """Edges by the level of their sender: the most edges within an iteration on any way to it."""
    inside = given.lag == 0
    source, target = given.source[inside], given.target[inside]
    level = np.zeros(given.num_tasks, dtype=np.int64)
    for _ in range(given.num_tasks + 1):
        raised = level.copy()
        np.maximum.at(raised, target, level[source] + 1)
        if (raised == level).all():
            break
        level = raised
    else:
        raise ValueError("tasks: edges within an iteration form a cycle")
    order = np.argsort(level[given.source], kind="stable")
    cuts = np.flatnonzero(np.diff(level[given.source[order]])) + 1
    return np.split(order, cuts)
