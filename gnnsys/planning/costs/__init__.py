"""What operators cost on this machine, or on one that is only described: measured once, fitted, kept.

A planner asks `machine_profile(device, threads).seconds("spmm/host", edges=..., destinations=..., width=...)`.
"""

from gnnsys.planning.costs.device_probes import DeviceProbes
from gnnsys.planning.costs.host_probes import HostProbes, random_block, sampling_threads
from gnnsys.planning.costs.model import CostModel, Observation, OperatorCost
from gnnsys.planning.costs.operators import OPERATORS, CostContext
from gnnsys.planning.costs.polynomials import CubicCost, TransferCost
from gnnsys.planning.costs.profile import MachineProfile, ProfiledMachine
from gnnsys.planning.costs.profile_cache import machine_profile
from gnnsys.planning.costs.profiling import compute_threads, profile_machine
from gnnsys.planning.costs.timing import CostProbe, ProbeTimer, time_probes

__all__ = [
    "OPERATORS",
    "CostContext",
    "CostModel",
    "CostProbe",
    "CubicCost",
    "DeviceProbes",
    "HostProbes",
    "MachineProfile",
    "Observation",
    "OperatorCost",
    "ProbeTimer",
    "ProfiledMachine",
    "TransferCost",
    "compute_threads",
    "machine_profile",
    "profile_machine",
    "random_block",
    "sampling_threads",
    "time_probes",
]
