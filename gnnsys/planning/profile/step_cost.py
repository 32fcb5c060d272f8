"""A training step on a device, by what its operators cost there."""

from __future__ import annotations

from gnnsys.planning.costs import MachineProfile
from gnnsys.planning.execution.model_shape import PURE, ModelShape
from gnnsys.planning.execution.rules import BatchRule, BatchSizes, plan_batch
from gnnsys.planning.scheduling.operations import GPU


def step_seconds(machine: MachineProfile, model: ModelShape, sizes: BatchSizes) -> float:
    """Seconds that the device is busy with forward and backward of one batch whose rows are there."""
    return plan_batch(machine, model, sizes, BatchRule(PURE, "host", "host")).busy()[GPU]
