"""What a partition must balance: one weight per node and constraint, and the most a part may have of it.

Constraints are named as on the command line: `nodes` (always there), `edges` (in-edges), `train`, `val`, `test` (nodes
of the split), `ntype` (each node type on its own), `etype` (the in-edges of each edge type) and `train_edges`,
`val_edges`, `test_edges` (the in-edges of each edge type that are in the split: links to train on). A weight is a
function of a range of nodes, so that a graph larger than memory is never weighed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import CSC
from gnnsys.partition.adjacency import first_nodes

EDGE_SPLITS = {"train_edges": "train_mask", "val_edges": "val_mask", "test_edges": "test_mask"}
NAMES = ("nodes", "edges", "train", "val", "test", "ntype", "etype", *EDGE_SPLITS)
_PIECE = 1 << 20

Weight = Callable[[int, int], Tensor]
"""weight(begin, end): int64 [end - begin], of nodes numbered type after type."""


@dataclass(frozen=True)
class Constraints:
    """Weights of all nodes, types one after the other, by the constraint's name."""

    columns: Mapping[str, Weight]
    num_nodes: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    @cached_property
    def weights(self) -> Tensor:
        """All of them at once, int64 [num_nodes, num_constraints]."""
        return torch.stack([weight(0, self.num_nodes) for weight in self.columns.values()], dim=1).contiguous()

    @cached_property
    def totals(self) -> Tensor:
        """int64 [num_constraints]."""
        return self._sums[0]

    @cached_property
    def heaviest(self) -> Tensor:
        """The heaviest node in each constraint, int64 [num_constraints]."""
        return self._sums[1]

    def limits(self, num_parts: int, imbalance: float) -> Tensor:
        """The most that a part may weigh, int64: (1 + imbalance) times the average, but never less than what whole
        nodes force: the average rounded up, and the heaviest node."""
        even = (self.totals + num_parts - 1).div(num_parts, rounding_mode="floor")
        allowed = (self.totals.double() / num_parts * (1 + imbalance)).floor().long()
        return torch.stack([even, allowed, self.heaviest]).max(0).values

    def loads(self, part: Tensor, num_parts: int) -> Tensor:
        """The weight of every part, int64 [num_parts, num_constraints]."""
        loads = torch.zeros(num_parts, len(self.columns), dtype=torch.int64, device="cpu")
        for begin, end in self._pieces():
            piece = part[begin:end].long()
            for i, weight in enumerate(self.columns.values()):
                loads[:, i].index_add_(0, piece, weight(begin, end))
        return loads

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(self.columns), dtype=torch.int64, device="cpu")
        heaviest = torch.zeros_like(total)
        for begin, end in self._pieces():
            for i, weight in enumerate(self.columns.values()):
                piece = weight(begin, end)
                total[i] += piece.sum()
                heaviest[i] = torch.maximum(heaviest[i], piece.max())
        return total, heaviest

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.num_nodes, _PIECE):
            yield begin, min(begin + _PIECE, self.num_nodes)


@dataclass(frozen=True)
class Balance:
    """How one constraint came out. `ratio` is the heaviest part to the average one; 1.0 when there is nothing.

    `method` is what made the parts, as in `PartitionOptions`; empty where that is not known.
    """

    name: str
    total: int
    heaviest: int
    num_parts: int
    allowed: float
    heaviest_node: int
    method: str = "multilevel"

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
        if self.heaviest <= max(even, self.heaviest_node):  # no assignment has a lighter heaviest part
            if self.heaviest_node > even:
                return f"one node has {self.heaviest_node:,} of {self.total:,}, more than a part may"
            return f"{self.total:,} cannot be divided more evenly among {self.num_parts} parts"
        if self.method == "metis":
            return "METIS balances one weight per node, not every constraint, and that as well as it can"
        if self.method == "multilevel":
            return "no assignment within the limits was found"
        if self.method:
            return f"method {self.method.partition('=')[0]} does not balance"
        return "how the parts were made is not recorded"


def balances(
    constraints: Constraints, part: Tensor, num_parts: int, imbalance: float, method: str = "multilevel"
) -> list[Balance]:
    loads = constraints.loads(part, num_parts)
    return [
        Balance(
            name,
            int(loads[:, i].sum()),
            int(loads[:, i].max()),
            num_parts,
            1 + imbalance,
            int(constraints.heaviest[i]),
            method,
        )
        for i, name in enumerate(constraints.names)
    ]


def constraints_of(graph: Graph, balance: Sequence[str] = ()) -> Constraints:
    """The constraints called `balance`, after that of all nodes.

    >>> constraints_of(gnnsys.graph.dataset("sbm-1k"), ["train", "edges"]).names  # doctest: +SKIP
    ('nodes', 'train', 'edges')
    """
    columns: dict[str, Weight] = {"nodes": lambda begin, end: torch.ones(end - begin, dtype=torch.int64, device="cpu")}
    for name in balance:
        check_name(name)
        for label, weight in _columns(graph, name):
            columns.setdefault(label, weight)
    return Constraints(columns, sum(map(graph.num_nodes, graph.node_types)))


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"balance {name!r} is not known, choose among {', '.join(NAMES)}")


def etype_label(edge_type: EdgeType, constraint: str = "etype") -> str:
    """A constraint of one edge type: `etype:author|writes|paper`. A bar or backslash in a name follows a backslash,
    so that no two types have the same label."""
    return f"{constraint}:" + "|".join(name.replace("\\", "\\\\").replace("|", "\\|") for name in edge_type)


def first_column(mask: Tensor) -> Tensor:
    """Of a mask that has a column for each of several splits, the first one; others as they are."""
    return mask if mask.dim() == 1 else mask[:, 0]


def _columns(graph: Graph, name: str) -> Iterator[tuple[str, Weight]]:
    if name == "ntype":
        for node_type in graph.node_types:
            yield f"ntype:{node_type}", _joined(graph, [(node_type, _ones)])
    elif name == "edges":
        yield "edges", _joined(graph, [(t[2], _in_degrees(graph.csc(t).indptr)) for t in graph.edge_types])
    elif name == "etype":
        for t in graph.edge_types:
            yield etype_label(t), _joined(graph, [(t[2], _in_degrees(graph.csc(t).indptr))])
    elif name in EDGE_SPLITS:
        yield from _edge_split(graph, name)
    elif name != "nodes":
        yield name, _split(graph, name)


def _ones(begin: int, end: int) -> Tensor:
    return torch.ones(end - begin, dtype=torch.int64, device="cpu")


def _in_degrees(indptr: Tensor) -> Weight:
    return lambda begin, end: indptr[begin : end + 1].diff()


def _members(mask: Tensor) -> Weight:
    """1 for the nodes of a mask."""
    column = first_column(mask)
    return lambda begin, end: column[begin:end].ne(0).long()


def _split(graph: Graph, name: str) -> Weight:
    masks = {t: graph.node_data[t].get(f"{name}_mask") for t in graph.node_types}
    found = [(t, _members(mask)) for t, mask in masks.items() if mask is not None]
    if not found:
        raise ValueError(f"balance {name!r} needs node data called '{name}_mask', and no node type has it")
    return _joined(graph, found)


def _edge_split(graph: Graph, name: str) -> Iterator[tuple[str, Weight]]:
    """One constraint for each edge type that has the mask. An edge is where its destination is."""
    masks = {t: graph.edge_data[t].get(EDGE_SPLITS[name]) for t in graph.edge_types}
    if all(mask is None for mask in masks.values()):
        raise ValueError(f"balance {name!r} needs edge data called '{EDGE_SPLITS[name]}', and no edge type has it")
    for edge_type, mask in masks.items():
        if mask is not None:
            if len(mask) != (num_edges := graph.num_edges(edge_type)) or mask.numel() < num_edges:
                raise ValueError(
                    f"balance {name!r}: edge data '{EDGE_SPLITS[name]}' of {edge_type!r} must have a row for each of "
                    f"its {num_edges:,} edges, got shape {tuple(mask.shape)}"
                )
            weight = _in_edges_of(graph.csc(edge_type), mask)
            yield etype_label(edge_type, name), _joined(graph, [(edge_type[2], weight)])


def _in_edges_of(csc: CSC, mask: Tensor) -> Weight:
    """How many in-edges of each node are in a mask, whose rows are edges as the user gave them."""
    column = first_column(mask)

    def weight(begin: int, end: int) -> Tensor:
        bounds = csc.indptr[begin : end + 1].long()
        low, high = int(bounds[0]), int(bounds[-1])
        chosen = column[low:high] if csc.edge_ids is None else column[csc.edge_ids[low:high].long()]
        return count_in_ranges(chosen, bounds - low)

    return weight


def count_in_ranges(mask: Tensor, bounds: Tensor) -> Tensor:
    """int64: how much of a mask is set from each bound to the next."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), mask.ne(0).cumsum(0)])
    return before[bounds].diff()


def _joined(graph: Graph, weights: Sequence[tuple[NodeType, Weight]]) -> Weight:
    """Weights of some types, by ids of the type, as those of all nodes; where there are several they add up."""
    first = first_nodes(graph)

    def weight(begin: int, end: int) -> Tensor:
        total = torch.zeros(end - begin, dtype=torch.int64, device="cpu")
        for node_type, of_type in weights:
            low = max(begin, first[node_type])
            high = min(end, first[node_type] + graph.num_nodes(node_type))
            if low < high:
                total[low - begin : high - begin] += of_type(low - first[node_type], high - first[node_type])
        return total

    return weight
