"""Simulating a run whose demands depend on how it goes: a run is simulated several times, until both agree.

Links have buffers, where messages of the all-reduce wait behind rows. How long depends on how much links are in use,
which depends on how long an iteration takes, which depends on how long these messages wait. And where rows
come late more batches are under way, which share more rows, so that fewer are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gnnsys.planning.profile.calibrate import queue_delays
from gnnsys.planning.profile.share_profile import Amounts
from gnnsys.planning.simulation import Demands, SimulatedRun
from gnnsys.planning.simulation.run_bounds import run_bounds
from gnnsys.planning.simulation.tasks import SAMPLER, WORKER

_MOST_TURNS, _CLOSE = 12, 0.002
_MOST_LATE_TURNS, _CLOSE_LATE = 6, 0.1
MOST_STEPS = 16  # trainers whose all-reduce is simulated step by step: tasks grow with the square


def settle_late_rows(
    simulate_with: Callable[[Sequence[float]], SimulatedRun], num_workers: int, in_flight: int
) -> SimulatedRun:
    """The run of `simulate_with(late)` in which about as many batches have late rows as `late` says (`late_rows`).

    Where more rows are late fewer are asked for, and so fewer are late: there is one share that agrees with itself.
    """
    late = np.zeros(num_workers)
    for turn in range(1, _MOST_LATE_TURNS + 1):
        run = simulate_with(late.tolist())
        over = late_rows(run, in_flight) - late
        if np.abs(over).max() <= _CLOSE_LATE:
            break
        late = late + over / turn  # the mean of what was found: workers wait for each other, and so take turns
    return run


def late_rows(run: SimulatedRun, in_flight: int) -> Amounts:
    """[workers]: the share of batches that find one more than `in_flight` others on their way when they ask for rows.

    A pipeline has room for a batch when a worker takes the one that is `ahead` before it. It is sampled, and then asks
    for its rows. Those of the batch `in_flight + 1` before it are late where they are not there by then. A pipeline in
    which they always are late has room when those of the one before that have come. Workers have one sampler each.
    """
    samplers, ahead, last = run.tasks.ids(SAMPLER), run.tasks.ahead or 0, in_flight + 1
    first = max(ahead, last + 1)
    if run.demands.iterations <= first + 1:
        return np.zeros(len(samplers))
    began, fetched = run.times.task_start[:, run.tasks.ids(WORKER)], run.times.task_start[:, samplers]
    took = run.times.task_end[:, samplers] - fetched
    at = np.arange(first, run.demands.iterations)
    asks = np.maximum(began[at - ahead], fetched[at - last - 1]) + took[at - last]
    is_late: Amounts = (fetched[at - last] > asks).astype(np.float64)
    return is_late[len(at) // 4 : -ahead or None].mean(0) if len(at) > 2 * ahead else is_late.mean(0)


def settle_queues(
    simulate_with: Callable[[Sequence[float] | None], SimulatedRun], machine_of_worker: Sequence[int], queue: Amounts
) -> SimulatedRun:
    """The run of `simulate_with(step_delays)` whose delays are those of `queue_delays` for its own use of links.

    `queue` [machines]: seconds of a full buffer. A longer iteration uses links less, and its messages wait less: so
    there is one length that agrees with itself.
    """
    run = simulate_with(None)
    if not queue.any():
        return run
    low = steady_iteration(run)  # an iteration takes no less, and no more than with the queues of links so much in use

    def too_long(seconds: float) -> float:
        """How much longer an iteration takes than the `seconds` by which the use of links was counted."""
        nonlocal run
        delays = queue_delays(machine_of_worker, *link_use(run, seconds), queue)
        run = simulate_with(delays)
        return steady_iteration(run) - seconds

    over = too_long(low)
    if over <= _CLOSE * low:
        return run
    high = low + over
    under = too_long(high)
    for _ in range(_MOST_TURNS):  # until the length that is looked for lies between both
        if under <= 0:
            break
        low, high, over = high, high + 2 * under, under
        under = too_long(high)
    else:
        return run
    for _ in range(_MOST_TURNS):  # regula falsi; an end that stays counts half (Illinois)
        if high - low <= _CLOSE * low or under == over:
            break
        seconds = min(max((low * under - high * over) / (under - over), low), high)
        found = too_long(seconds)
        if abs(found) <= _CLOSE * seconds:
            break
        if found > 0:
            low, over, under = seconds, found, under / 2
        else:
            high, under, over = seconds, found, over / 2
    return run


def link_use(run: SimulatedRun, seconds: float) -> tuple[Amounts, Amounts]:
    """[machines] each: the share of an iteration of so many seconds for which the links into and out of them carry."""
    machines = run.machines
    num = machines.num_machines
    use = run.link_bytes()[: 2 * num] / run.demands.iterations / machines.link_rates()[: 2 * num] / seconds
    return np.minimum(1.0, use[num:]), np.minimum(1.0, use[:num])


def steady_iteration(run: SimulatedRun) -> float:
    """Seconds of an iteration once the pipeline is full, and before it runs empty: samplers are `ahead` iterations
    before trainers, so the first and the last of a simulated run are quicker than others."""
    ends = run.times.task_end[:, run.tasks.ids(WORKER)].max(axis=1)
    ahead = min(run.tasks.ahead or 0, (len(ends) - 2) // 3)
    if len(ends) < 2:
        return run.seconds
    return float((ends[-1 - ahead] - ends[ahead]) / (len(ends) - 1 - 2 * ahead))


def steady_path(run: SimulatedRun) -> float:
    """How much longer the full-rate path becomes with an iteration, over those that `steady_iteration` looks at. The
    path of a whole run has the time in it that the pipeline takes to fill."""
    num = run.demands.iterations
    ahead = min(run.tasks.ahead or 0, (num - 2) // 3)
    if num < 2:
        return _path(run, num)
    return (_path(run, num - ahead) - _path(run, ahead + 1)) / (num - 1 - 2 * ahead)


def _path(run: SimulatedRun, num: int) -> float:
    """The full-rate path of the first `num` iterations."""
    demands = Demands(run.demands.seconds[:num], run.demands.volume[:num], run.demands.threads)
    return run_bounds(run.machines, run.tasks, run.placement, demands).full_rate_path
