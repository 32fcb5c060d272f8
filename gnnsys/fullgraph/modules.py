"""Modules for a list of layers: marks and joins, a residual, and a graph layer that is given what it is told of edges.

Each is a row or graph layer like others; `Keep` and `JoinKept` are read when the list is made stages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import keyed
from gnnsys.fullgraph.run.call_layer import call
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
