"""A simulated run as Chrome's trace format, which Perfetto and chrome://tracing open.

One process per machine. Its threads are the tasks that are placed on it, and one per machine that it sends to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gnnsys.planning.simulation.binding import flow_words

if TYPE_CHECKING:
    from gnnsys.planning.simulation.simulate import SimulatedRun

_MICROSECONDS = 1e6


def timeline(run: SimulatedRun, iterations: int | None = None) -> dict[str, Any]:
    """`{"traceEvents": [...]}`: events of every task and flow that takes time, of the first `iterations`."""
    given, times, tasks = run.given, run.times, run.tasks
    events: list[dict[str, Any]] = []
    assert run.machines.names is not None
    for machine, name in enumerate(run.machines.names):
        events.append({"ph": "M", "name": "process_name", "pid": machine, "args": {"name": name}})
    for n, task in np.argwhere((times.task_end > times.task_start)[:iterations]):
        host = int(tasks.host[task])
        events.append(
            {
                "ph": "X",
                "name": f"{tasks.name(int(task))}, iteration {n}",
                "cat": "task",
                "pid": int(given.machine[task]),
                "tid": host,
                "ts": times.task_start[n, task] * _MICROSECONDS,
                "dur": (times.task_end[n, task] - times.task_start[n, task]) * _MICROSECONDS,
                "args": {"iteration": int(n)},
            }
        )
    return {"traceEvents": events + _flow_events(run, iterations), "displayTimeUnit": "ms"}


def _flow_events(run: SimulatedRun, iterations: int | None) -> list[dict[str, Any]]:
    """Flows overlap on a track, so each is an asynchronous event ("b" and "e") with an id of its own."""
    given, times, tasks = run.given, run.times, run.tasks
    events: list[dict[str, Any]] = []
    for n, edge in np.argwhere((times.flow_end > times.flow_start)[:iterations]):
        common = {
            "cat": "flow",
            "name": flow_words(run, int(edge)),
            "id": int(n) * given.num_edges + int(edge),
            "pid": int(given.machine[tasks.source[edge]]),
            "tid": tasks.num_placed + int(given.machine[tasks.target[edge]]),
        }
        sent = {"iteration": int(n), "bytes": float(given.volume[n, edge])}
        events.append({"ph": "b", "ts": times.flow_start[n, edge] * _MICROSECONDS, "args": sent, **common})
        events.append({"ph": "e", "ts": times.flow_end[n, edge] * _MICROSECONDS, **common})
    return events
