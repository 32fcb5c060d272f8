"""Bounds beside networkx: the longest path of the execution DAG, and the busiest link and cores by hand."""

from __future__ import annotations

import networkx
import numpy as np
import pytest

from gnnsys.planning import ClusterMachines, Demands, TrainingTasks, run_bounds, simulate
from gnnsys.planning.simulation.engine import EngineInput
from gnnsys.planning.simulation.tasks import AFTER_START
from tests.planning.simulation.random_jobs import random_job


def longest_of_dag(given: EngineInput, flow_rates: np.ndarray) -> float:
    """§V-B: a vertex per task and flow of every iteration. A vertex is a pair of ends, so that starts can be edges."""
    dag = networkx.DiGraph()
    has_flow, crossing = given.has_flow(), given.crossing()
    for n in range(given.iterations):
        for task in range(given.num_tasks):
            dag.add_edge(("start", task, n), ("end", task, n), weight=given.seconds[n, task])
            if n:
                dag.add_edge(("end", task, n - 1), ("start", task, n), weight=0)
        for edge in range(given.num_edges):
            source, target, arrives = given.source[edge], given.target[edge], n + given.lag[edge]
            if arrives >= given.iterations:
                continue
            if given.mode[edge] == AFTER_START:
                dag.add_edge(("start", source, n), ("start", target, arrives), weight=0)
            elif not crossing[edge]:
                dag.add_edge(("end", source, n), ("start", target, arrives), weight=0)
            else:
                assert has_flow[n, edge]
                begin, end = ("flow start", edge, n), ("flow end", edge, n)
                dag.add_edge(("end", source, n), begin, weight=0)
                dag.add_edge(begin, end, weight=given.volume[n, edge] / flow_rates[edge])
                dag.add_edge(end, ("start", target, arrives), weight=0)
                if n:
                    dag.add_edge(("flow end", edge, n - 1), begin, weight=0)
    return networkx.dag_longest_path_length(dag)


@pytest.mark.parametrize("like_gnnsys", [False, True])
def test_both_paths_are_the_longest_of_the_execution_dag(like_gnnsys: bool) -> None:
    for seed in range(12):
        job = random_job(seed, like_gnnsys=like_gnnsys)
        bounds = run_bounds(*job)
        given = EngineInput.of(*job, "oes")
        links, rates = given.edge_links(), given.link_rates
        degree = np.array([(links == link).any(1).sum() for link in range(len(rates))])
        full = [min((rates[k] for k in passed if k >= 0), default=np.inf) for passed in links]
        shared = [min((rates[k] / degree[k] for k in passed if k >= 0), default=np.inf) for passed in links]
        assert bounds.full_rate_path == pytest.approx(longest_of_dag(given, np.array(full)))
        assert bounds.sharing_path == pytest.approx(longest_of_dag(given, np.array(shared)))
        assert bounds.degree == degree.max()


def test_the_busiest_link_and_cores_are_named_with_their_seconds() -> None:
    machines = ClusterMachines([1e9, 1e9], [1e9, 5e8], cores=[4, 2], names=["a", "b"])
    tasks = TrainingTasks.of_job(2, 1, 1, sync="none")
    demands = Demands.of(tasks, 10, seconds={"store": 1.0, "worker": 0.5}, volume={"graph": 1e9}, threads={"store": 3})
    bounds = run_bounds(machines, tasks, [0, 1, 0, 0], demands)
    assert bounds.busiest_link == pytest.approx(10 * 1e9 / 5e8)
    assert bounds.busiest_link_name == "link out of b"
    assert bounds.busiest_cores == pytest.approx(10 * 3 / 2)
    assert bounds.busiest_cores_name == "b"
    assert "link out of b" in "\n".join(bounds.lines())


def test_a_job_on_one_machine_has_no_links_to_be_bound_by() -> None:
    tasks = TrainingTasks.of_job(1, 2, 1)
    demands = Demands.of(tasks, 5, seconds={"worker": 1.0}, volume={"graph": 1e9, "gradient": 1e9})
    run = simulate(ClusterMachines([1.0], [1.0]), tasks, np.zeros(tasks.num_placed, dtype=int), demands)
    assert run.bounds().degree == 0
    assert run.seconds == run.bounds().full_rate_path == 5
