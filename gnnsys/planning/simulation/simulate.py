"""`simulate`: how long so many iterations take on these machines with this placement, and what the time went into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gnnsys.planning.simulation.demands import Demands
from gnnsys.planning.simulation.engine import EngineInput, EngineResult, run_engine
from gnnsys.planning.simulation.machines import ClusterMachines, Floats, Ints
from gnnsys.planning.simulation.tasks import TrainingTasks

if TYPE_CHECKING:
    from gnnsys.planning.simulation.binding import RunBinding
    from gnnsys.planning.simulation.run_bounds import RunBounds


@dataclass(frozen=True)
class SimulatedRun:
    """A run that was simulated: `seconds` is its makespan; `times` has the start and end of every task and flow."""

    machines: ClusterMachines
    tasks: TrainingTasks
    placement: Ints
    demands: Demands
    policy: str
    given: EngineInput
    times: EngineResult

    @property
    def seconds(self) -> float:
        """When the last task of the last iteration ended (Eq. 16)."""
        return float(self.times.task_end[-1].max())

    @property
    def seconds_per_iteration(self) -> float:
        """Once the pipeline is full: over the second half of the iterations, by when their last task ended."""
        ends = np.maximum.accumulate(self.times.task_end.max(1))
        half = len(ends) // 2
        return float((ends[-1] - ends[half - 1]) / (len(ends) - half)) if half else self.seconds

    def link_bytes(self) -> Floats:
        """[num_links]: bytes that each link carried in all iterations."""
        links, carried = self.given.edge_links(), np.zeros(self.machines.num_links)
        volume = np.where(self.given.has_flow(), self.given.volume, 0.0).sum(0)
        for column in links.T:
            np.add.at(carried, column[column >= 0], volume[column >= 0])
        return carried

    def binding(self) -> RunBinding:
        """Which links, cores and tasks the makespan was spent on: the chain of Lemma 2, walked back."""
        from gnnsys.planning.simulation.binding import RunBinding

        return RunBinding.of(self)

    def bounds(self) -> RunBounds:
        """What no schedule is faster than, and what this one is not slower than, where a theorem says so."""
        from gnnsys.planning.simulation.run_bounds import run_bounds

        return run_bounds(self.machines, self.tasks, self.placement, self.demands, self.policy)

    def timeline(self, iterations: int | None = None) -> dict[str, Any]:
        """Chrome's trace format, which Perfetto opens: tasks and flows of the first `iterations`, or of all."""
        from gnnsys.planning.simulation.timeline import timeline

        return timeline(self, iterations)

    def report(self) -> str:
        """Seconds, what binds and the bounds, in a few lines."""
        bounds, binding = self.bounds(), self.binding()
        lines = [
            f"{self.demands.iterations} iterations in {self.seconds:.4g} s ({self.seconds_per_iteration:.4g} s each "
            f"once the pipeline is full), policy {self.policy}",
            *binding.lines(),
            *bounds.lines(),
        ]
        return "\n".join(lines)


def simulate(
    machines: ClusterMachines,
    tasks: TrainingTasks,
    placement: npt.ArrayLike,
    demands: Demands,
    policy: str = "oes",
    *,
    explain: bool = True,
) -> SimulatedRun:
    """Runs `demands.iterations` iterations. `placement` [tasks.num_placed] is the machine of each placed task.

    Without `explain` what limited each flow is not kept, and `binding()` is not available: for searches.

    >>> machines = ClusterMachines([1e9, 1e9], [1e9, 1e9])
    >>> tasks = TrainingTasks.of_job(parts=2, workers=1, samplers_per_worker=1)
    >>> demands = Demands.of(tasks, 1, seconds={"worker": 0.5}, volume={"graph": 1e9})
    >>> simulate(machines, tasks, [0, 1, 0, 0, 0], demands).seconds
    1.5
    """
    placed = tasks.check_placement(placement, machines.num_machines)
    given = EngineInput.of(machines, tasks, placed, demands, policy)
    return SimulatedRun(machines, tasks, placed, demands, policy, given, run_engine(given, explain=explain))
