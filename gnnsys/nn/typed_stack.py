"""A stack of typed layers: which edge types each layer needs, and how rows by node type pass through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import EdgeType, NodeType, some
from gnnsys.nn.hetero import HeteroConv
from gnnsys.nn.layer import TypedLayer, check_edge_rows
from gnnsys.nn.stack import NORMS, check_norm
from gnnsys.nn.typed_inputs import (
    Metadata,
    NumSampled,
    TypedEdges,
    TypedRows,
    check_rows,
    module_key,
    resolve_typed,
    typed_prefixes,
    types_of,
)
from gnnsys.ops import CSC
from gnnsys.sampling import Block


class LayerPlan:
    """Which edge types each layer of a model needs, so that the last one can make rows of `targets`.

    A layer that makes rows of some types needs the edge types that lead to them. What comes before it makes rows of
    those types and of the sources of those edge types. Weights that nothing depends on are not made: DDP asks for a
    gradient of every one.
    """

    def __init__(self, metadata: Metadata, num_layers: int, targets: Sequence[NodeType] | None) -> None:
        self.node_types, self.edge_types = types_of(metadata)
        targets = [targets] if isinstance(targets, str) else targets
        unknown = [t for t in targets or () if t not in self.node_types]
        if unknown:
            raise ValueError(f"targets has {some(unknown)}, and the node types are {some(self.node_types)}")
        makes = list(self.node_types) if targets is None else [t for t in self.node_types if t in targets]
        self.makes: list[list[NodeType]] = []  # node types of each layer's results
        self.uses: list[list[EdgeType]] = []  # edge types of each layer
        for _ in range(num_layers):
            uses = [t for t in self.edge_types if t[2] in makes]
            self.makes.insert(0, makes)
            self.uses.insert(0, uses)
            makes = [t for t in self.node_types if t in makes or any(t == edge_type[0] for edge_type in uses)]
        self.takes = makes  # node types whose rows the first layer reads

    def read(self, layer: int) -> list[NodeType]:
        """Node types whose rows a layer is given."""
        return self.takes if layer == 0 else self.makes[layer - 1]

    def alone(self, layer: int) -> list[NodeType]:
        """Node types that a layer makes rows of and no edge type leads to."""
        reached = {edge_type[2] for edge_type in self.uses[layer]}
        return [t for t in self.makes[layer] if t not in reached]


class TypedStack(TypedLayer):
    """Typed layers with normalisation, ReLU and dropout between them, type by type; the last one is left as it is."""

    def __init__(
        self, convs: Sequence[nn.Module], plan: LayerPlan, widths: Sequence[int], norm: str | None, dropout: float
    ) -> None:
        super().__init__()
        check_norm(norm)
        self.plan, self.dropout = plan, dropout
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(
            nn.ModuleDict({} if norm is None else {module_key(t): NORMS[norm](width) for t in plan.makes[layer]})
            for layer, width in enumerate(widths[:-1])
        )

    def reset_parameters(self) -> None:
        for module in [*self.convs, *(norm for norms in self.norms for norm in norms.values())]:  # type: ignore[operator]
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: TypedRows,
        edges: TypedEdges | Sequence[TypedEdges],
        *,
        num_sampled_nodes: NumSampled | None = None,
        **edge_rows_dict: Any,
    ) -> dict[NodeType, Tensor]:
        """`num_sampled_nodes`, of a batch whose edges come hop by hop (`batch.num_sampled_nodes_dict`), drops in each
        layer what its result cannot depend on; the results have rows for the seeds alone, equal to the first rows of
        the untrimmed ones. `edge_attr_dict` and the like go to every layer. An edge type that is not given is one
        without edges, where both of its node types have rows.
        """
        if edge_rows_dict:
            self._check_edge_rows(edge_rows_dict)
        check_rows(x)
        per_layer = self._per_layer(x, edges, num_sampled_nodes, edge_rows_dict)
        rows = {t: x[t] for t in self.plan.takes if t in x}
        for index, conv in enumerate(self.convs):
            structure = per_layer[index]
            if isinstance(structure, Block):
                rows = {t: r[: structure.num_src[t]] for t, r in rows.items() if t in structure.num_src}
            used = _with_empty(rows, _only(structure, self.plan.uses[index]), self.plan.uses[index])
            rows = conv(rows, used, **edge_rows_dict)
            if index < len(self.convs) - 1:
                rows = {t: self._between(index, t, r) for t, r in rows.items()}
        return rows

    def _check_edge_rows(self, edge_rows_dict: Mapping[str, Any]) -> None:
        for conv in self.convs:
            if isinstance(conv, HeteroConv):
                conv.check_edge_rows(edge_rows_dict, self)
            else:
                check_edge_rows(self, edge_rows_dict, [conv])

    def why_unfit(self, x: Mapping[NodeType, Any]) -> str | None:
        """Of the first layer, the only one that rows of the user's reach."""
        first = self.convs[0]
        return first.why_unfit({t: x[t] for t in self.plan.takes if t in x}) if isinstance(first, TypedLayer) else None

    def _per_layer(
        self,
        x: TypedRows,
        edges: TypedEdges | Sequence[TypedEdges],
        num_sampled_nodes: NumSampled | None,
        edge_rows_dict: Mapping[str, Any],
    ) -> Sequence[TypedEdges]:
        num_layers = len(self.convs)
        if isinstance(edges, Sequence):
            if num_sampled_nodes is not None:
                raise ValueError("num_sampled_nodes is for one structure, and blocks are trimmed: leave it out")
            if len(edges) != num_layers:
                raise ValueError(f"edges has {len(edges)} blocks for {num_layers} layers")
            for each in edges:
                self._check_known(each)
            return edges
        self._check_known(edges)
        if num_sampled_nodes is None:
            return [edges] * num_layers
        if not isinstance(num_sampled_nodes, Mapping):
            raise ValueError(
                f"num_sampled_nodes must be by node type, got {type(num_sampled_nodes).__name__}: pass "
                "batch.num_sampled_nodes_dict"
            )
        if edge_rows_dict:
            raise ValueError("num_sampled_nodes trims edges, and rows of edges stay whole: leave one of the two out")
        given = resolve_typed(x, _only(edges, self.plan.uses[0]), self.plan.edge_types, type(self).__name__)
        return typed_prefixes(given, num_sampled_nodes, num_layers)

    def _check_known(self, edges: TypedEdges) -> None:
        structures = edges.csc if isinstance(edges, Block) else edges
        unknown = [t for t in structures if t not in self.plan.edge_types]
        if unknown:
            raise ValueError(
                f"{type(self).__name__} does not know edge type {unknown[0]!r}, only {some(self.plan.edge_types)}: "
                "make it with all edge types of the graph, or leave this one out of edges"
            )

    def _between(self, layer: int, node_type: NodeType, rows: Tensor) -> Tensor:
        norms = self.norms[layer]
        if module_key(node_type) in norms:  # type: ignore[operator]
            rows = norms[module_key(node_type)](rows)  # type: ignore[index]
        return F.dropout(rows.relu(), self.dropout, self.training)


def _only(edges: TypedEdges, edge_types: Sequence[EdgeType]) -> TypedEdges:
    """Without the edge types that a layer has no use for."""
    if not isinstance(edges, Block):
        return {t: structure for t, structure in edges.items() if t in edge_types}
    return Block({t: c for t, c in edges.csc.items() if t in edge_types}, edges.num_src, edges.num_dst)


def _with_empty(x: TypedRows, edges: TypedEdges, edge_types: Sequence[EdgeType]) -> TypedEdges:
    """With structures without edges for the edge types that were not given: batches with and without one are alike."""
    given = edges.csc if isinstance(edges, Block) else edges
    missing = [t for t in edge_types if t not in given and t[0] in x and t[2] in x]
    if not missing:
        return edges
    if isinstance(edges, Block):
        num_dst = {t: edges.num_dst.get(t, 0) for t in x}
    else:
        known = {t[2]: each.num_dst for t, each in given.items() if isinstance(each, CSC)}
        num_dst = {t: known.get(t, rows.shape[0]) for t, rows in x.items()}
    empty = {t: _no_edges(x[t[0]], num_dst[t[2]]) for t in missing}
    return Block(edges.csc | empty, edges.num_src, edges.num_dst) if isinstance(edges, Block) else {**given, **empty}


def _no_edges(src: Tensor, num_dst: int) -> CSC:
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=src.device)
    return CSC(indptr, indptr[:0], src.shape[0])
