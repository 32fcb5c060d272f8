"""Bounds of a run's time, without a simulation: a lower one for all policies, an upper one for `oes` and `maxmin`.

`full_rate_path` is Eq. 24 over the longest path: every task and flow as if alone. `sharing_path` is Eq. 26: every flow
at its link's rate over all flows that one iteration has there. Theorems 1 and 3:

    max(full_rate_path, busiest link, busiest cores) <= T
    T <= min(sharing_path, max(degree, 1) x full_rate_path)

The second holds for `oes` and `maxmin`, where neither cores nor threads of graph servers are shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnsys.planning.simulation.demands import Demands
from gnnsys.planning.simulation.engine import EngineInput, longest_path
from gnnsys.planning.simulation.machines import ClusterMachines
from gnnsys.planning.simulation.policies import BOUNDED_POLICIES, policy_number
from gnnsys.planning.simulation.tasks import TrainingTasks


@dataclass(frozen=True)
class RunBounds:
    """Seconds. `degree` is the paper's Delta (Eq. 23): most flows that one iteration has on one link. `has_most`:
    whether the theorems hold for the run."""

    full_rate_path: float
    busiest_link: float
    busiest_link_name: str
    busiest_cores: float
    busiest_cores_name: str
    sharing_path: float
    degree: int
    has_most: bool = True

    @property
    def least(self) -> float:
        """No schedule is faster."""
        return max(self.full_rate_path, self.busiest_link, self.busiest_cores)

    @property
    def most(self) -> float:
        """The run is not slower; infinite where no theorem says so."""
        return min(self.sharing_path, max(self.degree, 1) * self.full_rate_path) if self.has_most else math.inf

    def lines(self) -> list[str]:
        cores = f", busiest cores {self.busiest_cores:.4g} s ({self.busiest_cores_name})" if self.busiest_cores else ""
        return [
            f"at least {self.least:.4g} s: full-rate path {self.full_rate_path:.4g} s, busiest link "
            f"{self.busiest_link:.4g} s ({self.busiest_link_name}){cores}",
            f"path with shared links (Eq. 26) {self.sharing_path:.4g} s, at most {self.degree} flows of an iteration "
            "on a link",
        ]


def run_bounds(
    machines: ClusterMachines, tasks: TrainingTasks, placement: npt.ArrayLike, demands: Demands, policy: str = "oes"
) -> RunBounds:
    """The bounds of a run by `policy`. O(tasks + edges) per iteration."""
    policy_number(policy)
    placed = tasks.check_placement(placement, machines.num_machines)
    given = EngineInput.of(machines, tasks, placed, demands, "oes")
    links, rates = given.edge_links(), given.link_rates
    degrees = np.bincount(links[links >= 0], minlength=len(rates))
    passes = links >= 0
    full = np.where(passes, rates[links], np.inf).min(1)
    shared = np.where(passes, (rates / np.maximum(degrees, 1))[links], np.inf).min(1)
    volume = np.where(given.has_flow(), given.volume, 0.0)
    busy = np.zeros(len(rates))
    for column, there in zip(links.T, passes.T, strict=True):
        np.add.at(busy, column[there], volume.sum(0)[there])
    busy /= rates
    work = np.zeros(machines.num_machines)
    np.add.at(work, given.machine, given.seconds.sum(0) * given.threads)
    work = work / given.cores
    link, core = int(busy.argmax()), int(work.argmax())
    assert machines.names is not None
    return RunBounds(
        full_rate_path=longest_path(given, full),
        busiest_link=float(busy[link]),
        busiest_link_name=machines.link_names()[link],
        busiest_cores=float(work[core]),
        busiest_cores_name=machines.names[core],
        sharing_path=longest_path(given, shared),
        degree=int(degrees.max()),
        has_most=policy in BOUNDED_POLICIES and machines.cores is None and machines.server_threads is None,
    )
