"""A layer per edge type, and their results for a node type joined. Parameters as PyG's HeteroConv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.graph import EdgeType, NodeType, some
from gnnsys.nn.input_errors import is_ours, why_unfit_by_type, widths_of
from gnnsys.nn.layer import GraphLayer, TypedLayer, check_edge_rows, takes_edge_rows
from gnnsys.nn.typed_inputs import TypedEdges, TypedInputs, TypedRows, module_key, resolve_typed
from gnnsys.sampling import Block

JOINS = ("sum", "mean", "max", "min", "cat")


class HeteroConv(TypedLayer):
    """For every node type, the join of what the layers of the edge types that lead to it make.

    `convs` has a layer per edge type: one of ours, or any module that is called as `conv(x, edges)`, where x is one
    tensor if source and destination type are the same, else a pair. `aggr` is "sum", "mean", "max", "min", "cat" (one
    after the other, in the order of `convs`) or None (stacked, [num_dst, num_relations, ...]). `alone` has modules for
    node types that no edge type leads to: they make rows of the type's own. Without one such a type has no result.

    >>> conv = HeteroConv({("author", "writes", "paper"): SAGEConv((16, 32), 8)})
    >>> out = conv(batch.x_dict, batch.edge_index_dict)["paper"]
    """

    def __init__(
        self,
        convs: Mapping[EdgeType, nn.Module],
        aggr: str | None = "sum",
        alone: Mapping[NodeType, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        aggr = "sum" if aggr == "add" else aggr
        if aggr is not None and aggr not in JOINS:
            raise ValueError(f"aggr must be None or one of {', '.join(JOINS)}, got {aggr!r}")
        if not convs and not alone:
            raise ValueError("convs must have a layer for at least one edge type, got none")
        for edge_type, conv in convs.items():
            if not isinstance(edge_type, tuple) or len(edge_type) != 3:
                raise ValueError(f"convs: {edge_type!r} must be (source type, name, destination type)")
            if edge_type[0] != edge_type[2] and getattr(conv, "add_self_loops", False):
                raise ValueError(
                    f"convs[{edge_type!r}] adds self loops, and {edge_type[0]!r} and {edge_type[2]!r} nodes are not "
                    "the same: make the layer with add_self_loops=False"
                )
        self.aggr = aggr
        self.edge_types, self.alone_types = list(convs), list(alone or ())
        self.convs = nn.ModuleDict({module_key(edge_type): conv for edge_type, conv in convs.items()})
        self.alone = nn.ModuleDict({module_key(node_type): module for node_type, module in (alone or {}).items()})

    def reset_parameters(self) -> None:
        for module in [*self.convs.values(), *self.alone.values()]:
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self, x: TypedRows, edges: TypedEdges, **edge_rows_dict: Mapping[EdgeType, Any]
    ) -> dict[NodeType, Tensor]:
        """`edge_attr_dict={edge type: rows}` gives the layer of each edge type its `edge_attr`, and so on.

        An edge type that the layer knows and `edges` has not is left out, with all that its layer makes of destinations
        themselves: as in PyG. Give it without edges, [2, 0], where that is not meant; models of ours do so.
        """
        self.check_edge_rows(edge_rows_dict, self)
        given = resolve_typed(x, edges, self.edge_types, type(self).__name__)
        structures: Mapping[EdgeType, Any] = edges.csc if isinstance(edges, Block) else edges
        parts: dict[NodeType, list[Tensor]] = {}
        for edge_type in self.edge_types:
            if edge_type in structures:
                more = {n[: -len("_dict")]: by[edge_type] for n, by in edge_rows_dict.items() if edge_type in by}
                out = self.convs[module_key(edge_type)](self._rows(given, edge_type), structures[edge_type], **more)
                parts.setdefault(edge_type[2], []).append(out)
        joined = {node_type: self._joined(node_type, outs) for node_type, outs in parts.items()}
        for node_type in x:
            if node_type not in joined and module_key(node_type) in self.alone:
                joined[node_type] = self.alone[module_key(node_type)](given.dst(node_type))
        return joined

    def check_edge_rows(self, edge_rows_dict: Mapping[str, Any], model: nn.Module) -> None:
        """ValueError, in the name of `model`, for rows of edges whose edge types' layers do not take them.

        A name without rows of any type here must be known to one of the layers.
        """
        for name, by_type in edge_rows_dict.items():
            own = [t for t in by_type if t in self.edge_types] if isinstance(by_type, Mapping) else []
            layers = [self.convs[module_key(t)] for t in own] or list(self.convs.values())
            if own or not any(takes_edge_rows(layer, name.removesuffix("_dict")) for layer in layers):
                check_edge_rows(model, [name], layers, "_dict")
            if not name.endswith("_dict"):
                raise ValueError(f"{name} must be given by edge type: write {name}_dict={{edge type: {name}}}")

    def why_unfit(self, x: Mapping[NodeType, Any]) -> str | None:
        for edge_type in self.edge_types:
            conv, (src, _, dst) = self.convs[module_key(edge_type)], edge_type
            if isinstance(conv, GraphLayer) and is_ours(conv) and src in x and dst in x:
                width_src, width_dst = widths_of(conv)
                widths = {src: width_src} if src == dst else {src: width_src, dst: width_dst}
                if (why := why_unfit_by_type(conv, x, widths)) is not None:
                    return why
        for node_type in self.alone_types:
            own = self.alone[module_key(node_type)]
            if isinstance(own, nn.Linear) and (why := why_unfit_by_type(own, x, {node_type: own.in_features})):
                return why
        return None

    @staticmethod
    def _rows(given: TypedInputs, edge_type: EdgeType) -> Tensor | tuple[Tensor, Tensor]:
        src, _, dst = edge_type
        return given.src[src] if src == dst else (given.src[src], given.dst(dst))

    def _joined(self, node_type: NodeType, outs: Sequence[Tensor]) -> Tensor:
        if self.aggr == "cat":
            return outs[0] if len(outs) == 1 else torch.cat(list(outs), dim=-1)
        if len({out.shape for out in outs}) > 1:
            raise ValueError(
                f"the layers of edge types that lead to {node_type!r} make rows of shapes "
                f"{some([tuple(out.shape) for out in outs])}: give them the same out_channels, or aggr='cat'"
            )
        if self.aggr is None:
            return torch.stack(list(outs), dim=1)
        if len(outs) == 1:
            return outs[0]
        if self.aggr in ("sum", "mean"):
            total = outs[0] + outs[1]
            for out in outs[2:]:
                total = total + out
            return total / len(outs) if self.aggr == "mean" else total
        stacked = torch.stack(list(outs), dim=0)
        return stacked.amax(0) if self.aggr == "max" else stacked.amin(0)

    def extra_repr(self) -> str:
        return f"num_relations={len(self.edge_types)}, aggr={self.aggr}"
