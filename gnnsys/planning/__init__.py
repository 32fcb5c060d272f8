"""Planning: what runs where, from what this machine can do and what was measured. `execution` plans one process,
`costs` says what operators cost."""

from gnnsys.planning import costs
from gnnsys.planning.costs import (
    CostContext,
    CostModel,
    CostProbe,
    CubicCost,
    DeviceProbes,
    HostProbes,
    MachineProfile,
    Observation,
    OperatorCost,
    ProbeTimer,
    ProfiledMachine,
    TransferCost,
    compute_threads,
    machine_profile,
    profile_machine,
    random_block,
    sampling_threads,
    time_probes,
)
from gnnsys.planning.execution.compute_threads import ComputeThreads
from gnnsys.planning.execution.plan import ExecutionPlan
from gnnsys.planning.execution.propose import BatchLoad, Memory, is_given, propose_places, propose_splits
from gnnsys.planning.execution.rates import Rates, measure_rates
from gnnsys.planning.execution.trial import WayTrial
from gnnsys.planning.execution.turn_clock import TurnClock
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED, Way

__all__ = [
    "CACHED",
    "DEVICE",
    "GIVEN",
    "PINNED",
    "BatchLoad",
    "ComputeThreads",
    "CostContext",
    "CostModel",
    "CostProbe",
    "CubicCost",
    "DeviceProbes",
    "ExecutionPlan",
    "HostProbes",
    "MachineProfile",
    "Memory",
    "Observation",
    "OperatorCost",
    "ProbeTimer",
    "ProfiledMachine",
    "Rates",
    "TransferCost",
    "TurnClock",
    "Way",
    "WayTrial",
    "compute_threads",
    "costs",
    "is_given",
    "machine_profile",
    "measure_rates",
    "profile_machine",
    "propose_places",
    "propose_splits",
    "random_block",
    "sampling_threads",
    "time_probes",
]
