"""What operators cost on this machine, or on one that is only described: measured once, fitted, kept.

A planner asks `machine_profile(device, threads).seconds("spmm/host", edges=..., destinations=..., width=...)`.
"""

from gnnsys.planning.costs.model import CostModel, Observation, OperatorCost
from gnnsys.planning.costs.operators import OPERATORS, CostContext
from gnnsys.planning.costs.polynomials import CubicCost, TransferCost
from gnnsys.planning.costs.profile import MachineFacts, MachineProfile

__all__ = [
    "OPERATORS",
    "CostContext",
    "CostModel",
    "CubicCost",
    "MachineFacts",
    "MachineProfile",
    "Observation",
    "OperatorCost",
    "TransferCost",
]
