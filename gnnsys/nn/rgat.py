"""Relational graph attention (Busbridge 2019): a weight per relation, one softmax for all. As PyG's RGATConv.

W_r x_u is made once per (relation, source) that has an edge, not per edge. Scores are linear in those rows, so the
softmax and the weighted sum are GAT's fused ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.graph import EdgeType, NodeType
from gnnsys.nn.gat import _drawn_key
from gnnsys.nn.init import glorot_, zeros_
from gnnsys.nn.input_errors import why_unfit_by_type
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, resolve
from gnnsys.nn.typed_groups import check_widths, one_width, typed_relations
from gnnsys.nn.typed_inputs import TypedEdges, TypedRows, resolve_typed
from gnnsys.ops import (
    CSC,
    STRUCTURES,
    Relation,
    RelationGroups,
    gat_aggregate,
    group_by_type,
    owners_of,
    pairs_of,
    relation_conv,
    spmm,
)

MECHANISMS = ("across-relation", "within-relation")


class RGATConv(GraphLayer):
    """x'_v = sum over r, u -r-> v of softmax(LeakyReLU(q . W_r x_v + k . W_r x_u)) W_r x_u, per head.

    `num_relations` is a number, for `x` and `edge_type` as PyG has them, or a list of edge types, for rows and edges by
    type; all node types then have rows of one width. Softmax runs over all in-edges of a node ("across-relation") or
    over those of one relation. PyG's options `mod`, `edge_dim` and multiplicative scores are not here.
    """

    def __init__(
        self,
        in_channels: int | Mapping[NodeType, int],
        out_channels: int,
        num_relations: int | Sequence[EdgeType],
        num_bases: int | None = None,
        num_blocks: int | None = None,
        attention_mechanism: str = "across-relation",
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_bases is not None and num_blocks is not None:
            raise ValueError("num_bases and num_blocks exclude each other: choose one decomposition")
        if attention_mechanism not in MECHANISMS:
            raise ValueError(f"attention_mechanism must be one of {', '.join(MECHANISMS)}, got {attention_mechanism!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.in_channels = width = one_width(in_channels, "RGATConv")
        self.edge_types = None if isinstance(num_relations, int) else [*num_relations]
        self.num_relations = num_relations if isinstance(num_relations, int) else len(num_relations)
        self.out_channels, self.heads, self.concat = out_channels, heads, concat
        self.num_bases, self.num_blocks = num_bases, num_blocks
        self.attention_mechanism, self.negative_slope, self.dropout = attention_mechanism, negative_slope, dropout
        total = heads * out_channels
        self.weight = self.att = self.basis = None
        if num_bases is not None:
            self.att = nn.Parameter(torch.empty(self.num_relations, num_bases))
            self.basis = nn.Parameter(torch.empty(num_bases, width, total))
        elif num_blocks is not None:
            if width % num_blocks or total % num_blocks:
                raise ValueError(f"num_blocks={num_blocks} must divide in_channels={width} and {total}, all heads")
            shape = (self.num_relations, num_blocks, width // num_blocks, total // num_blocks)
            self.weight = nn.Parameter(torch.empty(shape))
        else:
            self.weight = nn.Parameter(torch.empty(self.num_relations, width, total))
        self.q, self.k = nn.Parameter(torch.empty(total, heads)), nn.Parameter(torch.empty(total, heads))
        self.bias = nn.Parameter(torch.empty(total if concat else out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.att, self.basis, self.q, self.k):
            glorot_(parameter)
        zeros_(self.bias)

    def relation_weights(self) -> Tensor:
        if self.weight is not None:
            return self.weight
        assert self.att is not None and self.basis is not None
        return torch.einsum("rb,bio->rio", self.att, self.basis)

    def forward(self, x: Any, edges: Any, edge_type: Tensor | None = None) -> Any:
        """Rows and a structure with `edge_type`, or rows by node type and edges by edge type."""
        if self.edge_types is not None:
            return self._typed(x, edges)
        if edge_type is None:
            raise ValueError("edge_type must be given: the relation of each edge, int [num_edges]")
        return self._of_one_type(x, edges, edge_type)

    def _why_failed(self, error: Exception, x: Any) -> str | None:
        if self.edge_types is None:
            return super()._why_failed(error, x)
        return why_unfit_by_type(self, x, dict.fromkeys(x)) if isinstance(x, Mapping) else None  # widths were checked

    def _of_one_type(self, x: Tensor, edges: Edges, edge_type: Tensor) -> Tensor:
        given = resolve(x, edges, derives=True)
        if given.dst is None:
            raise ValueError("RGATConv needs rows of destinations: pass x as one tensor or a pair of two")
        by_position = given.edge_rows(edge_type, "edge_type")

        def make() -> RelationGroups:
            low, high = torch.stack(by_position.aminmax()).tolist() if by_position.numel() else (0, 0)
            if by_position.numel() and not 0 <= low <= high < self.num_relations:
                raise ValueError(f"edge_type must be in [0, {self.num_relations})")
            return group_by_type(given.csc, by_position.long(), self.num_relations, "sum")

        groups = STRUCTURES.get(make, given.csc, edge_type, key=("groups", self.num_relations, "sum"))
        relations = [Relation(0, 0, 0, r) for r in range(self.num_relations)]
        rows = [given.src] if given.dst_is_first else [given.src, given.dst]
        return self._attended(groups, rows, relations, [given.csc.num_dst], [len(rows) - 1])[0]

    def _typed(self, x: TypedRows, edges: TypedEdges) -> dict[NodeType, Tensor]:
        assert self.edge_types is not None
        given = resolve_typed(x, edges, self.edge_types, type(self).__name__)
        check_widths(given, dict.fromkeys(given.src, self.in_channels), type(self).__name__)
        weight_of = {t: (0, row) for row, t in enumerate(self.edge_types)}
        makes = list(dict.fromkeys(t[2] for t in self.edge_types))
        typed = typed_relations(given, self.edge_types, weight_of, makes, "sum")
        if typed.groups is None:
            width = self.heads * self.out_channels if self.concat else self.out_channels
            empty = {t: x[t].new_zeros(n, width) for t, n in zip(typed.out_types, typed.num_dst, strict=True)}
            return empty if self.bias is None else {t: out + self.bias for t, out in empty.items()}
        outs = self._attended(typed.groups, typed.x, typed.relations, typed.num_dst, typed.own)
        return dict(zip(typed.out_types, outs, strict=True))

    def _attended(
        self,
        groups: RelationGroups,
        x: Sequence[Tensor],
        relations: Sequence[Relation],
        num_dst: Sequence[int],
        own: Sequence[int],
    ) -> list[Tensor]:
        weight = self.relation_weights()
        to_pairs = [r._replace(out=0) for r in relations]
        to_owners = [Relation(own[r.out], 0, 0, r.row) for r in relations]
        pairs = pairs_of(groups)
        rows = relation_conv(pairs, x, [weight], to_pairs, [pairs.num_groups])[0]
        owners = owners_of(groups, [x[r.x].shape[0] for r in to_owners])
        score_dst = relation_conv(owners, x, [self._to_scores(weight, self.q)], to_owners, [groups.num_groups])[0]
        score_src = rows @ self.k.to(rows.dtype)
        rows = rows.view(-1, self.heads, self.out_channels)
        options = {
            "negative_slope": self.negative_slope,
            "dropout": self.dropout if self.training else 0.0,
            "key": _drawn_key(rows) if self.training and self.dropout > 0 else 0,
        }
        starts = [0]
        for count in num_dst:
            starts.append(starts[-1] + count)
        joint = groups.by_destination([starts[r.out] for r in relations], starts[-1])
        if self.attention_mechanism == "across-relation":
            zeros = score_src.new_zeros(starts[-1], self.heads)
            by_edge = score_dst.index_select(0, joint.group)
            out = gat_aggregate(joint.csc, rows, score_src, zeros, by_edge, **options)  # type: ignore[arg-type]
        else:
            made = self._by_group(groups, joint.csc, joint.group, rows, score_src, score_dst, options)
            out = spmm(self._owners(groups, [starts[r.out] for r in relations], starts[-1]), made)
        out = out.flatten(1) if self.concat else out.mean(1)
        out = out if self.bias is None else out + self.bias
        return list(out.split(list(num_dst)))

    def _to_scores(self, weight: Tensor, attention: Tensor) -> Tensor:
        """q . W_r x is linear in x: [relations, in, heads]."""
        if weight.dim() == 3:
            return weight @ attention
        by_block = attention.view(weight.shape[1], weight.shape[3], self.heads)
        return torch.einsum("rbio,boh->rbih", weight, by_block).flatten(1, 2)

    def _by_group(
        self,
        groups: RelationGroups,
        csc: CSC,
        group: Tensor,
        rows: Tensor,
        score_src: Tensor,
        score_dst: Tensor,
        options: Any,
    ) -> Tensor:
        """Softmax over the in-edges of one relation: a destination of its own for each group."""

        def make() -> CSC:
            edges = torch.stack([csc.indices.long(), group.long()])
            return CSC.from_edge_index(edges, csc.num_src, groups.num_groups, narrow=True)

        made = STRUCTURES.get(make, csc, group, key="by group")
        return gat_aggregate(made, rows, score_src, score_dst, **options)

    @staticmethod
    def _owners(groups: RelationGroups, first: Sequence[int], num_dst: int) -> CSC:
        assert groups.dst is not None
        sizes = torch.tensor([b - a for a, b in zip(groups.ends, groups.ends[1:], strict=False)])
        shift = torch.tensor(list(first)).repeat_interleave(sizes).to(groups.dst.device)
        ids = torch.arange(groups.num_groups, device=groups.dst.device)
        return CSC.from_edge_index(torch.stack([ids, groups.dst + shift]), groups.num_groups, num_dst, narrow=True)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}, heads={self.heads}"
