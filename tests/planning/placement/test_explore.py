from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning import run_bounds
from gnnsys.planning.placement.baselines import (
    all_placements,
    distdgl_placement,
    even_placement,
    exhaustive,
    random_placement,
)
from gnnsys.planning.placement.explore import ExploreSettings, explore
from gnnsys.planning.placement.first_placement import NoPlacement
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import Resources
from tests.planning.placement.instances import small_problem
from tests.planning.simulation.random_jobs import random_job


def problem_of(seed: int, *, like_gnnsys: bool) -> tuple[PlacementProblem, np.ndarray]:
    """A random job of the simulator's tests, with room for everything everywhere."""
    job = random_job(seed, like_gnnsys=like_gnnsys)
    num, stores = job.machines.num_machines, job.tasks.count("store")
    resources = Resources(("cores",), np.ones((num, 1)), np.zeros((3, 1)), np.zeros((stores, 1)),
                          tuple(f"h{m}" for m in range(num)))  # fmt: skip
    problem = PlacementProblem(job.machines, job.tasks, job.demands, resources, job.placement[:stores],
                               np.ones((stores, num), dtype=bool))  # fmt: skip
    return problem, job.placement


@pytest.mark.parametrize("like_gnnsys", [False, True])
def test_native_bounds_are_those_of_the_simulator(like_gnnsys):
    for seed in range(40):
        problem, placement = problem_of(seed, like_gnnsys=like_gnnsys)
        found = problem.bounds(placement[None])
        expected = run_bounds(problem.machines, problem.tasks, placement, problem.demands)
        for name in found._fields:
            assert getattr(found, name)[0] == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-12), (seed, name)


def replay(problem: PlacementProblem, start: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Where a walk is behind each step, [steps, num_placed]."""
    places, now = [], start.copy()
    for task, machine, accepted in moves:
        if accepted:
            now[task] = machine
        places.append(now.copy())
    return np.array(places)


def penalties(problem: PlacementProblem, places: np.ndarray) -> np.ndarray:
    """The sum of Eq. 27."""
    capacity = problem.resources.capacity
    used = np.array([problem.resources.used(place, problem.counts) for place in places])
    return np.maximum((used - capacity) / capacity, 0).sum(axis=(1, 2))


@pytest.mark.parametrize("cost", ["path", "bound", "load"])
def test_a_walk_has_the_costs_of_eq_27_and_finds_what_the_text_says(cost):
    problem, gamma = small_problem(), 0.2
    start = distdgl_placement(problem)
    walk = problem.walk(start, cost=cost, steps=2000, beta=2.0, relative=True, relaxed=1.0, near=gamma, key=3)
    places = replay(problem, start, walk.moves.numpy())
    bounds = problem.bounds(places)
    seconds = {
        "path": bounds.sharing_path,
        "bound": bounds.least,
        "load": np.maximum(bounds.busiest_link, bounds.busiest_cores),
    }[cost]
    over = penalties(problem, places)
    assert np.allclose(walk.costs.numpy(), seconds * (1 + over), rtol=1e-9)
    assert (over > 0).any(), "it walks through placements that do not fit"
    least = explored_cost = walk.found_costs.numpy()[0]
    expected, seen = [start], {start.tobytes()}
    for place, its_cost, accepted, beyond in zip(
        places, walk.costs.numpy(), walk.moves[:, 2].numpy(), over, strict=True
    ):
        if accepted and beyond == 0 and its_cost <= (1 + gamma) * least:
            least = min(least, its_cost)
            if place.tobytes() not in seen:
                seen.add(place.tobytes())
                expected.append(place)
    assert np.array_equal(walk.found.numpy(), np.array(expected)) and least <= explored_cost
    assert len(expected) >= 3


def test_no_machine_takes_more_than_the_relaxed_capacity():
    problem = small_problem()
    for mu in (0.0, 0.5):
        walk = problem.walk(distdgl_placement(problem), cost="bound", steps=800, beta=0.1, relative=True, relaxed=mu,
                            near=0.1, key=1)  # fmt: skip
        places = replay(problem, distdgl_placement(problem), walk.moves.numpy())
        used = np.array([problem.resources.used(place, problem.counts) for place in places])
        assert (used <= problem.resources.room(mu)).all()
        assert (used > problem.resources.room()).any() == (mu > 0)


def visits_follow_costs(problem: PlacementProblem, cost: str, beta: float, steps: int, thin: int) -> float:
    """The p-value of a chi-square test that the walk visits placements in proportion to exp(-beta cost)."""
    stats = pytest.importorskip("scipy.stats")
    start = distdgl_placement(problem)
    walk = problem.walk(start, cost=cost, steps=steps, beta=beta, relative=True, relaxed=1.0, near=0.1, key=11)
    relaxed = Resources(
        problem.resources.names,
        2 * problem.resources.capacity,
        problem.resources.demand,
        problem.resources.store_demand,
        problem.resources.machines,
    )
    states = all_placements(
        PlacementProblem(
            problem.machines, problem.tasks, problem.demands, relaxed, problem.store_machine, problem.store_allowed
        )
    )
    assert 20 < len(states) <= 200
    bounds = problem.bounds(states)
    seconds = bounds.sharing_path if cost == "path" else bounds.least
    costs = seconds * (1 + penalties(problem, states))
    first = problem.bounds(start[None])
    unit = (first.sharing_path if cost == "path" else first.least)[0]
    weights = np.exp(-beta * (costs - costs.min()) / unit)
    number = {state.tobytes(): at for at, state in enumerate(states)}
    places = replay(problem, start, walk.moves.numpy())[thin::thin]
    visits = np.bincount([number[place.tobytes()] for place in places], minlength=len(states))
    expected = len(places) * weights / weights.sum()
    often = expected >= 5
    assert often.sum() > 10 and weights[often].max() / weights[often].min() > 4, "the test has something to see"
    observed = np.append(visits[often], visits[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    return float(stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue)


@pytest.mark.parametrize("cost", ["path", "bound"])
def test_placements_are_visited_in_proportion_to_exp_of_minus_beta_times_cost(cost):
    assert visits_follow_costs(small_problem(), cost, beta=3.0, steps=72_000, thin=24) > 0.001


def test_a_wrong_law_would_be_noticed():
    """The same test with visits of another beta fails, so it can."""
    problem = small_problem()
    walked = problem.walk

    def other(start, **settings):
        return walked(start, **(settings | {"beta": settings["beta"] * 1.5}))

    object.__setattr__(problem, "walk", other)
    assert visits_follow_costs(problem, "bound", beta=3.0, steps=72_000, thin=24) < 0.001


def test_the_result_is_the_least_time_of_all_that_would_be_simulated():
    for seed in range(3):
        problem = small_problem(seed)
        all_of_them = explore(problem, ExploreSettings(steps=600, simulate_all=True, seed=seed))
        some = explore(problem, ExploreSettings(steps=600, seed=seed))
        assert some.seconds == all_of_them.seconds <= all_of_them.start.seconds
        assert some.num_simulated <= all_of_them.num_simulated == all_of_them.num_found
        assert problem.fits(some.placement)
        assert problem.simulate(some.placement).seconds == some.seconds


def test_a_search_of_a_small_instance_finds_what_trying_all_finds():
    for seed in range(3):
        problem = small_problem(seed)
        best = exhaustive(problem)
        assert min(problem.simulate(place).seconds for place in all_placements(problem)) == best.seconds
        assert explore(problem, ExploreSettings(steps=4000, beta=3.0, gamma=1.0)).seconds == pytest.approx(best.seconds)


def test_parts_move_where_disks_allow():
    fixed = small_problem(2)
    allowed = np.eye(3, dtype=bool)
    allowed[2] = [True, False, True]
    moving = small_problem(2, store_allowed=allowed)
    assert len(moving.movable) == len(fixed.movable) + 1
    found = explore(moving, ExploreSettings(steps=4000, beta=3.0, gamma=1.0))
    assert found.placement[0] == 0 and found.placement[1] == 1 and found.placement[2] in (0, 2)
    assert found.seconds == pytest.approx(exhaustive(moving).seconds)
    assert found.seconds <= exhaustive(fixed).seconds
    with pytest.raises(ValueError, match="part 2 is not on the disk of h2"):
        small_problem(store_allowed=np.eye(3, dtype=bool)[[0, 1, 0]])


def test_baselines_keep_resources_and_do_what_they_say():
    for seed in range(4):
        problem = small_problem(seed)
        placements = [distdgl_placement(problem), even_placement(problem), random_placement(problem, seed)]
        assert all(problem.fits(place) for place in placements)
    samplers, workers = placements[0][3:5], placements[0][5:7]
    assert (samplers == workers).all()
    assert len({random_placement(problem, seed).tobytes() for seed in range(20)}) > 5
    even = even_placement(problem)
    assert even[5:7].tolist() == [0, 1]


def test_what_does_not_fit_is_refused_by_all():
    names = ("h0", "h1", "h2")
    tight = Resources(("cores",), np.full((3, 1), 1.0), np.array([[2.0], [1.0], [1.0]]), np.zeros((3, 1)), names)
    problem = small_problem(resources=tight)
    for place in (distdgl_placement, even_placement, random_placement, exhaustive, explore):
        with pytest.raises(NoPlacement, match="no host can hold a sampler"):
            place(problem)


def test_too_many_placements_are_not_tried_one_by_one():
    with pytest.raises(ValueError, match="more than 10 placements"):
        all_placements(small_problem(), most=10)


@pytest.mark.parametrize(
    ("settings", "told"), [({"cost": "much"}, "path, bound, load"), ({"steps": -1}, "steps"), ({"beta": -1}, "beta")]
)
def test_wrong_settings_are_one_line(settings, told):
    with pytest.raises(ValueError, match=told):
        ExploreSettings(**settings)
