"""Modules for a list of layers: marks and joins, a residual, and a graph layer that is given what it is told of edges.

Each is a row or graph layer like others; `Keep` and `JoinKept` are read when the list is made stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import keyed, working_on_type
from gnnsys.fullgraph.run.call_layer import call
from gnnsys.graph import NodeType
from gnnsys.nn import module_key
from gnnsys.ops import CSC, STRUCTURES, WEIGHT, EdgeData


class Keep(nn.Identity):
    """Marks the rows at this point of the list by a name, for a `JoinKept` further on."""

    decides: ClassVar = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class JoinKept(nn.Module):
    """Adds each node's rows at `Keep(name)` to those it has here, or sets them beside ("cat"): a skip connection."""

    decides: ClassVar = ("name", "how")

    def __init__(self, name: str, how: str = "add") -> None:
        super().__init__()
        if how not in ("add", "cat"):
            raise ValueError(f'how must be "add" or "cat", got {how!r}')
        self.name, self.how = name, how

    def forward(self, rows: Tensor, kept: Tensor) -> Tensor:
        return rows + kept if self.how == "add" else torch.cat([rows, kept], dim=-1)


class Residual(nn.Module):
    """A graph layer and what follows it, with the nodes' own rows added to the result (projected where widths differ).

    >>> layers = [SAGEConv(16, 64), nn.ReLU(), Residual(SAGEConv(64, 64), nn.LayerNorm(64), nn.ReLU())]
    """

    def __init__(self, conv: nn.Module, *then: nn.Module, project: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.then, self.project = conv, nn.ModuleList(map(keyed, then)), project

    def forward(self, rows: Tensor, csc: CSC) -> Tensor:
        out = call(self.conv, rows, csc)
        for module in self.then:
            out = module(out)
        own = rows[: csc.num_dst]
        return out + (own if self.project is None else self.project(own))


class EdgeArguments(nn.Module):
    """A graph layer that is given this of edges and nothing else: an argument, and its name in the model's `edge_data`.

    >>> first = EdgeArguments(GATConv(16, 32, edge_dim=4), edge_attr="bond")
    >>> layers = [first, nn.ReLU(), EdgeArguments(GATConv(32, 8))]
    >>> model = HybridParallel(layers, graph, edge_data={"bond": "e"})
    """

    decides: ClassVar = ("names",)

    def __init__(self, conv: nn.Module, **names: str) -> None:
        super().__init__()
        self.conv, self.names = conv, names

    def forward(self, rows: Tensor, csc: CSC) -> Tensor:
        data = csc.edge_data
        if data is not None:
            csc = STRUCTURES.get(lambda: self._with_arguments(csc, data), csc, key=("told", *self.names.items()))
        return call(self.conv, rows, csc)

    def _with_arguments(self, csc: CSC, data: EdgeData) -> CSC:
        given = {argument: data.rows[name] for argument, name in self.names.items()}
        whole = data.whole if self.names.get(WEIGHT) == WEIGHT else None
        return replace(csc, edge_data=EdgeData(given, whole) if given else None)


class ByNodeType(nn.Module):
    """On typed graphs, a module per node type that works row by row. A type without one has no rows behind it.

    >>> encode = ByNodeType({"paper": nn.Linear(768, 64), "author": nn.Linear(16, 64)})
    >>> model = HybridParallel([encode, TypedRGCNConv(64, 8, graph.edge_types)], graph)
    """

    def __init__(self, modules: Mapping[NodeType, nn.Module]) -> None:
        super().__init__()
        self.node_types = sorted(modules)
        self.by_type = nn.ModuleDict({module_key(t): _keyed_inside(modules[t]) for t in self.node_types})

    def widths(self) -> dict[NodeType, int]:
        """Of the rows that its modules take, so far as they say."""
        found = {t: _in_width(self.by_type[module_key(t)]) for t in self.node_types}
        return {t: width for t, width in found.items() if width is not None}

    def forward(self, x: Mapping[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Rows by node type from rows by node type."""
        out = {}
        for node_type in self.node_types:
            if node_type in x:
                with working_on_type(node_type):
                    out[node_type] = self.by_type[module_key(node_type)](x[node_type])
        return out


def called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or of an nn.Sequential those that it calls, one after another."""
    if type(module) is nn.Sequential:
        for inner in module:
            yield from called_modules(inner)
    else:
        yield module


def _keyed_inside(module: nn.Module) -> nn.Module:
    """The module; torch's dropouts become ours, also those inside an nn.Sequential."""
    for inner in called_modules(module):
        keyed(inner)
    return module


def _in_width(module: nn.Module) -> int | None:
    first = module[0] if isinstance(module, nn.Sequential) and len(module) else module
    return first.in_features if isinstance(first, nn.Linear) and first.in_features > 0 else None
