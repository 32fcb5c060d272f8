"""A profile as the simulator has it: every byte and core-second of the shares, where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning import (
    Cluster,
    Demands,
    JobGradients,
    ShareProfile,
    TrainingTasks,
    fit_work,
    machines_of,
    queue_delays,
    simulate,
)
from tests.planning.profile.profiles import made_profile


def on_the_wire(share: ShareProfile, name: str) -> np.ndarray:
    """Bytes of a share's flows with headers of packets, as as_tasks says them."""
    sent, both = getattr(share, name), share.bytes_in + share.bytes_out
    return sent + 0.0025 * sent + 0.0015 * (both - sent) + 200 * share.requests * (sent > 0)


def total(tasks: TrainingTasks, demands: Demands, kind: str) -> np.ndarray:
    return demands.volume[:, tasks.edges(kind)]


def test_flows_of_a_batch_are_those_of_the_share() -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=3)
    graph = total(tasks, demands, "graph")  # [iterations, parts, workers]
    for worker, share in enumerate(profile.shares):
        np.testing.assert_allclose(
            graph[:, :, worker], on_the_wire(share, "bytes_in")[1:4]
        )  # the first of four is left out as cold


def test_work_goes_to_who_does_it() -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=3)
    share, byte = profile.shares[1], profile.byte_work.total
    carried = share.bytes_in + share.bytes_out
    np.testing.assert_allclose(demands.seconds[:, tasks.ids("serving")[:, 1]], (share.serving + byte * carried)[1:4])
    np.testing.assert_allclose(
        demands.seconds[:, tasks.ids("sampler")[1]], (share.sampling + share.fetching + byte * carried.sum(1))[1:4]
    )
    np.testing.assert_allclose(demands.seconds[:, tasks.ids("worker")[1]], share.computing[1:4])


def test_what_stays_on_a_machine_is_neither_sent_nor_encrypted_but_served() -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=3, placement=([0, 1, 1], [0, 1, 1]))
    graph = total(tasks, demands, "graph")
    assert graph[:, 0, 0].sum() == graph[:, 1:, 1:].sum() == 0
    np.testing.assert_allclose(graph[:, 0, 1], on_the_wire(profile.shares[1].seen_from([1, 2]), "bytes_in")[1:4, 0])
    np.testing.assert_allclose(demands.seconds[:, tasks.ids("serving")[2, 2]], profile.shares[2].serving[1:4, 2])


def test_workers_may_have_shares_in_another_order() -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=3, shares=[2, 0, 1])
    plain, plain_demands = profile.as_tasks(3, iterations=3)
    np.testing.assert_array_equal(total(tasks, demands, "graph"), total(plain, plain_demands, "graph")[:, :, [2, 0, 1]])
    with pytest.raises(ValueError, match="shares must be 0 to 2 in some order"):
        profile.as_tasks(3, shares=[0, 0, 1])


@pytest.mark.parametrize("samplers", [1, 2])
def test_samplers_elsewhere_have_a_part_of_every_batch_and_send_it_on(samplers: int) -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=3, samplers_per_trainer=samplers)
    own, own_demands = profile.as_tasks(3, iterations=3)
    assert tasks.num_placed == 3 + 3 * samplers + 3 and own.num_placed == 6
    np.testing.assert_allclose(
        total(tasks, demands, "graph").reshape(3, 3, 3, samplers).sum(3), total(own, own_demands, "graph")
    )
    sent = total(tasks, demands, "batch").reshape(3, 3, samplers).sum(2)
    np.testing.assert_allclose(sent[:, 0], profile.shares[0].batch_bytes[1:4])
    assert total(own, own_demands, "batch").sum() == 0


@pytest.mark.parametrize(("sync", "steps"), [("ring", 4), ("ring-whole", 1)])
def test_a_ring_sends_the_bytes_of_an_all_reduce(sync: str, steps: int) -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=2, sync=sync)
    chunks = total(tasks, demands, "chunk")
    assert chunks.shape == (2, steps, 3)
    np.testing.assert_allclose(chunks.sum(1), 4000 * 4 / 3)  # 2 (n - 1) / n of the gradients, from each


def test_one_trainer_alone_sums_nothing() -> None:
    tasks, demands = made_profile(2).as_tasks(1, iterations=2)
    assert tasks.edges("chunk").size == 0
    assert demands.iterations == 2


def test_sparse_gradients_go_to_the_owners_of_their_rows() -> None:
    gradients = JobGradients(dense=0.0, sparse=(10.0, 20.0, 30.0), pulled=(1.0, 2.0, 3.0))
    tasks, demands = made_profile(3, gradients=gradients).as_tasks(2, iterations=1)
    np.testing.assert_array_equal(total(tasks, demands, "push")[0], [[10, 20, 30]] * 2)
    np.testing.assert_array_equal(total(tasks, demands, "pull")[0], [[1, 1], [2, 2], [3, 3]])


def test_a_gpu_takes_no_cores() -> None:
    tasks, demands = made_profile(2, computes_on="a100").as_tasks(2, iterations=1)
    assert not demands.threads[tasks.ids("worker")].any()
    assert demands.threads[tasks.ids("sampler")].all()


def test_links_carry_what_the_profile_says() -> None:
    """The simulator's bytes of a link are sums over shares that are written down here by hand."""
    profile = made_profile(3, ahead=1)
    cluster = Cluster.from_json([{"name": f"h{n}", "cores": 4, "rate": "1gbit"} for n in range(3)])
    machine_of_part, machine_of_worker = [0, 1, 2], [0, 1, 2]
    tasks, demands = profile.as_tasks(3, iterations=3, placement=(machine_of_part, machine_of_worker))
    run = simulate(machines_of(cluster), tasks, [*machine_of_part, *machine_of_worker], demands)
    into = run.link_bytes()[3:6]
    ring = 3 * 4000 * 4 / 3
    for machine in range(3):
        pulled = on_the_wire(profile.shares[machine].at_home(), "bytes_in")[1:4].sum()
        # The request of a batch leaves with the batch before it, so that of the first is not sent, and none follows.
        asked = sum(on_the_wire(share.at_home(), "bytes_out")[1:3, machine].sum() for share in profile.shares)
        assert into[machine] == pytest.approx(pulled + asked + ring)


def test_small_messages_of_a_ring_wait_where_links_are_in_use() -> None:
    profile = made_profile(3, gradients=JobGradients(dense=0.0))
    cluster = Cluster.from_json([{"name": f"h{n}", "cores": 4, "rate": "unlimited"} for n in range(3)])
    seconds = []
    for delays in (None, [0.0, 0.25, 0.0]):
        tasks, demands = profile.as_tasks(3, iterations=8, sync="ring", step_delays=delays)
        run = simulate(machines_of(cluster), tasks, [0, 1, 2, 0, 1, 2], demands)
        seconds.append(run.seconds)
    assert seconds[1] - seconds[0] >= 8 * 0.25  # at least once in every iteration
    assert not demands.threads[tasks.ids("ring")].any()  # waited, not worked


def test_a_ring_of_one_step_waits_as_long_as_one_of_many_steps() -> None:
    """Where nothing but the messages takes time, the slowest way is what all wait for, in each of six steps."""
    profile = made_profile(4, gradients=JobGradients(dense=0.0))
    cluster = Cluster.from_json([{"name": f"h{n}", "cores": 400, "rate": "unlimited"} for n in range(4)])
    waited = []
    for sync in ("ring", "ring-whole"):
        found = []
        for delays in (None, [5.0, 0.0, 10.0, 1.0]):
            tasks, demands = profile.as_tasks(4, iterations=8, sync=sync, step_delays=delays)
            run = simulate(machines_of(cluster), tasks, [0, 1, 2, 3, 0, 1, 2, 3], demands)
            found.append(run.seconds)
        waited.append(found[1] - found[0])
    assert waited[0] == pytest.approx(waited[1], rel=0.01) and waited[0] == pytest.approx(8 * 6 * 10, rel=0.01)


def test_messages_wait_in_queues_of_both_ends_and_for_a_round_trip() -> None:
    quiet, full = [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]
    queue = [0.05, 0.05, 0.0]
    assert queue_delays([0, 1, 2], quiet, quiet, queue) == [0.0, 0.0, 0.0]
    assert queue_delays([0, 1, 2], full, quiet, queue) == queue_delays([0, 1, 2], quiet, full, queue) == [0.05, 0.05, 0]
    assert queue_delays([0, 1, 2], full, full, queue) == [0.1, 0.1, 0.0]
    assert queue_delays([0, 0, 0], full, full, queue) == [0.0, 0.0, 0.0]  # nothing leaves the machine
    half = queue_delays([0, 1, 2], [0.5, 0, 0], quiet, queue)
    assert 0 < half[0] < 0.05 / 2  # a link that is in use for half of the time has less than half a queue


@pytest.mark.parametrize(("work", "step"), [(0.6, 0.01), (1.7, 0.0), (1.0, 0.002)])
def test_a_run_says_what_was_timed_wrongly(work: float, step: float) -> None:
    said, steps = np.array([1.1, 1.2, 0.8, 0.5]), np.array([40, 40, 20, 20])
    found = fit_work(work * said + step * steps, said, steps)
    assert found == pytest.approx((work, step), abs=1e-9)


def test_hosts_that_are_alike_still_add_up() -> None:
    work, step = fit_work([1.0, 1.0], [0.5, 0.5], [10, 10])
    assert work * 0.5 + step * 10 == pytest.approx(1.0)


def test_machines_are_hosts_in_the_order_of_the_file() -> None:
    cluster = Cluster.from_json(
        {
            "hosts": [
                {"name": "a", "cores": 2, "rate": "unlimited", "uplink": "u", "gpus": {"t4": 1, "a100": 1}},
                {"name": "b", "cores": 0.5, "rate_in": "8mbit", "rate_out": "16mbit", "speed": 0.5},
            ],
            "uplinks": {"u": "80mbit"},
            "gpu_speeds": {"t4": 0.3},
        }
    )
    machines = machines_of(cluster)
    assert machines.names == ("a", "b")
    assert machines.rate_in.tolist() == [1e12, 1e6] and machines.rate_out.tolist() == [1e12, 2e6]
    assert machines.cores is not None and machines.cores.tolist() == [2, 0.5]
    assert machines.speed("worker").tolist() == machines.speed("serving").tolist() == [1, 0.5]
    assert machines.uplink is not None and machines.uplink.tolist() == [0, -1]
    assert machines_of(cluster, computes_on="a100").speed("worker").tolist() == [0.3, 1.0]
