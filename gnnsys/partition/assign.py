"""From a graph to an assignment: constraints, a method, subparts grouped by machine, and how it came out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.ops.multilevel import Level, part_ties
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.coalesce import coalesce
from gnnsys.partition.constraints import Balance, Constraints, balances, constraints_of
from gnnsys.partition.levels import finest_level
from gnnsys.partition.metis import metis
from gnnsys.partition.multilevel import multilevel
from gnnsys.partition.pieces import Progress
from gnnsys.partition.simple import chunk_assignment, file_assignment, random_assignment

METHODS = ("multilevel", "metis", "random", "chunk")
OBJECTIVES = ("cut", "communication")


@dataclass(frozen=True, kw_only=True)
class Options:
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
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
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
    options: Options | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Assigned:
    """Assigns every node to one of num_parts * trainers_per_part subparts; `folder` is for temporary files."""
    options = options or Options()
    if num_parts < 1 or trainers_per_part < 1:
        raise ValueError(f"parts and trainers per part must be at least 1, got {num_parts} and {trainers_per_part}")
    start = time.perf_counter()
    constraints = constraints_of(graph, default_balance(graph) if options.balance is None else options.balance)
    level = finest_level(graph, constraints)
    num_subparts = num_parts * trainers_per_part
    subpart, details = _subparts(graph, level, constraints, num_parts, trainers_per_part, options, folder, progress)
    ties = part_ties(level, subpart, num_subparts)
    if options.method in ("multilevel", "metis"):
        number = coalesce(ties, trainers_per_part)
        subpart, order = number[subpart.long()], torch.argsort(number)
        ties = ties[order][:, order]
    machine = ties.view(num_parts, trainers_per_part, num_parts, trainers_per_part).sum((1, 3))
    sizes = [graph.num_nodes(t) for t in graph.node_types]
    return Assigned(
        Assignment(num_parts, trainers_per_part, dict(zip(graph.node_types, subpart.split(sizes)))),
        balances(constraints, subpart, num_subparts, options.imbalance),
        _between(ties),
        _between(machine),
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


def _subparts(
    graph: Graph,
    level: Level,
    constraints: Constraints,
    num_parts: int,
    trainers_per_part: int,
    options: Options,
    folder: Path | None,
    progress: Progress | None,
) -> tuple[Tensor, dict[str, Any]]:
    """The subpart of every node by the chosen method, int32, before grouping; and what the method has to tell."""
    num_subparts = num_parts * trainers_per_part
    if options.method == "random":
        return random_assignment(level.num_nodes, num_subparts, options.seed), {}
    if options.method == "chunk":
        return chunk_assignment(level.num_nodes, num_subparts), {}
    if options.method.startswith("assignment="):
        part = file_assignment(options.method.removeprefix("assignment="), graph, num_parts)
        return split_parts(part, num_parts, trainers_per_part), {}
    limits = constraints.limits(num_subparts, options.imbalance)
    if options.method == "metis":
        subpart = metis(level, num_subparts, recursive=num_subparts <= 8, seed=options.seed + 1)
    else:
        subpart, _ = multilevel(level, num_subparts, limits, seed=options.seed, folder=folder, progress=progress)
    return subpart, {}


def split_parts(part: Tensor, num_parts: int, trainers_per_part: int) -> Tensor:
    """Subparts of given parts: each part's nodes in their order, cut into equal shares."""
    if trainers_per_part == 1:
        return part
    size = torch.bincount(part, minlength=num_parts)
    order = torch.argsort(part, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(part)) - torch.repeat_interleave(size.cumsum(0) - size, size)
    share = rank * trainers_per_part // size.clamp(min=1)[part.long()]
    return (part * trainers_per_part + share).int()


def _between(ties: Tensor) -> int:
    return int(ties.sum() - ties.diagonal().sum()) // 2
