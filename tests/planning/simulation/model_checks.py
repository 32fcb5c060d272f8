"""What every schedule must keep: (6)-(15) of the paper, Lemma 1, and the rates that the policy says.

Only the times of a run are used. Rates are derived anew from which flows were active when.
"""

from __future__ import annotations

import numpy as np

from gnnsys.planning import SimulatedRun
from gnnsys.planning.simulation.tasks import AFTER_START, DATA

CLOSE = 1e-9


def check_order(run: SimulatedRun) -> None:
    """(6)-(12): everything once, after all that it waits for; every task of no one at 0."""
    given, times = run.given, run.times
    later = CLOSE * max(run.seconds, 1.0)
    assert np.isfinite(times.task_end).all()  # (7)
    has_flow = given.has_flow()
    for values in (times.flow_ready, times.flow_start, times.flow_end):
        assert (np.isfinite(values) == has_flow).all()
    first = given.dependency_counts()[0] == 0
    assert (times.task_ready[0, first] == 0).all()  # (6)
    if not given.queued.any():
        assert (times.task_start == times.task_ready).all()
    if np.isinf(given.cores).all():
        np.testing.assert_allclose(times.task_end - times.task_start, given.seconds, rtol=CLOSE, atol=later)
    assert (times.task_start[1:] >= times.task_end[:-1] - later).all()  # (11)
    assert (times.flow_start[1:] >= times.flow_end[:-1] - later)[has_flow[1:]].all()  # (12)
    for edge in range(given.num_edges):
        source, target, lag = given.source[edge], given.target[edge], int(given.lag[edge])
        n = np.arange(given.iterations - lag)
        if given.mode[edge] == AFTER_START:
            assert (times.task_start[n + lag, target] >= times.task_start[n, source]).all()
        elif given.mode[edge] == DATA and given.machine[source] != given.machine[target]:
            assert (times.flow_start[n, edge] >= times.task_end[n, source]).all()  # (8)
            assert (times.task_start[n + lag, target] >= times.flow_end[n, edge]).all()  # (9)
        else:
            assert (times.task_start[n + lag, target] >= times.task_end[n, source]).all()  # (10)


def check_traffic(run: SimulatedRun) -> None:
    """(13)-(15) and Lemma 1: at the rates of (19)-(20), or of max-min, every flow has had its bytes when it ended."""
    given, times = run.given, run.times
    where = np.argwhere(given.has_flow())
    if not len(where):
        return
    start, end = times.flow_start[tuple(where.T)], times.flow_end[tuple(where.T)]
    volume, links = given.volume[tuple(where.T)], given.edge_links()[where[:, 1]]
    moments = np.unique(np.concatenate([start, end]))
    lengths = np.diff(moments)
    active = (start[None, :] <= moments[:-1, None]) & (end[None, :] >= moments[1:, None])  # [intervals, flows]
    passes = np.zeros((len(where), len(given.link_rates)))
    for column in links.T:
        passes[np.flatnonzero(column >= 0), column[column >= 0]] = 1
    degree = active @ passes  # [intervals, links]
    one_iteration = (given.edge_links()[given.crossing()][..., None] == np.arange(len(given.link_rates))).any(1).sum(0)
    busy = lengths > CLOSE  # what rounding leaves between two ends is no interval
    assert (degree[busy] <= one_iteration).all()  # Lemma 1
    if run.policy == "oes":
        share = given.link_rates / np.maximum(degree, 1)
        rates = np.where(passes[None] > 0, share[:, None, :], np.inf).min(2)
    else:
        rates = np.stack([_max_min(now, passes, given.link_rates) for now in active])
    rates = np.where(active, rates, 0.0)
    assert (rates @ passes <= given.link_rates * (1 + CLOSE))[busy].all()  # (14), (15)
    np.testing.assert_allclose(lengths @ rates, volume, rtol=1e-6, atol=1e-6)  # (13)


def _max_min(active: np.ndarray, passes: np.ndarray, link_rates: np.ndarray) -> np.ndarray:
    """Rates such that each flow has a link that is full and on which no flow is faster."""
    rates, left, unset = np.zeros(len(active)), link_rates.astype(float).copy(), active.copy()
    while unset.any():
        count = unset @ passes
        share = np.where(count > 0, left / np.maximum(count, 1), np.inf)
        given_now = unset & (passes[:, share.argmin()] > 0)
        rates[given_now] = share.min()
        left = np.maximum(left - share.min() * (given_now @ passes), 0)
        unset &= ~given_now
    return rates


def check_chain(run: SimulatedRun) -> None:
    """Lemma 2: each part of the chain starts when the one before it ends, from 0 to the makespan."""
    binding = run.binding()
    assert binding.chain[0].start == 0
    assert binding.chain[-1].end == run.seconds
    assert all(before.end == after.start for before, after in zip(binding.chain, binding.chain[1:], strict=False))
    np.testing.assert_allclose(binding.total, run.seconds, rtol=1e-9)


def check_bounds(run: SimulatedRun) -> None:
    """Theorems 1 and 3. Delta is 0 where nothing crosses machines, and then there is nothing to share."""
    bounds = run.bounds()
    assert bounds.full_rate_path <= run.seconds * (1 + CLOSE)
    assert bounds.least <= run.seconds * (1 + CLOSE)
    assert run.seconds <= bounds.sharing_path * (1 + CLOSE)
    assert run.seconds <= max(bounds.degree, 1) * bounds.full_rate_path * (1 + CLOSE)
