"""Lemma 2 and what is made of it: a chain of tasks and flows that covers the makespan, and what it was spent on."""

from __future__ import annotations

import pytest

from gnnsys.planning import POLICIES, ClusterMachines, Demands, TrainingTasks, simulate
from tests.planning.simulation.random_jobs import random_job


@pytest.mark.parametrize("like_gnnsys", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_chain_covers_the_makespan_without_a_gap(policy: str, like_gnnsys: bool) -> None:
    for seed in range(12):
        run = simulate(*random_job(seed, like_gnnsys=like_gnnsys), policy)
        binding = run.binding()
        assert binding.chain[0].start == 0
        assert binding.chain[-1].end == run.seconds
        for before, after in zip(binding.chain, binding.chain[1:], strict=False):
            assert before.end == after.start
        assert binding.total == pytest.approx(run.seconds)


def test_a_slow_link_is_named() -> None:
    machines = ClusterMachines([1e9, 1e7], [1e9, 1e9], names=["fast", "slow"])
    tasks = TrainingTasks.of_job(2, 2, 1, sync="ring")
    demands = Demands.of(tasks, 4, seconds={"worker": 0.1}, volume={"graph": 1e7, "chunk": 1e5})
    binding = simulate(machines, tasks, [0, 1, 0, 1, 0, 1], demands).binding()
    assert "link into slow" in binding.names[binding.first]
    assert binding.percent(binding.first) > 60
