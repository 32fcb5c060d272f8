"""Relational graph convolution (Schlichtkrull 2018): one weight per relation, a reduction per (node, relation).

Edges are grouped once by (relation, destination). Sums and means then go through one op for all relations
(`relation_conv`); other reductions, and layers that somebody changed, reduce each group, multiply a relation's groups
by its weight, and sum up a destination's groups. Rows are made per group at most, never per edge nor relation x node.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gnnsys.nn.init import glorot_, reduce_name, zeros_
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, LayerInputs, Rows, resolve
from gnnsys.nn.plain import as_written
from gnnsys.ops import CSC, STRUCTURES, Relation, RelationGroups, group_by_type, relation_conv, spmm


class GroupRows(NamedTuple):
    """Rows of groups, relation by relation, and how many groups each relation has."""

    rows: Tensor
    sizes: list[int]


def add_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    """Into rows that nobody else has, where their dtypes are the same."""
    if bias is None:
        return rows
    return rows.add_(bias) if rows.dtype == bias.dtype else rows + bias


class RGCNConv(GraphLayer):
    """x'_v = root(x_v) + sum over relations r of W_r (aggr over u -r-> v of x_u) + b. Parameters as PyG's RGCNConv.

    `num_bases` makes W_r = sum_b comp[r, b] weight[b]; `num_blocks` makes it block-diagonal. `x` may be None, or int64
    node ids: the layer's weights are then a trainable row per node (in_channels = number of nodes).
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_bases is not None and num_blocks is not None:
            raise ValueError("num_bases and num_blocks exclude each other: choose one decomposition")
        if not isinstance(in_channels, (int, tuple, list)):
            raise ValueError(
                f"with num_relations, in_channels must be a whole number of features, got {in_channels!r}: without "
                "features it is the number of nodes, and x is None or node ids. Of typed graphs, RGCN(..., "
                "metadata=graph) takes None, and widths by node type"
            )
        in_src, in_dst = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        if min(in_src, in_dst) < 0:
            raise ValueError(f"in_channels must be positive, RGCNConv is not lazily sized: got {in_channels}")
        if num_blocks is not None and (in_src % num_blocks or out_channels % num_blocks):
            raise ValueError(
                f"num_blocks={num_blocks} must divide in_channels={in_src} and out_channels={out_channels}"
            )
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks, self.aggr = num_bases, num_blocks, reduce_name(aggr)
        shape: tuple[int, ...] = (num_bases or num_relations, in_src, out_channels)
        if num_blocks is not None:
            shape = (num_relations, num_blocks, in_src // num_blocks, out_channels // num_blocks)
        self.weight = nn.Parameter(torch.empty(shape))
        self.comp = None if num_bases is None else nn.Parameter(torch.empty(num_relations, num_bases))
        self.root = nn.Parameter(torch.empty(in_dst, out_channels)) if root_weight else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.comp, self.root):
            glorot_(parameter)
        zeros_(self.bias)

    def relation_weights(self) -> Tensor:
        """[num_relations, in, out], or [num_relations, blocks, in / blocks, out / blocks]."""
        return self.weight if self.comp is None else torch.einsum("rb,bio->rio", self.comp, self.weight)

    def transform(self, rows: GroupRows) -> Tensor:
        """The dense half: the rows of each relation's groups times its weight."""
        weights = self.relation_weights()
        parts = [self._times(part, weights[r]) for r, part in enumerate(rows.rows.split(rows.sizes)) if part.shape[0]]
        return torch.cat(parts) if parts else rows.rows.new_zeros(0, self.out_channels)

    def aggregate(self, csc: CSC, rows: Tensor, edge_rows: Tensor | None = None) -> Tensor:
        """The sparse half: the reduction over a group's members; a node's groups are then summed up."""
        return spmm(csc, rows, weight=edge_rows, reduce=self.aggr)

    def forward(self, x: Rows | None, edges: Edges, edge_type: Tensor) -> Tensor:
        """`edge_type` int [num_edges], in the order of the edges given."""
        in_src = self.in_channels if isinstance(self.in_channels, int) else self.in_channels[0]
        x = torch.arange(in_src, device=self.weight.device) if x is None else x
        given = resolve(x, edges, derives=True)
        groups = self._groups(given.csc, given.edge_rows(edge_type, "edge_type"), edge_type)
        if self._is_fused(given):
            return add_bias(self._at_once(given, groups), self.bias)
        members = CSC(groups.indptr, groups.indices, given.csc.num_src)  # type: ignore[arg-type]
        if given.src.is_floating_point():
            sizes = [b - a for a, b in pairwise(groups.ends)]
            rows = self.transform(GroupRows(self.aggregate(members, given.src), sizes))
        else:
            rows = self._embedded(groups, members, given.src, in_src)
        out = spmm(self._owners(groups, given.csc.num_dst), rows)
        if self.root is not None and given.dst is not None:
            out = out + (given.dst @ self.root if given.dst.is_floating_point() else self.root[given.dst])
        return out if self.bias is None else out + self.bias

    def _is_fused(self, given: LayerInputs) -> bool:
        return (
            self.aggr in ("mean", "sum")
            and given.src.is_floating_point()
            and (given.dst is None or given.dst.is_floating_point())
            and as_written(self, RGCNConv, "transform", "aggregate")
        )

    def _at_once(self, given: LayerInputs, groups: RelationGroups) -> Tensor:
        """All relations, and the destinations' own rows, in one op."""
        x = [given.src] if given.dst_is_first or given.dst is None else [given.src, given.dst]
        relations = [Relation(0, 0, 0, r) for r in range(self.num_relations)]
        adds_own = self.root is not None and given.dst is not None
        return relation_conv(
            groups, x, [self.relation_weights()], relations, [given.csc.num_dst],
            [self.root] if adds_own else [], [len(x) - 1] if adds_own else [],  # type: ignore[list-item]
        )[0]  # fmt: skip

    def _groups(self, csc: CSC, by_position: Tensor, edge_type: Tensor) -> RelationGroups:
        def make() -> RelationGroups:
            low, high = torch.stack(by_position.aminmax()).tolist() if by_position.numel() else (0, 0)
            if by_position.numel() and not 0 <= low <= high < self.num_relations:
                raise ValueError(f"edge_type must be in [0, {self.num_relations})")
            return group_by_type(csc, by_position.long(), self.num_relations, self.aggr)

        return STRUCTURES.get(make, csc, edge_type, key=("groups", self.num_relations, self.aggr))

    @staticmethod
    def _owners(groups: RelationGroups, num_dst: int) -> CSC:
        """Destinations are the nodes, sources the groups."""
        assert groups.dst is not None
        ids = torch.arange(groups.num_groups, device=groups.dst.device)
        return CSC.from_edge_index(torch.stack([ids, groups.dst.long()]), groups.num_groups, num_dst, narrow=True)

    def _times(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self.num_blocks is None:
            return rows @ weight
        return torch.einsum("nbi,bio->nbo", rows.view(-1, *weight.shape[:2]), weight).flatten(1)

    def _embedded(self, groups: RelationGroups, members: CSC, ids: Tensor, in_src: int) -> Tensor:
        """Without features W_r's row u is what node u sends: one table of relations x nodes, reduced by group."""
        if self.num_blocks is not None:
            raise ValueError("num_blocks needs features: x must be floating point, not node ids")
        table = self.relation_weights().reshape(-1, self.out_channels)
        sizes = torch.tensor([b - a for a, b in pairwise(groups.ends)], device=ids.device)
        relation = torch.arange(self.num_relations, device=ids.device).repeat_interleave(sizes)[members.dst()]
        sources = relation * in_src + ids.index_select(0, members.indices)
        return self.aggregate(CSC(members.indptr, sources, table.shape[0]), table)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"
