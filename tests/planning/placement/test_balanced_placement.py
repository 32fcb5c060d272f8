"""Balanced placements beside all placements: none has a busiest link of less, and the floor is under every one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gnnsys.planning import (
    ClusterMachines,
    Demands,
    NoPlacement,
    PlacementProblem,
    Resources,
    TrainingTasks,
    all_placements,
    balanced_placements,
    distdgl_placement,
    placement_floor,
    search_placements,
)
from gnnsys.planning.placement.explore import ExploreSettings
from gnnsys.planning.placement.search_placements import ANNEALED
from tests.planning.placement.instances import small_problem


def alike_problem(seed: int, **job: object) -> PlacementProblem:
    """Machines of unequal links and rooms. Tasks of a kind are exactly alike, as those of the model are."""
    generator = np.random.default_rng(seed)
    num = int(generator.integers(2, 4))
    tasks = TrainingTasks.of_job(num, 2, int(generator.integers(1, 3)), **{"sync": "ps", **job})  # type: ignore[arg-type]
    names = tuple(f"h{m}" for m in range(num))
    graph = np.repeat(generator.uniform(0.5, 3.0, (num, 1)), len(tasks.worker_of_sampler), axis=1)
    demands = Demands.of(
        tasks,
        3,
        seconds={"sampler": 0.2, "worker": 0.5, "store": 0.1},
        volume={"graph": graph, "batch": float(generator.uniform(0, 4)), "gradient": 0.3, "parameter": 0.2},
    )
    rates = generator.choice([1.0, 2.0, 5.0], num)
    cores = generator.uniform(0.5, 4.0, num) if seed % 2 else None
    machines = ClusterMachines(rates, rates[::-1], cores=cores, names=names)
    capacity = generator.uniform(3.0, 9.0, (num, 1))
    resources = Resources(("room",), capacity, np.array([[2.0], [1.0], [0.5]]), np.zeros((num, 1)), names)
    return PlacementProblem(machines, tasks, demands, resources, generator.permutation(num))


def least_of_all(problem: PlacementProblem) -> float:
    bounds = problem.bounds(all_placements(problem))
    return float(np.maximum(bounds.busiest_link, bounds.busiest_cores).min())


@pytest.mark.parametrize("job", [{}, {"sync": "none"}, {"own_samplers": True}, {"serve_each": True, "ahead": 2}])
def test_no_placement_has_less_on_its_busiest_link_and_cores(job):
    seen = 0
    for seed in range(25):
        problem = alike_problem(seed, **job)
        if not len(all_placements(problem)):
            with pytest.raises(NoPlacement):
                balanced_placements(problem)
            continue
        seen += 1
        [found] = balanced_placements(problem, [1.0])
        bounds = problem.bounds(found[None])
        least = least_of_all(problem)
        assert problem.fits(found)
        assert max(bounds.busiest_link[0], bounds.busiest_cores[0]) == pytest.approx(least, rel=1e-9), seed
        assert placement_floor(problem) == pytest.approx(least, rel=1e-9), seed
    assert seen > 8


def test_the_floor_is_under_every_placement_where_tasks_differ():
    for seed in range(30):
        problem = small_problem(seed)
        assert placement_floor(problem) <= least_of_all(problem) * (1 + 1e-12)


def test_batches_that_weigh_more_keep_samplers_with_their_worker():
    problem = small_problem(3)
    volume = problem.demands.volume.copy()
    first, shape = problem.tasks.edges_of["batch"]
    volume[:, first : first + int(np.prod(shape))] *= 4.0
    problem = replace(problem, demands=replace(problem.demands, volume=volume))
    apart = []
    for weight in (0.0, 100.0):
        [found] = balanced_placements(problem, [weight])
        counts = problem.counts
        workers = found[counts.worker_id(0) :][: counts.num_workers]
        samplers = found[counts.num_stores : counts.worker_id(0)]
        apart.append(int((samplers != workers[problem.tasks.worker_of_sampler]).sum()))
    assert apart[1] <= apart[0] and apart[1] == 0


def test_a_search_is_never_slower_than_its_starts_and_says_what_it_simulated():
    for seed in range(4):
        problem = small_problem(seed)
        found = search_placements(problem, ExploreSettings(steps=200), tries=10)
        times = [each.seconds for each in found]
        assert times == sorted(times)
        assert times[0] <= problem.simulate(distdgl_placement(problem)).seconds
        assert {"ifs", "distdgl", "balanced"} <= {each.name for each in found}
        for each in found[:3]:
            assert problem.fits(each.placement)
            assert problem.simulate(each.placement).seconds == each.seconds


def test_a_search_of_small_instances_finds_what_trying_all_finds():
    for seed in range(6):
        problem = small_problem(seed)
        best = min(problem.simulate(one).seconds for one in all_placements(problem))
        found = search_placements(problem, replace(ANNEALED, steps=2000), tries=20)
        assert found[0].seconds == pytest.approx(best, rel=1e-9)
