"""Random instances of the placement problem."""

from __future__ import annotations

import numpy as np

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
