"""What `binding` names is what was planted: a slow link in or out, few cores, a slow trainer, a server thread."""

from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning import ClusterMachines, Demands, SimulatedRun, TrainingTasks, simulate

NAMES = ["h0", "h1", "h2", "h3"]
FAST = np.full(4, 1e9)


def run(machines: dict, worker_seconds: object = 0.05) -> SimulatedRun:
    """A trainer and a part on each of four machines, as gnnsys runs them: in balance until something is planted."""
    tasks = TrainingTasks.of_job(4, 4, 1, sync="ring-whole", own_samplers=True, serve_each=True, ahead=2)
    demands = Demands.of(
        tasks,
        30,
        seconds={"serving": 0.004, "sampler": 0.02, "worker": worker_seconds},
        volume={"graph": 5e6, "chunk": 1e6},
    )
    options = {"cores": np.full(4, 4.0), "server_threads": np.full(4, 4), "rate_in": FAST, "rate_out": FAST, **machines}
    return simulate(ClusterMachines(**options, names=NAMES), tasks, [0, 1, 2, 3, 0, 1, 2, 3], demands)


def with_one(values: np.ndarray, value: float) -> np.ndarray:
    return np.where(np.arange(4) == 2, value, values)


@pytest.mark.parametrize(
    ("machines", "worker_seconds", "name"),
    [
        ({"rate_in": with_one(FAST, 5e7)}, 0.05, "the link into h2"),
        ({"rate_out": with_one(FAST, 5e7)}, 0.05, "the link out of h2"),
        ({"cores": with_one(np.full(4, 4.0), 0.3)}, 0.05, "the cores of h2"),
        ({}, with_one(np.full(4, 0.05), 0.5), "work of workers on h2"),
        ({"server_threads": np.array([4, 4, 1, 4]), "speeds": {"serving": with_one(np.ones(4), 0.02)}}, 0.05,
         "the threads of the graph server on h2"),
    ],
    ids=["link in", "link out", "cores", "trainer", "server thread"],
)  # fmt: skip
def test_a_planted_bottleneck_is_named(machines: dict, worker_seconds: object, name: str) -> None:
    slowed = run(machines, worker_seconds)
    assert slowed.seconds > 1.5 * run({}).seconds
    binding = slowed.binding()
    assert binding.names[binding.first] == name
    assert binding.percent(binding.first) > 50
    assert name in slowed.report()
