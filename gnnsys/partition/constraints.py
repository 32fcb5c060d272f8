"""What a partition must balance: one weight per node and constraint, and the most a part may have of it.

Constraints are named as on the command line: `nodes` (always there), `edges` (in-edges), `train`, `val`, `test` (nodes
of the split), `ntype` (each node type on its own) and `etype` (the in-edges of each edge type).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType

NAMES = ("nodes", "edges", "train", "val", "test", "ntype", "etype")


@dataclass(frozen=True, eq=False)
class Constraints:
    """`weights` int64 [num_nodes of all types, num_constraints], nodes in the order of the graph's node types."""

    names: tuple[str, ...]
    weights: Tensor

    def limits(self, num_parts: int, imbalance: float) -> Tensor:
        """The most that a part may weigh, int64: (1 + imbalance) times the average, but never less than what whole
        nodes force: the average rounded up, and the heaviest node."""
        total = self.weights.sum(0)
        even = (total + num_parts - 1).div(num_parts, rounding_mode="floor")
        allowed = (total.double() / num_parts * (1 + imbalance)).floor().long()
        heaviest = self.weights.max(0).values if len(self.weights) else torch.zeros_like(total)
        return torch.stack([even, allowed, heaviest]).max(0).values

    def loads(self, part: Tensor, num_parts: int) -> Tensor:
        """The weight of every part, int64 [num_parts, num_constraints]."""
        return self.weights.new_zeros(num_parts, len(self.names)).index_add_(0, part.long(), self.weights)


@dataclass(frozen=True)
class Balance:
    """How one constraint came out. `ratio` is the heaviest part to the average one; 1.0 when there is nothing."""

    name: str
    total: int
    heaviest: int
    num_parts: int
    allowed: float
    heaviest_node: int

    @property
    def ratio(self) -> float:
        return self.heaviest * self.num_parts / self.total if self.total else 1.0

    @property
    def met(self) -> bool:
        return self.ratio <= self.allowed + 1e-9

    @property
    def reason(self) -> str | None:
        """Why it is not met, None when it is."""
        if self.met:
            return None
        even = -(-self.total // self.num_parts)
        if self.heaviest_node > self.allowed * self.total / self.num_parts:
            return f"one node has {self.heaviest_node:,} of {self.total:,}, more than a part may"
        if even > self.allowed * self.total / self.num_parts:
            return f"{self.total:,} cannot be divided more evenly among {self.num_parts} parts"
        return "it could not be reached together with the other constraints"


def balances(constraints: Constraints, part: Tensor, num_parts: int, imbalance: float) -> list[Balance]:
    loads = constraints.loads(part, num_parts)
    heaviest_node = (
        constraints.weights.max(0).values if len(part) else constraints.weights.new_zeros(len(constraints.names))
    )
    return [
        Balance(name, int(loads[:, i].sum()), int(loads[:, i].max()), num_parts, 1 + imbalance, int(heaviest_node[i]))
        for i, name in enumerate(constraints.names)
    ]


def constraints_of(graph: Graph, balance: Sequence[str] = ()) -> Constraints:
    """The constraints called `balance`, after that of all nodes.

    >>> constraints_of(gnnsys.graph.dataset("sbm-1k"), ["train", "edges"]).names  # doctest: +SKIP
    ('nodes', 'train', 'edges')
    """
    columns: dict[str, Tensor] = {"nodes": torch.ones(sum(map(graph.num_nodes, graph.node_types)), dtype=torch.int64)}
    for name in balance:
        if name not in NAMES:
            raise ValueError(f"balance {name!r} is not known, choose among {', '.join(NAMES)}")
        for label, weight in _columns(graph, name):
            columns.setdefault(label, weight)
    return Constraints(tuple(columns), torch.stack(list(columns.values()), dim=1).contiguous())


def _columns(graph: Graph, name: str) -> Iterator[tuple[str, Tensor]]:
    if name == "ntype":
        for node_type in graph.node_types:
            yield f"ntype:{node_type}", _joined(graph, {node_type: torch.ones(graph.num_nodes(node_type))})
    elif name == "edges":
        yield "edges", sum((_in_edges(graph, t) for t in graph.edge_types), torch.zeros(1, dtype=torch.int64))
    elif name == "etype":
        for edge_type in graph.edge_types:
            yield f"etype:{'|'.join(edge_type)}", _in_edges(graph, edge_type)
    elif name != "nodes":
        yield name, _split(graph, name)


def _in_edges(graph: Graph, edge_type: EdgeType) -> Tensor:
    return _joined(graph, {edge_type[2]: graph.csc(edge_type).in_degrees()})


def _split(graph: Graph, name: str) -> Tensor:
    """1 for the nodes of `<name>_mask`, of its first column where there are several splits."""
    masks = {t: graph.node_data[t].get(f"{name}_mask") for t in graph.node_types}
    found = {t: (mask if mask.dim() == 1 else mask[:, 0]).ne(0) for t, mask in masks.items() if mask is not None}
    if not found:
        raise ValueError(f"balance {name!r} needs node data called '{name}_mask', and no node type has it")
    return _joined(graph, found)


def _joined(graph: Graph, weights: dict[NodeType, Tensor]) -> Tensor:
    """Weights of all nodes, int64; types without any weigh 0."""
    zeros = {t: torch.zeros(graph.num_nodes(t), dtype=torch.int64) for t in graph.node_types}
    return torch.cat([weights.get(t, zeros[t]).long() for t in graph.node_types])
