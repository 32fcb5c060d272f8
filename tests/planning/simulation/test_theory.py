"""The paper's model on random jobs: every schedule keeps (6)-(15), Lemmas 1 and 2 and Theorems 1 and 3."""

from __future__ import annotations

import pytest

from gnnsys.planning import POLICIES, simulate
from tests.planning.simulation.model_checks import check_bounds, check_chain, check_order, check_traffic
from tests.planning.simulation.random_jobs import random_job


@pytest.mark.parametrize("policy", ["oes", "maxmin"])
@pytest.mark.parametrize("block", range(3))
def test_schedules_keep_the_model_and_both_theorems(block: int, policy: str) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        run = simulate(*random_job(seed), policy)
        check_order(run)
        check_traffic(run)
        check_chain(run)
        check_bounds(run)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["oes", "maxmin"])
def test_two_thousand_schedules_keep_the_model_and_both_theorems(policy: str) -> None:
    for seed in range(2000):
        run = simulate(*random_job(seed), policy)
        check_order(run)
        check_traffic(run)
        check_chain(run)
        check_bounds(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_all_that_gnnsys_adds_schedules_keep_the_order_and_a_chain_without_a_gap(policy: str) -> None:
    for seed in range(40):
        run = simulate(*random_job(seed, like_gnnsys=True), policy)
        check_order(run)
        check_chain(run)
        assert run.bounds().least <= run.seconds * (1 + 1e-9)


def test_no_flow_of_a_set_is_slower_under_max_min_than_under_equal_shares() -> None:
    """One iteration whose flows all start at 0: what ends first under `oes` ends no later under `maxmin`."""
    for seed in range(60):
        job = random_job(seed)
        seconds = job.demands.seconds * 0
        demands = type(job.demands)(seconds[:1], job.demands.volume[:1], job.demands.threads)
        ends = [simulate(*job[:3], demands, policy).seconds for policy in ("oes", "maxmin")]
        assert ends[1] <= ends[0] * (1 + 1e-9), seed
