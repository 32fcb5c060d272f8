"""What machines have and what tasks take of it: constraint (2) of DGTP, for every resource that is counted.

A placement is an array of machine numbers in the order of the simulator: stores, samplers, workers (trainers),
parameter servers. Trainers that sample for themselves have no samplers in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SAMPLER, WORKER, SERVER = 0, 1, 2  # rows of `Resources.demand`
NAMES_OF_TASKS = ("sampler", "trainer", "parameter server")
_SLACK = 1e-9  # of a capacity: 0.3 cores fit three times into 0.9


@dataclass(frozen=True)
class TaskCounts:
    """How many tasks a placement has of each kind. Worker w has the samplers w * samplers_per_worker and on."""

    num_stores: int
    num_workers: int
    samplers_per_worker: int = 0
    num_servers: int = 0

    @property
    def num_samplers(self) -> int:
        return self.num_workers * self.samplers_per_worker

    @property
    def by_kind(self) -> tuple[int, int, int]:
        """Samplers, workers, servers: what is placed behind the stores."""
        return self.num_samplers, self.num_workers, self.num_servers

    @property
    def num_placed(self) -> int:
        return self.num_stores + sum(self.by_kind)

    def kind(self) -> Ints:
        """[num_placed]: row of `Resources.demand` of each task, -1 for stores."""
        return np.repeat(np.array([-1, SAMPLER, WORKER, SERVER]), [self.num_stores, *self.by_kind])

    def sampler_ids(self, worker: int) -> Ints:
        """Where the samplers of a worker are in a placement."""
        first = self.num_stores + worker * self.samplers_per_worker
        return np.arange(first, first + self.samplers_per_worker)

    def worker_id(self, worker: int) -> int:
        return self.num_stores + self.num_samplers + worker


@dataclass(frozen=True)
class Resources:
    """`capacity[m, r]` is what machine m has of resource r, `demand[k, r]` what a task takes (rows SAMPLER, WORKER,
    SERVER), `store_demand[g, r]` what store g takes. `machines` are names for errors."""

    names: tuple[str, ...]
    capacity: Floats  # [num_machines, num_resources]
    demand: Floats  # [3, num_resources]
    store_demand: Floats  # [num_stores, num_resources]
    machines: tuple[str, ...]

    def __post_init__(self) -> None:
        count = len(self.names)
        for name, shape in (
            ("capacity", (len(self.machines), count)),
            ("demand", (len(NAMES_OF_TASKS), count)),
            ("store_demand", (len(self.store_demand), count)),
        ):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.shape != shape:
                raise ValueError(f"resources: {name} must be {list(shape)}, got {list(values.shape)}")
            if np.isnan(values).any() or (values < 0).any():
                raise ValueError(f"resources: {name} must be numbers of 0 or more")
            object.__setattr__(self, name, values)
        if not self.machines:
            raise ValueError("resources: there is no machine")

    @property
    def num_machines(self) -> int:
        return len(self.capacity)

    def of_each_task(self, counts: TaskCounts) -> Floats:
        """[num_placed, num_resources]: what each task of a placement takes."""
        kinds = counts.kind()[counts.num_stores :]
        return np.concatenate([self.store_demand, self.demand[kinds]])

    def used(self, placement: Ints, counts: TaskCounts) -> Floats:
        """[num_machines, num_resources]: the left side of constraint (2)."""
        taken = np.zeros_like(self.capacity)
        np.add.at(taken, placement, self.of_each_task(counts))
        return taken

    def room(self, relaxed: float = 0.0) -> Floats:
        """[num_machines, num_resources]: the right side of (28), of (2) where nothing is relaxed."""
        return self.capacity * (1.0 + relaxed + _SLACK)

    def fits(self, placement: Ints, counts: TaskCounts) -> bool:
        """Whether a placement keeps constraint (2)."""
        return bool((self.used(placement, counts) <= self.room()).all())

    def behind_stores(self, store_machine: Ints) -> Floats:
        """[num_machines, num_resources]: what is left when stores have taken theirs; negative where they do not fit."""
        left = self.room()
        np.subtract.at(left, store_machine, self.store_demand)
        return left
