"""Planning: what runs where, from what this machine can do and what was measured. `execution` plans one process."""

from gnnsys.planning.execution.compute_threads import ComputeThreads
from gnnsys.planning.execution.drift import Drift, DriftWatch
from gnnsys.planning.execution.plan import ExecutionPlan
from gnnsys.planning.execution.propose import (
    BatchLoad,
    Memory,
    SumLoad,
    is_given,
    propose_places,
    propose_splits,
    spread,
)
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
    "Drift",
    "DriftWatch",
    "ExecutionPlan",
    "Memory",
    "Rates",
    "SumLoad",
    "TurnClock",
    "Way",
    "WayTrial",
    "is_given",
    "measure_rates",
    "propose_places",
    "propose_splits",
    "spread",
]
