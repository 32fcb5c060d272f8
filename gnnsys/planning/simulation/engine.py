"""What the native engine is given and what it returns: arrays, nothing else.

Items are numbered: task j of iteration n is n * num_tasks + j, the flow of edge e from iteration n is
iterations * num_tasks + n * num_edges + e. A cause is 2 * item, or 2 * item + 1 where the start of that item and not
its end was the cause, or -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gnnsys.ops import longest_training_path, simulate_training
from gnnsys.planning.simulation.demands import Demands
from gnnsys.planning.simulation.machines import ClusterMachines, Floats, Ints
from gnnsys.planning.simulation.policies import policy_number
from gnnsys.planning.simulation.tasks import DATA, OWNER, SERVING, STORE, TASK_KINDS, TrainingTasks

_ANY = 1 << 62  # threads of a server that never lets a request wait
_OF_PATHS = ("machine", "seconds", "source", "target", "lag", "mode", "volume")


@dataclass(frozen=True)
class EngineInput:
    """Machines, tasks, placement and demands as the arrays that an engine reads."""

    machine: Ints  # [J]
    seconds: Floats  # [N, J] at full speed of its machine
    threads: Floats  # [J]
    queued: Ints  # [J] 1 where the task takes a thread of its machine's server
    source: Ints  # [E]
    target: Ints
    lag: Ints
    mode: Ints
    volume: Floats  # [N, E]
    link_rates: Floats  # [links], numbered as `ClusterMachines.link_names`
    uplink: Ints  # [M], -1 for none
    cores: Floats  # [M], infinite where work is not slowed
    server_threads: Ints  # [M]
    policy: str

    @classmethod
    def of(
        cls, machines: ClusterMachines, tasks: TrainingTasks, placement: Ints, demands: Demands, policy: str
    ) -> EngineInput:
        policy_number(policy)
        demands.check(tasks)
        num = machines.num_machines
        machine = tasks.machine_of(placement, num)
        speeds = np.stack([machines.speed(kind) for kind in TASK_KINDS])
        limited = machines.server_threads is not None
        queued_kinds = [TASK_KINDS.index(kind) for kind in (STORE, SERVING, OWNER)]
        return cls(
            machine=machine,
            seconds=np.ascontiguousarray(demands.seconds / speeds[tasks.kind, machine]),
            threads=demands.threads,
            queued=(np.isin(tasks.kind, queued_kinds) & limited).astype(np.int64),
            source=tasks.source,
            target=tasks.target,
            lag=tasks.lag,
            mode=tasks.mode,
            volume=demands.volume,
            link_rates=machines.link_rates(),
            uplink=np.full(num, -1, dtype=np.int64) if machines.uplink is None else machines.uplink,
            cores=np.full(num, np.inf) if machines.cores is None else machines.cores,
            server_threads=np.full(num, _ANY) if machines.server_threads is None else machines.server_threads,
            policy=policy,
        )

    @property
    def iterations(self) -> int:
        return len(self.seconds)

    @property
    def num_tasks(self) -> int:
        return len(self.machine)

    @property
    def num_edges(self) -> int:
        return len(self.source)

    @property
    def num_machines(self) -> int:
        return len(self.cores)

    def crossing(self) -> np.ndarray:
        """[E] bool: edges whose bytes are a flow."""
        return (self.mode == DATA) & (self.machine[self.source] != self.machine[self.target])

    def has_flow(self) -> np.ndarray:
        """[N, E] bool: flows that there are; what would arrive after the last iteration is not sent."""
        arrives = np.arange(self.iterations)[:, None] + self.lag[None, :]
        return self.crossing()[None, :] & (arrives < self.iterations)

    def dependency_counts(self) -> Ints:
        """[N, J]: how many ends, flows or starts a task waits for, its own previous iteration (11) among them."""
        counts = np.zeros((self.iterations, self.num_tasks), dtype=np.int64)
        counts[1:] += 1
        for lag in np.unique(self.lag):
            edges = np.bincount(self.target[self.lag == lag], minlength=self.num_tasks)
            counts[lag:] += edges
        return counts

    def edge_links(self) -> Ints:
        """[E, 4]: links out, in, out of an uplink and into one that an edge's flow passes; -1 for none."""
        num, num_uplinks = self.num_machines, (len(self.link_rates) - 2 * self.num_machines) // 2
        source, target = self.machine[self.source], self.machine[self.target]
        up_source, up_target = self.uplink[source], self.uplink[target]
        links = np.full((self.num_edges, 4), -1, dtype=np.int64)
        crossing = self.crossing()
        links[crossing, 0] = source[crossing]
        links[crossing, 1] = num + target[crossing]
        leaves = crossing & (up_source != up_target)
        out, into = leaves & (up_source >= 0), leaves & (up_target >= 0)
        links[out, 2] = 2 * num + up_source[out]
        links[into, 3] = 2 * num + num_uplinks + up_target[into]
        return links

    def tensors(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.require(getattr(self, name), requirements=["C", "W"])) for name in names}


@dataclass(frozen=True)
class EngineResult:
    """When everything happened, and why then. NaN where there is no such flow."""

    task_ready: Floats  # [N, J] when nothing was missing any more
    task_start: Floats
    task_end: Floats
    task_cause: Ints
    flow_ready: Floats  # [N, E] when the sender was done
    flow_start: Floats  # when the flow before it was through, too
    flow_end: Floats
    flow_cause: Ints
    limited: Floats  # [N, E, 4] seconds that each of its links was what limited a flow
    slowed: Floats  # [N, J] seconds of a task during which its machine had more threads than cores


def run_engine(given: EngineInput, *, explain: bool = True) -> EngineResult:
    """Simulates. Without `explain`, `limited` and `slowed` are empty: nobody will ask what binds."""
    names = tuple(name for name in EngineInput.__dataclass_fields__ if name != "policy")
    done = simulate_training(given.tensors(names), policy_number(given.policy), explain=explain)
    task_ready, task_start, task_end = done.task_times.numpy()
    flow_ready, flow_start, flow_end = done.flow_times.numpy()
    return EngineResult(
        task_ready=task_ready,
        task_start=task_start,
        task_end=task_end,
        task_cause=done.task_cause.numpy(),
        flow_ready=flow_ready,
        flow_start=flow_start,
        flow_end=flow_end,
        flow_cause=done.flow_cause.numpy(),
        limited=done.limited.numpy(),
        slowed=done.slowed.numpy(),
    )


def longest_path(given: EngineInput, flow_rates: Floats) -> float:
    """Length of the longest path through tasks and flows of all iterations (§V-B), each flow at its edge's rate."""
    return longest_training_path(
        given.tensors(_OF_PATHS), torch.from_numpy(np.require(flow_rates, np.float64, ["C", "W"]))
    )
