"""What every simulated schedule must keep: (6)-(15) of the paper, both lemmas and both theorems, as far as they apply.

Only the times of a run are used. Rates are derived anew from which flows were active when.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gnnsys.planning.simulation.machines import Floats
from gnnsys.planning.simulation.simulate import SimulatedRun
from gnnsys.planning.simulation.tasks import AFTER_START, DATA

CLOSE = 1e-9  # of the makespan
_OF_BYTES = 1e-6  # what a flow's bytes may be off by, as rates times lengths of many intervals
Bools = npt.NDArray[np.bool_]


def broken_rules(run: SimulatedRun, *, theorems: bool = True) -> list[str]:
    """Names of what a run breaks; none is expected. `theorems`: of `oes` and `maxmin` in the paper's model."""
    broken = [*_order(run), *_chain(run)]
    if theorems:
        broken += [*_traffic(run), *_theorems(run)]
    return list(dict.fromkeys(broken))


def _order(run: SimulatedRun) -> Iterator[str]:
    """(6)-(12): everything once, and after all that it waits for."""
    given, times = run.given, run.times
    slack = CLOSE * max(run.seconds, 1.0)
    has_flow = given.has_flow()
    if not np.isfinite(times.task_end).all():
        yield "(7): a task did not run"
        return
    if any((np.isfinite(v) != has_flow).any() for v in (times.flow_ready, times.flow_start, times.flow_end)):
        yield "a flow was not sent"
        return
    first = given.dependency_counts()[0] == 0
    if (times.task_ready[0, first] != 0).any():
        yield "(6): what waits for nothing did not start at 0"
    if not given.queued.any() and (times.task_start != times.task_ready).any():
        yield "a task that was ready did not start"
    took = times.task_end - times.task_start
    if np.isinf(given.cores).all() and not np.allclose(took, given.seconds, rtol=CLOSE, atol=slack):
        yield "a task did not take its seconds"
    if (times.task_start[1:] < times.task_end[:-1] - slack).any():
        yield "(11)"
    if (times.flow_start[1:] < times.flow_end[:-1] - slack)[has_flow[1:]].any():
        yield "(12)"
    yield from _edges(run)


def _edges(run: SimulatedRun) -> Iterator[str]:
    given, times = run.given, run.times
    for edge in range(given.num_edges):
        source, target, lag = given.source[edge], given.target[edge], int(given.lag[edge])
        n = np.arange(max(given.iterations - lag, 0))
        start = times.task_start[n + lag, target]
        if given.mode[edge] == AFTER_START:
            if (start < times.task_start[n, source]).any():
                yield "more batches ahead than allowed"
        elif given.mode[edge] == DATA and given.machine[source] != given.machine[target]:
            if (times.flow_start[n, edge] < times.task_end[n, source]).any():
                yield "(8)"
            if (start < times.flow_end[n, edge]).any():
                yield "(9)"
        elif (start < times.task_end[n, source]).any():
            yield "(10)"


def _traffic(run: SimulatedRun) -> Iterator[str]:
    """(13)-(15), Lemma 1: at the rates that the policy says, every flow has had its bytes when it ended."""
    given, times = run.given, run.times
    where = np.nonzero(given.has_flow())
    if not len(where[0]):
        return
    start, end, volume = times.flow_start[where], times.flow_end[where], given.volume[where]
    numbers = np.arange(len(given.link_rates))
    passes = (given.edge_links()[..., None] == numbers).any(1)  # [edges, links]
    flow_passes = passes[where[1]].astype(np.float64)
    moments = np.unique(np.concatenate([start, end]))
    lengths = np.diff(moments)
    active = (start[None, :] <= moments[:-1, None]) & (end[None, :] >= moments[1:, None])  # [intervals, flows]
    degree = active @ flow_passes  # [intervals, links]
    lasts = lengths > CLOSE * max(run.seconds, 1.0)  # what rounding leaves between two ends is no interval
    if (degree[lasts] > passes.sum(0)).any():
        yield "Lemma 1"
    if run.policy == "oes":  # (19), (20)
        share = given.link_rates / np.maximum(degree, 1)
        rates = np.where(flow_passes[None] > 0, share[:, None, :], np.inf).min(2)
    else:
        rates = np.stack([_max_min(now, flow_passes, given.link_rates) for now in active])
    rates = np.where(active, rates, 0.0)
    if ((rates @ flow_passes)[lasts] > given.link_rates * (1 + CLOSE)).any():
        yield "(14) or (15)"
    if not np.allclose(lengths @ rates, volume, rtol=_OF_BYTES, atol=_OF_BYTES):
        yield "(13)"


def _max_min(active: Bools, passes: Floats, link_rates: Floats) -> Floats:
    """Rates such that each flow has a link that is full and on which no flow is faster."""
    rates, left, unset = np.zeros(len(active)), link_rates.copy(), active.copy()
    while unset.any():
        count = unset @ passes
        share = np.where(count > 0, left / np.maximum(count, 1), np.inf)
        now = unset & (passes[:, share.argmin()] > 0)
        rates[now] = share.min()
        left = np.maximum(left - share.min() * (now @ passes), 0)
        unset &= ~now
    return rates


def _chain(run: SimulatedRun) -> Iterator[str]:
    """Lemma 2: each part of the chain starts when the one before it ends, from 0 to the makespan."""
    binding = run.binding()
    chain = binding.chain
    whole = chain[0].start == 0 and chain[-1].end == run.seconds
    if not whole or any(before.end != after.start for before, after in pairwise(chain)):
        yield "Lemma 2"
    if not np.isclose(binding.total, run.seconds, rtol=1e-9):
        yield "what the makespan was spent on is not the makespan"


def _theorems(run: SimulatedRun) -> Iterator[str]:
    """Delta is 0 where nothing crosses machines, and there Theorem 1 as written is false: 1 is meant."""
    bounds = run.bounds()
    seconds, more = run.seconds, 1 + CLOSE
    if bounds.least > seconds * more:
        yield "faster than a bound"
    if seconds > max(bounds.degree, 1) * bounds.full_rate_path * more:
        yield "Theorem 1"
    if seconds > bounds.sharing_path * more:
        yield "Theorem 3"
