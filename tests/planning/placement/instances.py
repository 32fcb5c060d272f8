"""Random instances of the placement problem."""

from __future__ import annotations

import numpy as np

from gnnsys.planning import ClusterMachines, Demands, DrawnAmount, TrainingTasks
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import Resources, TaskCounts


def random_resources(generator: np.random.Generator) -> tuple[Resources, TaskCounts, np.ndarray]:
    """1 to 6 machines, counts from zero up, demands and capacities such that about half of the instances fit."""
    num_machines = int(generator.integers(1, 7))
    num_resources = int(generator.integers(1, 4))
    counts = TaskCounts(
        num_stores=num_machines,
        num_workers=int(generator.integers(0, 7)),
        samplers_per_worker=int(generator.integers(0, 4)),
        num_servers=int(generator.integers(0, 3)),
    )
    demand = generator.integers(0, 5, (3, num_resources)).astype(float)
    stores = generator.integers(0, 3, (num_machines, num_resources)).astype(float)
    need = (np.array(counts.by_kind) @ demand + stores.sum(axis=0)) / num_machines
    capacity = np.round(need * generator.uniform(0.6, 1.9, (num_machines, num_resources)) + generator.integers(0, 3))
    names = tuple(f"r{r}" for r in range(num_resources))
    machines = tuple(f"h{m}" for m in range(num_machines))
    return Resources(names, capacity, demand, stores, machines), counts, generator.permutation(num_machines)


def small_problem(seed: int = 0, **changes: object) -> PlacementProblem:
    """Three machines with unequal links, two workers with a sampler each, a parameter server: a few hundred states."""
    generator = np.random.default_rng(seed)
    names = ("h0", "h1", "h2")
    tasks = TrainingTasks.of_job(3, 2, 1, sync="ps", servers=1)
    graph = DrawnAmount(generator.uniform(0.5, 2.0, (3, 2)), 1.2)
    demands = Demands.of(
        tasks,
        4,
        seconds={"store": 0.1, "sampler": 0.2, "worker": 0.5, "server": 0.05},
        volume={"graph": graph, "batch": 2.0, "gradient": 0.5, "parameter": 0.5},
        seed=seed,
    )
    takes = np.array([[2.0], [1.0], [1.0]])  # a sampler, a worker, a server
    given = {
        "machines": ClusterMachines([4.0, 2.0, 1.0], [4.0, 2.0, 1.0], names=names),
        "tasks": tasks,
        "demands": demands,
        "resources": Resources(("cores",), np.array([[4.0], [3.0], [1.5]]), takes, np.zeros((3, 1)), names),
        "store_machine": np.arange(3),
    }
    return PlacementProblem(**{**given, **changes})  # type: ignore[arg-type]
