"""From a graph to an assignment: constraints, a method, subparts grouped by machine, and how it came out."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.ops import Level
from gnnsys.partition.array_pieces import Progress
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.coalesce import coalesce, edges_between
from gnnsys.partition.communication import refine_communication
from gnnsys.partition.constraints import Balance, Constraints, balances, check_name, constraints_of
from gnnsys.partition.levels import finest_level, flat_csc
from gnnsys.partition.memory import MemoryPlan, graph_bytes, least_memory, plan_memory
from gnnsys.partition.metis import metis
from gnnsys.partition.multilevel import multilevel_assignment
from gnnsys.partition.simple_assignments import check_file, chunk_assignment, file_assignment, random_assignment
from gnnsys.partition.streaming import stream_assignment

METHODS = ("multilevel", "metis", "random", "chunk")
OBJECTIVES = ("cut", "communication")
MOST_SUBPARTS = 1 << 13  # edges between subparts are counted in a dense matrix: 24 bytes per pair, 1.5 GiB at this
_MOST_SEED = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How to partition.

    `method` is one of METHODS or "assignment=FILE"; `balance` names constraints (gnnsys.partition.constraints), None
    those that suit the graph; `imbalance` is how far above the average a subpart may be in each of them.
    """

    method: str = "multilevel"
    objective: str = "cut"
    balance: Sequence[str] | None = None
    imbalance: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS and not self.method.startswith("assignment="):
            raise ValueError(f"method must be one of {', '.join(METHODS)} or assignment=FILE, got {self.method!r}")
        if self.method.startswith("assignment="):
            check_file(self.method.removeprefix("assignment="))
        if not 0 <= self.seed <= _MOST_SEED:
            raise ValueError(f"seed must be in [0, {_MOST_SEED}], got {self.seed}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        for name in self.balance or ():
            check_name(name)
        if not 0 <= self.imbalance < 1:
            raise ValueError(f"imbalance must be in [0, 1), got {self.imbalance}")
        if self.objective == "communication" and self.method not in ("multilevel", "metis"):
            raise ValueError(
                f"objective communication refines a partition that is optimised, not method {self.method!r}"
            )


@dataclass(frozen=True)
class Assigned:
    """An assignment and how it came out. `cut` and `part_cut` count edges between subparts and between parts."""

    assignment: Assignment
    balances: list[Balance]
    cut: int
    part_cut: int
    num_edges: int
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def shortfalls(self) -> list[str]:
        """A sentence for every constraint that is not within its limit, with the reason."""
        return [
            f"{b.name}: the heaviest subpart has {b.ratio:.3f} of the average, {b.allowed:.2f} allowed: {b.reason}"
            for b in self.balances
            if not b.met
        ]


def assign_parts(
    graph: Graph,
    num_parts: int,
    trainers_per_part: int = 1,
    *,
    options: PartitionOptions | None = None,
    memory_limit: int | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Assigned:
    """Assigns every node to one of num_parts * trainers_per_part subparts.

    With a `memory_limit` in bytes that the multilevel partitioner would exceed, nodes are assigned by streaming the
    graph, whose arrays may be mapped files. `folder` is for temporary files.
    """
    options = options or PartitionOptions()
    num_parts, trainers_per_part = check_part_counts(num_parts, trainers_per_part)
    start = time.perf_counter()
    constraints = _constraints(graph, options)
    task = _Task(graph, constraints, num_parts, trainers_per_part, options, memory_limit, folder, progress)
    subpart, details = task.assign()
    sizes = [graph.num_nodes(t) for t in graph.node_types]
    by_type = dict(zip(graph.node_types, subpart.split(sizes), strict=True))
    between = edges_between(graph, by_type, task.num_subparts)
    if options.method in ("multilevel", "metis"):
        number = coalesce(between + between.T, trainers_per_part)
        by_type = {t: number[of_type.long()] for t, of_type in by_type.items()}
        subpart, order = torch.cat(list(by_type.values())), torch.argsort(number)
        between = between[order][:, order]
    machines = between.view(num_parts, trainers_per_part, num_parts, trainers_per_part).sum((1, 3))
    return Assigned(
        Assignment(num_parts, trainers_per_part, by_type),
        balances(constraints, subpart, task.num_subparts, options.imbalance, options.method),
        int(between.sum() - between.diagonal().sum()),
        int(machines.sum() - machines.diagonal().sum()),
        sum(graph.num_edges(t) for t in graph.edge_types),
        time.perf_counter() - start,
        details,
    )


def default_balance(graph: Graph) -> list[str]:
    """In-edges, the train nodes where there is a split, each node type where there are several."""
    names = ["edges"]
    if any("train_mask" in data for data in graph.node_data.values()):
        names.append("train")
    return [*names, "ntype"] if len(graph.node_types) > 1 else names


def plan_assignment(
    graph: Graph,
    num_parts: int,
    trainers_per_part: int = 1,
    *,
    options: PartitionOptions | None = None,
    memory_limit: int | None = None,
) -> MemoryPlan | None:
    """What `assign_parts` with the same arguments will take beside the graph, and whether it will stream.

    None for methods that need next to nothing. ValueError where the limit cannot be kept.
    """
    options = options or PartitionOptions()
    num_parts, trainers_per_part = check_part_counts(num_parts, trainers_per_part)
    return _Task(
        graph, _constraints(graph, options), num_parts, trainers_per_part, options, memory_limit, None, None
    ).plan()


def check_part_counts(num_parts: int, trainers_per_part: int) -> tuple[int, int]:
    """Both as int. ValueError unless they are whole numbers of at least 1, and not too many together."""
    num_parts = _whole(num_parts, "num_parts")
    trainers_per_part = _whole(trainers_per_part, "trainers_per_part")
    if num_parts < 1 or trainers_per_part < 1:
        raise ValueError(f"parts and trainers per part must be at least 1, got {num_parts} and {trainers_per_part}")
    if num_parts * trainers_per_part > MOST_SUBPARTS:
        raise ValueError(
            f"parts times trainers per part must be at most {MOST_SUBPARTS:,}, got {num_parts * trainers_per_part:,}"
        )
    return num_parts, trainers_per_part


def _whole(count: Any, name: str) -> int:
    try:
        return operator.index(count)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {count!r}") from None


def _constraints(graph: Graph, options: PartitionOptions) -> Constraints:
    return constraints_of(graph, default_balance(graph) if options.balance is None else options.balance)


@dataclass(frozen=True)
class _Task:
    """One call of assign_parts."""

    graph: Graph
    constraints: Constraints
    num_parts: int
    trainers_per_part: int
    options: PartitionOptions
    memory_limit: int | None
    folder: Path | None
    progress: Progress | None

    @property
    def num_subparts(self) -> int:
        return self.num_parts * self.trainers_per_part

    def assign(self) -> tuple[Tensor, dict[str, Any]]:
        """The subpart of every node by the chosen method, int32, before grouping; and what is to be told about it."""
        method, num_nodes = self.options.method, self.constraints.num_nodes
        plan = self.plan()
        if method == "random":
            return random_assignment(num_nodes, self.num_subparts, self.options.seed), {}
        if method == "chunk":
            return chunk_assignment(num_nodes, self.num_subparts), {}
        if method.startswith("assignment="):
            part = file_assignment(method.removeprefix("assignment="), self.graph, self.num_parts)
            return split_parts(part, self.num_parts, self.trainers_per_part), {}
        assert plan is not None
        if plan.is_streaming:
            return self._stream(), {"memory": str(plan)}
        level = finest_level(self.graph, self.constraints)
        seed = self.options.seed
        if method == "metis":
            subpart = self._metis(level)
        else:
            limits = self.constraints.limits(self.num_subparts, self.options.imbalance)
            subpart, _ = multilevel_assignment(
                level, self.num_subparts, limits, seed=seed, folder=self.folder, progress=self.progress
            )
        details = {"memory": str(plan)}
        if self.options.objective == "communication":
            del level
            return self._communicate(subpart, details)
        return subpart, details

    def _metis(self, level: Level) -> Tensor:
        recursive, imbalance = self.num_subparts <= 8, self.options.imbalance
        if recursive:  # every bisection takes its share, and they multiply
            imbalance = (1 + imbalance) ** (1 / max(1, (self.num_subparts - 1).bit_length())) - 1
        return metis(level, self.num_subparts, recursive=recursive, seed=self.options.seed + 1, imbalance=imbalance)

    def _communicate(self, subpart: Tensor, details: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """G3's two stages from a partition by edge cut: fewer rows between subparts, then as many for each of them."""
        result = refine_communication(
            flat_csc(self.graph),
            subpart,
            self.num_subparts,
            self.constraints.weights.T.contiguous(),
            self.constraints.limits(self.num_subparts, self.options.imbalance),
            seed=self.options.seed,
            progress=None if self.progress is None else self._tell,
        )
        return result.part, details | {
            "rows": {
                "by edge cut": result.before.total,
                "refined": result.refined.total,
                "in the end": result.after.total,
            },
            "row_imbalance": {
                "by edge cut": result.before.imbalance,
                "refined": result.refined.imbalance,
                "in the end": result.after.imbalance,
            },
            "num_swaps": result.num_swaps,
            "stopped": result.stopped,
        }

    def _tell(self, stage: str) -> None:
        assert self.progress is not None
        self.progress(0, 1, {"volume": "fewer rows between parts"}.get(stage, "as many rows for each part"))

    def plan(self) -> MemoryPlan | None:
        """In memory or streaming, None where neither is needed. What streaming cannot do is refused."""
        if self.options.method not in ("multilevel", "metis"):
            return None
        num_edges = sum(self.graph.num_edges(t) for t in self.graph.edge_types)
        plan = plan_memory(
            self.constraints.num_nodes,
            num_edges,
            self.num_subparts,
            len(self.constraints.columns),
            method=self.options.method,
            memory_limit=self.memory_limit,
            loads=False,
        )
        if plan.is_streaming and self.options.objective != "cut":
            raise ValueError(
                f"{plan.in_memory}: more than the memory limit, under which only objective cut works, "
                f"not {self.options.objective}; raise the limit or change it"
            )
        if plan.is_streaming and self.options.seed != 0:
            raise ValueError(
                f"{plan.in_memory}: more than the memory limit, and streaming, which keeps it, has no seed: "
                f"leave out seed {self.options.seed} or raise the limit"
            )
        return replace(plan, graph=graph_bytes(self.graph))

    def _stream(self) -> Tensor:
        assert self.memory_limit is not None
        return stream_assignment(
            self.graph,
            self.num_subparts,
            list(self.constraints.columns.values()),
            self.constraints.limits(self.num_subparts, self.options.imbalance),
            memory_limit=max(self.memory_limit, least_memory(self.constraints.num_nodes)),
            folder=self.folder,
            progress=self.progress,
        ).part


def split_parts(part: Tensor, num_parts: int, trainers_per_part: int) -> Tensor:
    """Subparts of given parts: each part's nodes in their order, cut into equal shares."""
    if trainers_per_part == 1:
        return part
    size = torch.bincount(part, minlength=num_parts)
    order = torch.argsort(part, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(part), device="cpu") - torch.repeat_interleave(size.cumsum(0) - size, size)
    share = rank * trainers_per_part // size.clamp(min=1)[part.long()]
    return (part * trainers_per_part + share).int()
