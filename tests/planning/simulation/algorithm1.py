"""Algorithm 1 (OES) line by line, in time steps: what the event-driven engine is held against."""

from __future__ import annotations

import numpy as np

from gnnsys.planning.simulation.engine import EngineInput


def time_steps(given: EngineInput, step: float) -> float:
    """T_OES in seconds. Times are counted in steps; a flow moves `rate * step` bytes in one."""
    assert np.isinf(given.cores).all() and not given.queued.any()
    iterations, num_tasks, num_edges = given.iterations, given.num_tasks, given.num_edges
    length = np.ceil(given.seconds / step - 1e-9).astype(int)  # p, in steps
    started = np.full((iterations, num_tasks), -1)
    done = np.zeros((iterations, num_tasks), dtype=bool)
    sent = np.zeros((iterations, num_edges), dtype=bool)  # of flows: done
    left = given.volume.copy()
    crossing, links = given.crossing(), given.edge_links()
    active: set[tuple[int, int]] = set()  # F_act, as (iteration, edge)
    pending: set[tuple[int, int]] = set()  # F_pend
    into = [np.flatnonzero(given.target == task) for task in range(num_tasks)]
    out_of = [np.flatnonzero((given.source == task) & crossing) for task in range(num_tasks)]

    def available(task: int, n: int) -> bool:
        if started[n, task] >= 0 or (n > 0 and not done[n - 1, task]):
            return False
        for edge in into[task]:
            before = n - given.lag[edge]
            if before >= 0:
                arrived = sent[before, edge] if crossing[edge] else done[before, given.source[edge]]
                if not arrived:
                    return False
        return True

    for t in range(10**6):
        if done.all():  # line 4
            return t * step
        again = True
        while again:  # lines 6-17; what takes no time is over within the step
            again = False
            for task in np.flatnonzero(~done[-1]):
                n = int(done[:, task].sum())  # by (11) no later one can be available
                if available(task, n):
                    started[n, task] = t  # line 7
                if started[n, task] >= 0 and t >= started[n, task] + length[n, task]:
                    done[n, task] = again = True
                    for edge in out_of[task]:  # lines 9-13
                        if n + given.lag[edge] < iterations:
                            behind = n > 0 and (n - 1, edge) in active | pending
                            (pending if behind else active).add((n, edge))
            for n, edge in [flow for flow in active if left[flow] <= 1e-12]:  # lines 14-17
                active.discard((n, edge))
                sent[n, edge] = again = True
                if (n + 1, edge) in pending:
                    pending.discard((n + 1, edge))
                    active.add((n + 1, edge))
        if done.all():
            return t * step
        degree = np.zeros(len(given.link_rates))  # lines 18-19
        for _, edge in active:
            degree[links[edge][links[edge] >= 0]] += 1
        for flow in active:  # lines 20-21
            passed = links[flow[1]][links[flow[1]] >= 0]
            left[flow] -= step * (given.link_rates[passed] / degree[passed]).min()
    raise AssertionError("Algorithm 1 did not end")
