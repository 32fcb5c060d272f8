"""Planning: what runs where, from what this machine can do and what was measured. `execution` plans one process."""

from gnnsys.planning.execution import ExecutionPlan, Trial, Way

__all__ = ["ExecutionPlan", "Trial", "Way"]
