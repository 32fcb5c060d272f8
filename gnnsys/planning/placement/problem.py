"""What a search for a placement is given: machines, tasks with their demands, resources, and which stores may move.

The arrays become tensors once; every cost and every walk of `csrc/cpu/planning` reads the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnsys.ops import PlacementWalk, placement_bounds, walk_placements
from gnnsys.planning.placement.resources import Floats, Ints, Resources, TaskCounts
from gnnsys.planning.simulation import ClusterMachines, Demands, SimulatedRun, TrainingTasks, simulate
from gnnsys.planning.simulation.tasks import SAMPLER, SERVER, STORE, TASK_KINDS, WORKER


class CostBounds(NamedTuple):
    """Seconds of each of many placements, float64 [count]: bounds from below, and Eq. 26's path."""

    full_rate_path: Floats
    busiest_link: Floats
    busiest_cores: Floats
    sharing_path: Floats

    @property
    def least(self) -> Floats:
        """No schedule of a placement is faster."""
        return np.maximum(np.maximum(self.full_rate_path, self.busiest_link), self.busiest_cores)


@dataclass(frozen=True)
class PlacementProblem:
    """`store_machine` is where stores are to begin with. `store_allowed` [num_stores, num_machines] says where each may
    go; None: they stay, as in the paper's constraint (3)."""

    machines: ClusterMachines
    tasks: TrainingTasks
    demands: Demands
    resources: Resources
    store_machine: Ints
    store_allowed: np.ndarray | None = None
    policy: str = "oes"

    def __post_init__(self) -> None:
        self.demands.check(self.tasks)
        num_stores, num_machines = self.counts.num_stores, self.machines.num_machines
        stores = np.asarray(self.store_machine, dtype=np.int64)
        object.__setattr__(self, "store_machine", stores)
        if stores.shape != (num_stores,) or ((stores < 0) | (stores >= num_machines)).any():
            raise ValueError(f"store_machine must be {num_stores} of the machines 0 to {num_machines - 1}")
        if self.resources.num_machines != num_machines or len(self.resources.store_demand) != num_stores:
            raise ValueError(
                f"resources are of {self.resources.num_machines} machines and {len(self.resources.store_demand)} "
                f"stores, there are {num_machines} and {num_stores}"
            )
        if self.store_allowed is not None:
            if self.store_allowed.shape != (num_stores, num_machines):
                raise ValueError(f"store_allowed must be [{num_stores}, {num_machines}]")
            if wrong := np.flatnonzero(~self.store_allowed[np.arange(num_stores), stores]).tolist():
                raise ValueError(f"part {wrong[0]} is not on the disk of {self.resources.machines[stores[wrong[0]]]}")

    @cached_property
    def counts(self) -> TaskCounts:
        tasks = self.tasks
        workers = tasks.count(WORKER)
        samplers = 0 if tasks.options.get("own_samplers") else tasks.count(SAMPLER) // workers
        return TaskCounts(tasks.count(STORE), workers, samplers, tasks.count(SERVER))

    @cached_property
    def movable(self) -> Ints:
        """Tasks that a search moves: samplers, workers, servers, and stores that may be elsewhere."""
        stores = np.zeros(0, dtype=np.int64)
        if self.store_allowed is not None:
            stores = np.flatnonzero(self.store_allowed.sum(axis=1) > 1)
        return np.concatenate([stores, np.arange(self.counts.num_stores, self.counts.num_placed)])

    @cached_property
    def allowed(self) -> np.ndarray:
        """bool [num_placed, num_machines]."""
        every = np.ones((self.counts.num_placed, self.machines.num_machines), dtype=bool)
        stores = np.zeros((self.counts.num_stores, self.machines.num_machines), dtype=bool)
        stores[np.arange(len(stores)), self.store_machine] = True
        every[: len(stores)] = stores if self.store_allowed is None else self.store_allowed
        return every

    def fits(self, placement: Ints) -> bool:
        """Whether a placement keeps every resource, and every store is where it may be."""
        return self.resources.fits(placement, self.counts) and bool(
            self.allowed[np.arange(len(placement)), placement].all()
        )

    def bounds(self, placements: Ints) -> CostBounds:
        """Of placements [count, num_placed], without simulating them."""
        found = placement_bounds(self._job, self._cluster, torch.from_numpy(np.ascontiguousarray(placements)))
        return CostBounds(*found.numpy().T)

    def walk(self, start: Ints, **settings: object) -> PlacementWalk:
        """See `gnnsys.ops.walk_placements`."""
        return walk_placements(
            self._job, self._cluster, self._limits, torch.from_numpy(start), torch.from_numpy(self.movable), **settings
        )  # type: ignore[arg-type]

    def simulate(self, placement: Ints, policy: str | None = None) -> SimulatedRun:
        """A run that says when everything happened, and not what limited it."""
        return simulate(self.machines, self.tasks, placement, self.demands, policy or self.policy, explain=False)

    @cached_property
    def _job(self) -> list[Tensor]:
        tasks, demands = self.tasks, self.demands
        arrays = (tasks.host, tasks.kind, demands.seconds, demands.threads, tasks.source, tasks.target, tasks.lag,
                  tasks.mode, demands.volume)  # fmt: skip
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    @cached_property
    def _cluster(self) -> list[Tensor]:
        machines, num = self.machines, self.machines.num_machines
        uplink = np.full(num, -1, dtype=np.int64) if machines.uplink is None else machines.uplink
        cores = np.full(num, np.inf) if machines.cores is None else machines.cores
        speeds = np.stack([machines.speed(kind) for kind in TASK_KINDS])
        arrays = (machines.link_rates(), uplink, cores, speeds)
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    @cached_property
    def _limits(self) -> list[Tensor]:
        capacity, room = self.resources.capacity, self.resources.room()
        arrays = (capacity, room, self.resources.of_each_task(self.counts), self.allowed)
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
