"""Which node types have rows at a point of a list of layers on a typed graph, followed while its layers are tried.

Rows of all types are one tensor, in which a type that no layer made has zeros. On the whole graph it has no rows, so
nobody may read those zeros: a layer is given the types that are there, and refused where it needs another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.plan.graph_types import GraphTypes
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer, layer_name
from gnnsys.graph import NodeType


class PresentTypes:
    """`ids` tell the types of the rows that layers are tried on. Types without nodes are always there."""

    def __init__(self, types: GraphTypes, ids: Tensor, given: Collection[NodeType] | None) -> None:
        self._types, self._of_rows, self._kept = types, types.by_type(ids), dict[str, set[NodeType]]()
        sizes = zip(types.node_types, pairwise(types.offsets), strict=True)
        self._empty = {t for t, (first, end) in sizes if first == end}
        self._maker, self._there = "x", self._empty | set(types.node_types if given is None else given)

    def zeroed(self, rows: Tensor) -> Tensor:
        """Rows, zeros of types that have none."""
        absent = [self._types.node_types.index(t) for t in self._types.node_types if t not in self._there]
        is_absent = torch.isin(self._of_rows, self._of_rows.new_tensor(absent))
        return rows.masked_fill(is_absent[:, None], 0)

    def keep(self, names: Iterable[str]) -> None:
        self._kept |= dict.fromkeys(names, self._there)

    def take(self, module: nn.Module) -> None:
        """Before a module is tried."""
        if isinstance(module, (TypedConv, TypedRowLayer)):
            module.take(self._there, self._maker)

    def make(self, module: nn.Module, tried: nn.Module) -> None:
        """After it was, as the copy `tried`."""
        if isinstance(module, (TypedConv, TypedRowLayer)):
            assert isinstance(tried, (TypedConv, TypedRowLayer))
            module.made = tried.made
            self._maker, self._there = layer_name(module), self._empty | set(tried.made)

    def join(self, name: str, rows: Tensor, marked: Tensor) -> None:
        """Types that have rows here or at the mark have some behind it; where there are none zeros are added."""
        both = self._there | self._kept[name]
        for node_type in sorted(both):
            is_of_type = self._of_rows == self._types.node_types.index(node_type)
            for there, each in ((self._there, rows), (self._kept[name], marked)):
                if node_type not in there and bool(each[is_of_type].any()):
                    raise ValueError(
                        f"JoinKept({name!r}) joins rows of {node_type!r}, which no layer made on one of its two sides, "
                        "and what works on the rows of all types made numbers of zeros there: use ByNodeType in its "
                        "place, or put it behind the JoinKept"
                    )
        self._there = both
