"""The paper's model on random jobs: every schedule keeps (6)-(15), Lemmas 1 and 2 and Theorems 1 and 3."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gnnsys.bench.plan.random_jobs import random_job
from gnnsys.planning import POLICIES, Demands, broken_rules, simulate


@pytest.mark.parametrize("policy", ["oes", "maxmin"])
@pytest.mark.parametrize("block", range(3))
def test_schedules_keep_the_model_and_both_theorems(block: int, policy: str) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        assert broken_rules(simulate(*random_job(seed), policy)) == [], seed


@pytest.mark.long
@pytest.mark.parametrize("policy", ["oes", "maxmin"])
def test_two_thousand_schedules_keep_the_model_and_both_theorems(policy: str) -> None:
    for seed in range(2000):
        assert broken_rules(simulate(*random_job(seed), policy)) == [], seed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("like_gnnsys", [False, True])
def test_every_policy_keeps_the_order_and_has_a_chain_without_a_gap(like_gnnsys: bool, policy: str) -> None:
    for seed in range(25):
        run = simulate(*random_job(seed, like_gnnsys=like_gnnsys), policy)
        assert broken_rules(run, theorems=False) == [], seed
        bounds, has_most = run.bounds(), policy in ("oes", "maxmin") and not like_gnnsys
        assert bounds.least <= run.seconds * (1 + 1e-9) and run.seconds <= bounds.most * (1 + 1e-9), seed
        assert (bounds.most < np.inf) == has_most


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_theorems_say_of_two_policies_the_others_exceed(policy: str) -> None:
    job = random_job(508)
    most = simulate(*job).bounds().most
    assert (simulate(*job, policy).seconds > most * (1 + 1e-3)) == (policy not in ("oes", "maxmin"))


def test_no_flow_of_a_set_ends_later_under_max_min_than_under_equal_shares() -> None:
    """Flows that all start at 0. What has ended under `oes` has ended under `maxmin`, and so it goes on."""
    for seed in range(60):
        job = random_job(seed)
        volume = np.zeros_like(job.demands.volume[:1])
        graph = job.tasks.edges("graph")
        volume[:, graph] = job.demands.volume[:1, graph]
        demands = Demands(job.demands.seconds[:1] * 0, volume, job.demands.threads)
        equal, fair = (simulate(*job[:3], demands, policy).times.flow_end[0, graph] for policy in ("oes", "maxmin"))
        crossing = np.isfinite(equal)
        assert (fair[crossing] <= equal[crossing] * (1 + 1e-9)).all(), seed


def test_schedules_that_are_wrong_are_found_out() -> None:
    """Each time of a good schedule, changed: the rules are no rules if nothing breaks them."""
    runs = (simulate(*random_job(seed)) for seed in range(99))
    run = next(run for run in runs if run.given.has_flow().sum(1).min() > 5 and run.given.iterations > 3)
    assert broken_rules(run) == []

    def broken(**changed: np.ndarray) -> str:
        return " ".join(broken_rules(replace(run, times=replace(run.times, **changed))))

    early = run.times.task_start.copy()
    early[1:] = run.times.task_end[:-1] - 0.01
    assert "(11)" in broken(task_start=early, task_ready=early)
    assert any(rule in broken(flow_start=run.times.flow_start * 0.9) for rule in ("(8)", "(12)"))
    late = run.times.flow_end * 1.05
    assert "(13)" in broken(flow_end=late) and "(9)" in broken(flow_end=late)
    assert "did not take its seconds" in broken(task_end=run.times.task_end * 1.1)
    assert "Lemma 2" in broken(task_cause=np.full_like(run.times.task_cause, -1))
