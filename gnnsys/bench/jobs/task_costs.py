"""What a job of CoGNN's queues costs, from its sizes alone: for a replay without a device, not for a schedule.

An epoch of a job that trains on a whole graph moves the bytes and does the sums that are counted here; the host starts
its kernels meanwhile. It takes the longer of the two. The share of its time that a job keeps the device busy says what
becomes of several: they run undisturbed as long as their shares add up to one, and beyond that all slow down alike.

Bandwidth and sums of the V100 are of its data sheet, three quarters of them. What messages, attention and the host cost
was fitted to the row of PipeSwitch in Table V, which runs one job after the other. Makespans and mean completions are
within 1.15 times of it, but for GIN: there the paper's two largest jobs take three times as long as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnsys.bench.jobs.cognn_queues import QueuedTask
from gnnsys.bench.jobs.table_four import HEADS, HIDDEN

_FLOAT, _PASSES = 4, 3  # bytes; forward, and backward for weights and for inputs
_SAMPLED = {"SAGE": 0.5}  # V-A.2


@dataclass(frozen=True)
class DeviceRates:
    """What a device does per second, and what of the host a layer takes in every epoch, both ways."""

    name: str
    bytes_per_second: float  # of rows one after the other
    message_bytes_per_second: float  # of rows by index
    attention_bytes_per_second: float
    flops: float
    layer_seconds: float


V100 = DeviceRates("V100", 0.75 * 900e9, 300e9, 40e9, 0.75 * 15.7e12, 2e-3)
EPOCHS = 200


@dataclass(frozen=True)
class TaskCost:
    """`device_seconds` of `seconds` the device is busy; `memory` at the peak."""

    seconds: float
    device_seconds: float
    memory: int

    @property
    def busy(self) -> float:
        return self.device_seconds / self.seconds


def cost_of(task: QueuedTask, rates: DeviceRates = V100, epochs: int = EPOCHS) -> TaskCost:
    """Of PyG's layers, which make a message per edge. GraphSAGE and GIN sum rows before the product, so the first layer
    sums rows as wide as the graph's features; the others sum after it."""
    nodes, edges, features, classes = task.size
    seconds, held = 0.0, float(nodes * features)
    for layer in range(task.layers):
        wide = features if layer == 0 else HIDDEN
        narrow = classes if layer == task.layers - 1 else HIDDEN
        is_summed_first = task.kind in ("SAGE", "GIN")
        summed, products = (wide, 2) if is_summed_first else (narrow, 1)
        num_messages = edges + (0 if is_summed_first else nodes)  # the other two add self loops
        # A message is written, read and summed, and the same backwards.
        seconds += (
            2 * 3 * _FLOAT * _SAMPLED.get(task.kind, 1.0) * num_messages * summed / rates.message_bytes_per_second
        )
        # Biases, activations, their gradients.
        seconds += _FLOAT * nodes * (4 * summed + 4 * products * (narrow + wide)) / rates.bytes_per_second
        seconds += 2 * _PASSES * products * nodes * wide * narrow / rates.flops
        held += nodes * (narrow * (1 + products) + (summed if is_summed_first else 0))
        if task.kind == "GAT":  # six values for every head and edge, and messages are kept for their gradients
            seconds += 2 * 6 * _FLOAT * num_messages * HEADS / rates.attention_bytes_per_second
            held += num_messages * (narrow + 4 * HEADS)
    widest = max(features if task.kind in ("SAGE", "GIN") else 0, HIDDEN)
    memory = _FLOAT * (held + (edges + nodes) * widest) + 2 * 8 * edges
    whole = max(seconds, task.layers * rates.layer_seconds)
    return TaskCost(epochs * whole, epochs * seconds, round(memory))


def shared_speeds(costs: Sequence[TaskCost]) -> list[float]:
    """Relative speeds of jobs that run together."""
    busy = sum(cost.busy for cost in costs)
    return [min(1.0, 1.0 / busy)] * len(costs)
