from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning.placement.first_placement import NoPlacement, first_placement, what_lacks, with_identities
from gnnsys.planning.placement.resources import Resources, TaskCounts
from tests.planning.placement.instances import random_resources


def milp_finds_one(resources: Resources, counts: TaskCounts, store_machine: np.ndarray) -> bool:
    """HiGHS's answer: whole numbers of tasks on each machine that add up, within what is left behind stores."""
    optimize = pytest.importorskip("scipy.optimize")
    left = resources.behind_stores(store_machine)
    if (left < 0).any():
        return False
    num_machines, kinds = len(left), 3
    adds_up = np.tile(np.eye(kinds), num_machines)
    fits = np.kron(np.eye(num_machines), resources.demand.T)
    found = optimize.milp(
        np.zeros(num_machines * kinds),
        constraints=[
            optimize.LinearConstraint(adds_up, counts.by_kind, counts.by_kind),
            optimize.LinearConstraint(fits, -np.inf, left.reshape(-1) + 1e-7),
        ],
        integrality=np.ones(num_machines * kinds),
    )
    assert found.status in (0, 2), found.message
    return found.status == 0


def compare_with_milp(num_instances: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    found = 0
    for _ in range(num_instances):
        resources, counts, stores = random_resources(generator)
        expected = milp_finds_one(resources, counts, stores)
        try:
            placement = first_placement(resources, counts, stores, seed=int(generator.integers(1 << 30)))
        except NoPlacement as error:
            assert not expected, (resources, counts, stores)
            assert "\n" not in str(error) and str(error)
            continue
        assert expected, (resources, counts, stores)
        assert len(placement) == counts.num_placed and resources.fits(placement, counts)
        assert (placement[: counts.num_stores] == stores).all()
        found += 1
    assert 0.2 * num_instances < found < 0.8 * num_instances, "both answers are tried"


def test_a_placement_is_found_exactly_when_a_milp_finds_one():
    compare_with_milp(100, seed=5)


@pytest.mark.long
def test_a_placement_is_found_exactly_when_a_milp_finds_one_1000_times():
    compare_with_milp(1000, seed=6)


def cores_and_gpus(capacity: list[list[float]], store: float = 0.0) -> Resources:
    """A sampler takes 2 cores, a worker a core and a GPU, a server a core."""
    return Resources(
        ("cores", "GPUs"),
        np.array(capacity, dtype=float),
        np.array([[2, 0], [1, 1], [1, 0]], dtype=float),
        np.array([[store, 0]] * len(capacity)),
        tuple(f"h{m}" for m in range(len(capacity))),
    )


def test_one_machine_and_no_tasks_at_all_are_cases_like_others():
    alone = cores_and_gpus([[6, 1]])
    counts = TaskCounts(1, 1, 2, 1)
    assert first_placement(alone, counts, np.zeros(1, int)).tolist() == [0, 0, 0, 0, 0]
    assert first_placement(alone, TaskCounts(1, 0), np.zeros(1, int)).tolist() == [0]
    assert first_placement(cores_and_gpus([[0, 0]]), TaskCounts(1, 0), np.zeros(1, int)).tolist() == [0]


def test_tenths_of_cores_fit_as_often_as_they_should():
    tenths = Resources(("cores",), np.array([[0.9]]), np.array([[0.0], [0.3], [0.0]]), np.zeros((1, 1)), ("h0",))
    assert first_placement(tenths, TaskCounts(1, 3), np.zeros(1, int)).tolist() == [0, 0, 0, 0]


def test_as_many_samplers_as_can_sit_with_their_worker():
    counts = TaskCounts(3, 3, 2)
    placed = np.array([[3, 1, 0], [1, 2, 0], [2, 0, 0]])
    found = with_identities(placed, counts, np.arange(3))
    samplers, workers = found[3:9].reshape(3, 2), found[9:]
    assert workers.tolist() == [0, 1, 1]
    assert (samplers == workers[:, None]).sum() == min(3, 2) + min(1, 4) + min(2, 0)
    assert np.bincount(found[3:9], minlength=3).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("capacity", "store", "counts", "told"),
    [
        ([[8, 2], [8, 0]], 0, TaskCounts(2, 3), "GPUs lack 1: 3 trainers need 3, 2 hosts have 2"),
        ([[4, 2], [4, 2]], 1, TaskCounts(2, 2, 2), "cores lack 4: 2 trainers and 4 samplers need 10, 2 hosts have 6"),
        ([[1, 1], [9, 0]], 2, TaskCounts(2, 1), "h0 lacks 1 cores for the parts that it serves"),
        ([[0, 1], [9, 0]], 0, TaskCounts(2, 1), "no host can hold a trainer: it needs 1"),
        ([[3, 1], [3, 1], [1, 0]], 0, TaskCounts(3, 1, 3), "whole: they would with 1 more cores on every host"),
    ],
)
def test_what_does_not_fit_is_told_with_how_much_is_missing(capacity, store, counts, told):
    resources = cores_and_gpus(capacity, store)
    with pytest.raises(NoPlacement) as error:
        first_placement(resources, counts, np.arange(len(capacity)))
    assert told in str(error.value), str(error.value)


def test_what_is_said_to_be_missing_is_what_is_missing():
    """With so much more on every host there is a placement, with a little less there is none."""
    checked = 0
    generator = np.random.default_rng(8)
    while checked < 5:
        resources, counts, stores = random_resources(generator)
        try:
            first_placement(resources, counts, stores)
        except NoPlacement as error:
            text = str(error)
            if "do not fit whole: they would with " not in text:
                continue
            amount, _, name = text.split("they would with ")[1].split(" on every")[0].split(" or ")[0].split(" ")
            resource = resources.names.index(name)
            for factor, fits in ((1 + 1e-4, True), (1 - 1e-4, False)):
                wider = resources.capacity.copy()
                wider[:, resource] += float(amount) * factor
                more = Resources(resources.names, wider, resources.demand, resources.store_demand, resources.machines)
                assert milp_finds_one(more, counts, stores) == fits
            checked += 1


def test_the_reason_alone_can_be_asked_for():
    assert "GPUs lack 1" in what_lacks(cores_and_gpus([[8, 1]]), TaskCounts(1, 2), np.zeros(1, int))
