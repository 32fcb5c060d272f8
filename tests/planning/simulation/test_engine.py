"""The native engine beside plain ones: every rate recomputed at every event, and Algorithm 1 in time steps."""

from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning import POLICIES, simulate
from tests.planning.simulation.algorithm1 import time_steps
from tests.planning.simulation.plain_engine import PlainEngine
from tests.planning.simulation.random_jobs import random_job

TIMES = ("task_ready", "task_start", "task_end", "flow_ready", "flow_start", "flow_end")


@pytest.mark.parametrize("like_gnnsys", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_time_is_that_of_an_engine_that_recomputes_all_rates(policy: str, like_gnnsys: bool) -> None:
    for seed in range(12):
        run = simulate(*random_job(seed, like_gnnsys=like_gnnsys), policy)
        plain = PlainEngine(run.given).run()
        for name in TIMES:
            np.testing.assert_allclose(getattr(run.times, name), getattr(plain, name), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(run.times.slowed, plain.slowed, rtol=1e-9, atol=1e-9)
        took = np.nan_to_num(run.times.flow_end - run.times.flow_start)
        np.testing.assert_allclose(run.times.limited.sum(2), took, rtol=1e-9, atol=1e-9)
        if policy != "maxmin":  # which of two links is the tighter one is rounding there
            np.testing.assert_allclose(run.times.limited, plain.limited, rtol=1e-9, atol=1e-9)


def test_it_is_algorithm_1_to_a_time_step_for_each_part_of_the_chain() -> None:
    """In time steps every task and flow ends on the next step: one step later for each part of a chain, at most."""
    for seed in range(6):
        run = simulate(*random_job(seed))
        step = run.seconds / 600
        parts = sum(part.end > part.start for part in run.binding().chain)
        makespan = time_steps(run.given, step)
        assert run.seconds - step <= makespan <= run.seconds + (parts + 1) * step, seed


def test_without_reasons_the_times_are_the_same() -> None:
    job = random_job(5)
    assert simulate(*job, explain=False).seconds == simulate(*job).seconds
    with pytest.raises(ValueError, match="explain=True"):
        simulate(*job, explain=False).binding()
