"""What a user sees of a run: report, timeline, bytes of links; and what is refused, in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gnnsys.planning import ClusterMachines, CountedAmount, Demands, DrawnAmount, TrainingTasks, simulate
from tests.planning.simulation.random_jobs import random_job


def test_the_timeline_has_every_task_and_flow_that_takes_time() -> None:
    run = simulate(*random_job(3))
    events = json.loads(json.dumps(run.timeline()))["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == (run.given.seconds > 0).sum()
    assert max(event["ts"] + event["dur"] for event in tasks) == pytest.approx(run.seconds * 1e6)
    begun, ended = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "be")
    assert begun.keys() == ended.keys()
    assert len(begun) == (run.given.has_flow() & (run.given.volume > 0)).sum()
    sent = sum(event["args"]["bytes"] for event in begun.values())
    assert sent == pytest.approx(run.link_bytes()[: run.machines.num_machines].sum())
    first = [event for event in run.timeline(1)["traceEvents"] if event["ph"] == "X"]
    assert len(first) == (run.given.seconds[0] > 0).sum()


def test_bytes_of_links_are_those_of_the_flows_that_cross_machines() -> None:
    tasks = TrainingTasks.of_job(2, 1, 1)
    demands = Demands.of(tasks, 3, seconds={}, volume={"graph": [[5.0], [7.0]], "gradient": 11.0, "parameter": 13.0})
    run = simulate(ClusterMachines([1.0, 1.0], [1.0, 1.0]), tasks, [0, 1, 0, 0, 1], demands)
    # Part 1 to the sampler, gradients to the server; parameters of the last iteration go nowhere.
    assert run.link_bytes().tolist() == [3 * 11, 3 * 7 + 2 * 13, 3 * 7 + 2 * 13, 3 * 11]


def test_an_iteration_of_a_full_pipeline_takes_what_the_slowest_stage_takes() -> None:
    tasks = TrainingTasks.of_job(1, 1, 1)
    demands = Demands.of(tasks, 40, seconds={"store": 1.0, "sampler": 3.0, "worker": 2.0}, volume={})
    run = simulate(ClusterMachines([1.0], [1.0]), tasks, [0] * 4, demands)
    assert run.seconds == 1 + 40 * 3 + 2
    assert run.seconds_per_iteration == 3


def test_drawn_amounts_have_the_mean_and_peak_that_they_are_given() -> None:
    tasks = TrainingTasks.of_job(4, 4, 2)
    for ratio in (1.0, 1.16, 1.9, 3.0):
        demands = Demands.of(tasks, 400, seconds={}, volume={"graph": DrawnAmount(100.0, ratio)}, seed=1)
        drawn = demands.volume[:, tasks.edges("graph")]
        assert drawn.mean() == pytest.approx(100, rel=0.02)
        assert drawn.max() <= 100 * ratio * (1 + 1e-12)
        assert drawn.max() >= 100 * (1 + (ratio - 1) * 0.85)
    again = Demands.of(tasks, 400, seconds={}, volume={"graph": DrawnAmount(100.0, 3.0)}, seed=1)
    assert np.array_equal(again.volume, demands.volume)


def test_counted_amounts_are_used_in_turn() -> None:
    tasks = TrainingTasks.of_job(2, 1, 1)
    counted = np.arange(6.0).reshape(3, 2, 1)
    demands = Demands.of(tasks, 5, seconds={}, volume={"graph": CountedAmount(counted)})
    assert demands.volume[:, tasks.edges("graph")].tolist() == counted[[0, 1, 2, 0, 1]].tolist()
    mixed = Demands.of(tasks, 50, seconds={}, volume={"graph": CountedAmount(counted, shuffle=True)})
    assert {tuple(row) for row in mixed.volume[:, tasks.edges("graph")].reshape(50, 2)} == {(0, 1), (2, 3), (4, 5)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ClusterMachines([1.0, 0.0], [1.0, 1.0]), "rate_in of machine 1 is 0.0; it must be finite and more"),
        (lambda: ClusterMachines([1.0, 1.0], [1.0]), "rate_out must be 2 numbers, got an array of shape"),
        (lambda: ClusterMachines([], []), "rate_in is empty"),
        (lambda: ClusterMachines([1.0], [1.0], cores=[-1]), "cores of machine 0 is -1"),
        (lambda: ClusterMachines([1.0], [1.0], uplink=[0]), "uplink needs uplink_in and uplink_out"),
        (lambda: ClusterMachines([1.0], [1.0], uplink_in=[1]), "need uplink"),
        (lambda: ClusterMachines([1.0], [1.0], uplink=[1], uplink_in=[1], uplink_out=[1]), "from -1"),
        (lambda: ClusterMachines([1.0] * 2, [1.0] * 2, names=["a", "a"]), "2 names .1 different. for 2 machines"),
        (lambda: _run(speeds={"wroker": [1.0, 2.0]}), "speeds of 'wroker': kinds are"),
        (lambda: TrainingTasks.of_job(0, 1), "parts is 0; at least 1"),
        (lambda: TrainingTasks.of_job(1, 1, sync="star"), "sync is 'star'; it is one of ps, ring"),
        (lambda: TrainingTasks.of_job(1, 1, servers=0), "servers is 0"),
        (lambda: TrainingTasks.of_job(1, 1, ahead=0), "ahead is 0; at least 1 batch, or None"),
        (lambda: DrawnAmount(1.0, 0.5), "peak_to_mean is 0.5"),
        (lambda: _demands(volume={"grpah": 1.0}), "volume of 'grpah': kinds are graph"),
        (lambda: _demands(volume={"graph": np.ones(7)}), r"an amount of shape \(7,\) does not fit \(2, 2\)"),
        (lambda: _demands(volume={"graph": -1.0}), "volume must be finite and at least 0"),
        (lambda: _demands(iterations=0), "iterations is 0"),
        (lambda: _run(placement=[0] * 3), "6 machine numbers are needed .2 stores, 2 samplers, 1 workers, 1 servers"),
        (lambda: _run(placement=[0.0] * 6), "got float64"),
        (lambda: _run(placement=[0, 0, 0, 0, 0, 2]), "machines are 0 to 1, got 0 to 2"),
        (lambda: _run(policy="fair"), "policy is 'fair'; it is one of oes"),
        (lambda: _run(tasks=TrainingTasks.of_job(2, 1, 2, sync="none"), placement=[0] * 5), "made for .* tasks"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused_in_one_line(call, message) -> None:
    with pytest.raises(ValueError, match=message) as said:
        call()
    assert "\n" not in str(said.value)


def _demands(iterations: int = 2, **volume) -> Demands:
    return Demands.of(TrainingTasks.of_job(2, 1, 2), iterations, seconds={}, **{"volume": {}, **volume})


def _run(
    tasks: TrainingTasks | None = None, placement: object = (0,) * 6, policy: str = "oes", speeds: dict | None = None
) -> None:
    tasks = tasks or TrainingTasks.of_job(2, 1, 2)
    simulate(ClusterMachines([1.0] * 2, [1.0] * 2, speeds=speeds or {}), tasks, placement, _demands(), policy)
