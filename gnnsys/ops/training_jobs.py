"""A training job on a cluster, simulated: the typed face of csrc/cpu/planning/.

What the arrays mean is in `gnnsys.planning.simulation.engine`, which is what others use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native


class SimulatedTimes(NamedTuple):
    """float64 `task_times` [3, N, J], `flow_times` [3, N, E]: ready, start, end. `*_cause` int64 [N, ...].

    With `explain`, `limited` [N, E, 4] and `slowed` [N, J]; without, both have no rows.
    """

    task_times: Tensor
    task_cause: Tensor
    flow_times: Tensor
    flow_cause: Tensor
    limited: Tensor
    slowed: Tensor


def simulate_training(arrays: Mapping[str, Tensor], policy: int, *, explain: bool = True) -> SimulatedTimes:
    """Runs a job event by event. `arrays` has the fields of `EngineInput`; with `explain`, what held back
    each flow and task."""
    return SimulatedTimes(*native.simulate_training(**arrays, policy=policy, explain=explain))


def longest_training_path(arrays: Mapping[str, Tensor], flow_rates: Tensor) -> float:
    """When the last task would end if each edge's flow had a rate of its own: `flow_rates` float64 [num_edges]."""
    return native.longest_training_path(**arrays, flow_rates=flow_rates)


@torch.library.register_fake("gnnsys::simulate_training")
def _simulate_training(
    machine: Tensor,
    seconds: Tensor,
    threads: Tensor,
    queued: Tensor,
    source: Tensor,
    target: Tensor,
    lag: Tensor,
    mode: Tensor,
    volume: Tensor,
    link_rates: Tensor,
    uplink: Tensor,
    cores: Tensor,
    server_threads: Tensor,
    policy: int,
    explain: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    iterations, num_tasks, num_edges = seconds.shape[0], machine.shape[0], source.shape[0]
    return (
        seconds.new_empty(3, iterations, num_tasks),
        machine.new_empty(iterations, num_tasks),
        seconds.new_empty(3, iterations, num_edges),
        machine.new_empty(iterations, num_edges),
        seconds.new_empty(iterations if explain else 0, num_edges, 4),
        seconds.new_empty(iterations if explain else 0, num_tasks),
    )
