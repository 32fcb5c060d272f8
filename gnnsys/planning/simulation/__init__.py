"""A training job on a cluster, simulated before it runs: §III and §IV of DGTP, and what gnnsys does differently."""

from gnnsys.planning.simulation.binding import RunBinding
from gnnsys.planning.simulation.demands import CountedAmount, Demands, DrawnAmount
from gnnsys.planning.simulation.machines import ClusterMachines
from gnnsys.planning.simulation.policies import POLICIES
from gnnsys.planning.simulation.run_bounds import RunBounds, run_bounds
from gnnsys.planning.simulation.schedule_rules import broken_rules
from gnnsys.planning.simulation.simulate import SimulatedRun, simulate
from gnnsys.planning.simulation.tasks import TrainingTasks

__all__ = [
    "POLICIES",
    "ClusterMachines",
    "CountedAmount",
    "Demands",
    "DrawnAmount",
    "RunBinding",
    "RunBounds",
    "SimulatedRun",
    "TrainingTasks",
    "broken_rules",
    "run_bounds",
    "simulate",
]
