"""What gnnsys does differently from the paper, one option at a time, on jobs small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning import POLICIES, ClusterMachines, Demands, TrainingTasks, simulate


def two_machines(**options: object) -> ClusterMachines:
    return ClusterMachines([1.0, 1.0], [1.0, 1.0], **options)  # type: ignore[arg-type]


def test_tasks_on_one_core_take_turns_and_on_enough_of_them_do_not() -> None:
    tasks = TrainingTasks.of_job(1, 2, 1, sync="none")
    demands = Demands.of(tasks, 1, seconds={"worker": 1.0}, volume={})
    placed = [0, 0, 0, 0, 0]
    for cores, seconds in ((None, 1.0), ([2, 2], 1.0), ([1, 1], 2.0), ([0.5, 0.5], 4.0)):
        assert simulate(two_machines(cores=cores), tasks, placed, demands).seconds == pytest.approx(seconds)
    on_a_device = Demands.of(tasks, 1, seconds={"worker": 1.0}, volume={}, threads={"worker": 0})
    assert simulate(two_machines(cores=[1, 1]), tasks, placed, on_a_device).seconds == 1
    four_threads = Demands.of(tasks, 1, seconds={"worker": 1.0}, volume={}, threads={"worker": 4})
    assert simulate(two_machines(cores=[2, 2]), tasks, placed, four_threads).seconds == 4


def test_a_task_alone_gets_its_cores_back_when_another_ends() -> None:
    tasks = TrainingTasks.of_job(1, 2, 1, sync="none")
    demands = Demands.of(tasks, 1, seconds={"worker": [1.0, 3.0]}, volume={})
    run = simulate(two_machines(cores=[1, 1]), tasks, [0] * 5, demands)
    assert run.times.task_end[0, tasks.ids("worker")].tolist() == [2.0, 4.0]


def test_a_faster_machine_takes_less_time_for_the_kinds_it_is_faster_at() -> None:
    tasks = TrainingTasks.of_job(1, 1, 1, sync="none")
    demands = Demands.of(tasks, 1, seconds={"worker": 1.0, "sampler": 1.0}, volume={})
    machines = ClusterMachines([1.0], [1.0], speeds={"worker": [4.0]})
    assert simulate(machines, tasks, [0, 0, 0], demands).seconds == 1.25


def test_samplers_run_ahead_for_ever_or_as_far_as_they_may() -> None:
    """Sampling takes 1 and a worker 10: how many batches are sampled when the first worker ends?"""
    for ahead, sampled in ((None, 10), (1, 2), (2, 3), (4, 5)):
        tasks = TrainingTasks.of_job(1, 1, 1, sync="none", ahead=ahead)
        demands = Demands.of(tasks, 20, seconds={"sampler": 1.0, "worker": 10.0}, volume={})
        run = simulate(two_machines(), tasks, [0, 0, 0], demands)
        ends = run.times.task_end[:, tasks.ids("sampler")[0]]
        assert (ends <= 11).sum() == (sampled + 1 if ahead is None else sampled), ahead
        assert run.seconds == 201


def test_with_one_batch_ahead_sampling_and_training_overlap() -> None:
    """The work for batch n begins when batch n - 1 starts: two batches are in the making, and no more."""
    tasks = TrainingTasks.of_job(1, 1, 1, sync="none", ahead=1)
    demands = Demands.of(tasks, 10, seconds={"sampler": 2.0, "worker": 3.0}, volume={})
    assert simulate(two_machines(), tasks, [0, 0, 0], demands).seconds == 2 + 10 * 3


def test_a_server_with_one_thread_answers_one_sampler_after_the_other() -> None:
    tasks = TrainingTasks.of_job(1, 3, 1, sync="none", serve_each=True)
    demands = Demands.of(tasks, 1, seconds={"serving": 1.0}, volume={})
    for threads, seconds in ((None, 1), ([1, 1], 3), ([2, 2], 2), ([3, 3], 1)):
        run = simulate(two_machines(server_threads=threads), tasks, [0] * 7, demands)
        assert run.seconds == seconds
    assert run.times.task_start[0, tasks.ids("serving")[0]].tolist() == [0, 0, 0]


def test_samplers_that_sit_with_their_worker_are_not_placed_and_move_with_it() -> None:
    tasks = TrainingTasks.of_job(2, 2, 1, own_samplers=True, sync="ring")
    assert tasks.num_placed == 4
    machine = tasks.machine_of([0, 1, 1, 0], 2)
    assert machine[tasks.ids("sampler")].tolist() == [1, 0]
    assert machine[tasks.ids("ring")].tolist() == [[1, 0], [1, 0]]


def test_rows_pushed_to_their_owners_come_back_before_the_next_step() -> None:
    """A worker on machine 0, the owner of the only part on machine 1: 2 s to push, 1 s to apply, 3 s to pull."""
    tasks = TrainingTasks.of_job(1, 1, 1, sync="none", sparse=True)
    demands = Demands.of(tasks, 3, seconds={"worker": 1.0, "owner": 1.0}, volume={"push": 2.0, "pull": 3.0})
    run = simulate(two_machines(), tasks, [1, 0, 0], demands)
    assert run.times.task_start[:, tasks.ids("worker")[0]].tolist() == [0, 7, 14]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flow_over_an_uplink_is_as_slow_as_the_uplink(policy: str) -> None:
    tasks = TrainingTasks.of_job(1, 1, 1, sync="none")
    demands = Demands.of(tasks, 1, seconds={}, volume={"graph": 1.0})
    behind = dict(uplink=[0, 0, 1], uplink_in=[1.0, 0.25], uplink_out=[0.5, 1.0])
    machines = ClusterMachines([1.0] * 3, [1.0] * 3, **behind)
    assert simulate(machines, tasks, [0, 1, 1], demands, policy).seconds == 1  # the same uplink: not over it
    run = simulate(machines, tasks, [0, 2, 2], demands, policy)
    assert run.seconds == 4
    assert run.binding().names[run.binding().first] == "the uplink 1 in"


def test_two_flows_share_an_uplink_though_their_machines_differ() -> None:
    tasks = TrainingTasks.of_job(2, 2, 1, sync="none")
    volume = np.array([[1.0, 0.0], [0.0, 1.0]])
    demands = Demands.of(tasks, 1, seconds={}, volume={"graph": volume})
    machines = ClusterMachines([1.0] * 4, [1.0] * 4, uplink=[0, 0, -1, -1], uplink_in=[1.0], uplink_out=[1.0])
    assert simulate(machines, tasks, [0, 1, 2, 3, 2, 3], demands).seconds == 2


def test_a_ring_takes_so_many_steps_and_moves_the_same_bytes_in_one() -> None:
    steps, whole = (TrainingTasks.of_job(1, 4, 1, sync=sync) for sync in ("ring", "ring-whole"))
    assert steps.ids("ring").shape == (6, 4) and whole.ids("ring").shape == (1, 4)
    machines = ClusterMachines([1.0] * 4, [1.0] * 4)
    placed = [0, 0, 1, 2, 3, 0, 1, 2, 3]
    by_steps = Demands.of(steps, 3, seconds={"worker": 1.0}, volume={"chunk": 0.25})
    at_once = Demands.of(whole, 3, seconds={"worker": 1.0}, volume={"chunk": 6 * 0.25})
    assert simulate(machines, steps, placed, by_steps).seconds == pytest.approx(3 * 2.5)
    assert simulate(machines, whole, placed, at_once).seconds == pytest.approx(3 * 2.5)


def test_a_ring_waits_for_the_slowest_worker() -> None:
    tasks = TrainingTasks.of_job(1, 3, 1, sync="ring")
    demands = Demands.of(tasks, 1, seconds={"worker": [1.0, 1.0, 5.0]}, volume={})
    run = simulate(two_machines(), tasks, [0] * 7, demands)
    assert run.times.task_start[0, tasks.ids("ring")].min() == 5


def test_speeds_are_of_all_tasks_or_by_kind() -> None:
    tasks = TrainingTasks.of_job(1, 2, 1, sync="none")
    demands = Demands.of(tasks, 1, seconds={"worker": 1.0, "sampler": 2.0}, volume={})
    seconds = {}
    for name, speeds in {"all": [2.0, 2.0], "workers": {"worker": [2.0, 2.0]}, "none": {}}.items():
        seconds[name] = simulate(two_machines(speeds=speeds), tasks, [0] * 5, demands).seconds
    assert seconds == {"all": 1.5, "workers": 2.5, "none": 3.0}
    with pytest.raises(ValueError, match="speeds of 'wroker': kinds are store, sampler, worker"):
        two_machines(speeds={"wroker": [1.0, 1.0]})
    with pytest.raises(ValueError, match="speeds of store must be 2 numbers"):
        two_machines(speeds=[1.0])
