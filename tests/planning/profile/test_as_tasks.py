"""A profile as the simulator has it: every byte and core-second of the shares, where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning import Cluster, Demands, JobGradients, TrainingTasks, machines_of, simulate
from tests.planning.profile.profiles import made_profile


def total(tasks: TrainingTasks, demands: Demands, kind: str) -> np.ndarray:
    return demands.volume[:, tasks.edges(kind)]


def test_flows_of_a_batch_are_those_of_the_share() -> None:
    profile = made_profile(3)
    tasks, demands = profile.as_tasks(3, iterations=3)
    graph = total(tasks, demands, "graph")  # [iterations, parts, workers]
    for worker, share in enumerate(profile.shares):
        np.testing.assert_allclose(graph[:, :, worker], share.bytes_in[1:4])  # the first of four is left out as cold


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
    np.testing.assert_allclose(graph[:, 0, 1], (profile.shares[1].sample_in + profile.shares[1].home_pull_in)[1:4, 0])
    np.testing.assert_allclose(demands.seconds[:, tasks.ids("serving")[2, 2]], profile.shares[2].serving[1:4, 2])


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
    profile = made_profile(3)
    cluster = Cluster.from_json([{"name": f"h{n}", "cores": 4, "rate": "1gbit"} for n in range(3)])
    machine_of_part, machine_of_worker = [0, 1, 2], [0, 1, 2]
    tasks, demands = profile.as_tasks(3, iterations=3, placement=(machine_of_part, machine_of_worker))
    run = simulate(machines_of(cluster), tasks, [*machine_of_part, *machine_of_worker], demands)
    into = run.link_bytes()[3:6]
    ring = 3 * 4000 * 4 / 3
    requests = [sum(profile.shares[w].at_home().bytes_out[1:4, m].sum() for w in range(3)) for m in range(3)]
    for machine in range(3):
        pulled = profile.shares[machine].at_home().bytes_in[1:4].sum() + ring
        counts = tasks.edges("request").size
        assert into[machine] == pytest.approx(pulled + (requests[machine] if counts else 0))


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
