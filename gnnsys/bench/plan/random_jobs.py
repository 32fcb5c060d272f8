"""Random small jobs: 1-6 machines, unequal rates, volumes from zero up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gnnsys.planning import ClusterMachines, Demands, TrainingTasks


class RandomJob(NamedTuple):
    machines: ClusterMachines
    tasks: TrainingTasks
    placement: np.ndarray
    demands: Demands


def random_job(seed: int, *, like_gnnsys: bool = False) -> RandomJob:
    """A job of the paper's model, or with all that gnnsys does differently."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 7))
    options: dict = {}
    if like_gnnsys:
        options = dict(
            ahead=[None, 1, 2, 3][rng.integers(4)],
            own_samplers=bool(rng.integers(2)),
            serve_each=bool(rng.integers(2)),
            sparse=bool(rng.integers(2)),
        )
    sync = ["ps", "ring", "ring-whole", "none"][rng.integers(4 if like_gnnsys else 2)]
    tasks = TrainingTasks.of_job(
        num, int(rng.integers(1, 5)), int(rng.integers(1, 4)), sync=sync, servers=int(rng.integers(1, 3)), **options
    )
    extra: dict = {}
    if like_gnnsys:
        extra = dict(cores=rng.uniform(0.5, 4, num), server_threads=rng.integers(1, 4, num))
        num_uplinks = int(rng.integers(0, 3))
        if num_uplinks:
            extra |= dict(uplink=rng.integers(-1, num_uplinks, num))
            extra |= {name: rng.uniform(0.5, 4, num_uplinks) for name in ("uplink_in", "uplink_out")}
        extra["speeds"] = {"worker": rng.uniform(0.5, 2, num)}
    machines = ClusterMachines(rng.choice([1.0, 2.0, 5.0], num), rng.choice([1.0, 2.0, 5.0], num), **extra)
    iterations = int(rng.integers(1, 6))
    seconds = rng.uniform(0, 1, (iterations, tasks.num_tasks)) * (rng.random((iterations, tasks.num_tasks)) > 0.2)
    volume = rng.exponential(1, (iterations, tasks.num_edges)) * (rng.random((iterations, tasks.num_edges)) > 0.2)
    threads = rng.choice([0.0, 1.0, 2.0], tasks.num_tasks)
    return RandomJob(machines, tasks, rng.integers(0, num, tasks.num_placed), Demands(seconds, volume, threads))
