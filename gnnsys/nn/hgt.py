"""The heterogeneous graph transformer (Hu 2020): attention over all in-edges, keys and values by relation. As PyG's.

K and V of a relation are made once per (relation, source) that has an edge. Beside rows there are two numbers per edge
and head, scores and their softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import NodeType
from gnnsys.nn.init import glorot_
from gnnsys.nn.input_errors import why_unfit_by_type
from gnnsys.nn.layer import TypedLayer
from gnnsys.nn.typed_groups import check_widths, typed_relations, widths_by_type
from gnnsys.nn.typed_inputs import Metadata, TypedEdges, TypedRows, module_key, resolve_typed, types_of
from gnnsys.ops import edge_softmax, pairs_of, relation_conv, sddmm, spmm


class LinearByType(nn.Module):
    """A linear layer per node type, named as in PyG's HeteroDictLinear."""

    def __init__(self, widths: Mapping[NodeType, int], out_channels: int) -> None:
        super().__init__()
        self.lins = nn.ModuleDict({module_key(t): nn.Linear(width, out_channels) for t, width in widths.items()})

    def __getitem__(self, node_type: NodeType) -> nn.Linear:
        return self.lins[module_key(node_type)]  # type: ignore[return-value]


class RelationMatrices(nn.Module):
    """A [dim, dim] matrix per head and relation, named and ordered as in PyG's HeteroLinear."""

    def __init__(self, heads: int, num_relations: int, dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * num_relations, dim, dim))

    def by_relation(self) -> Tensor:
        """[relations, heads, dim, dim]."""
        return self.weight.unflatten(0, (self.heads, -1)).transpose(0, 1)


class HGTConv(TypedLayer):
    """Attention of every node over its in-edges of all types, with a key, query and value layer per node type.

    score(u -r-> v) = q_v . (k_u A_r) p_r / sqrt(d), and x'_v = gelu(sum of softmax * v_u M_r) times a layer per node
    type, mixed with x_v by `skip` where both are equally wide. `makes` are the node types with results: those that edge
    types lead to, by default.
    """

    def __init__(
        self,
        in_channels: int | Mapping[NodeType, int],
        out_channels: int,
        metadata: Metadata,
        heads: int = 1,
        makes: Sequence[NodeType] | None = None,
    ) -> None:
        super().__init__()
        if out_channels % heads:
            raise ValueError(f"heads={heads} must divide out_channels={out_channels}")
        node_types, self.edge_types = types_of(metadata)
        self.widths = widths_by_type(in_channels, node_types)
        if min(self.widths.values()) < 1:
            raise ValueError(f"in_channels must be positive, HGTConv is not lazily sized: got {in_channels}")
        self.out_channels, self.heads, self.dim = out_channels, heads, out_channels // heads
        self.makes = list(dict.fromkeys(t[2] for t in self.edge_types)) if makes is None else list(makes)
        self.kqv_lin = LinearByType(self.widths, 3 * out_channels)
        finished = node_types if makes is None else list(makes)  # PyG has layers for all
        self.out_lin = LinearByType(dict.fromkeys(finished, out_channels), out_channels)
        self.k_rel = RelationMatrices(heads, len(self.edge_types), self.dim)
        self.v_rel = RelationMatrices(heads, len(self.edge_types), self.dim)
        skipping = [t for t in finished if makes is None or self.widths[t] == out_channels]
        self.skip = nn.ParameterDict({module_key(t): nn.Parameter(torch.empty(1)) for t in skipping})
        self._names = ["__".join(t).replace(".", "#") for t in self.edge_types]
        self.p_rel = nn.ParameterDict({name: nn.Parameter(torch.empty(1, heads)) for name in self._names})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for lin in [*self.kqv_lin.lins.values(), *self.out_lin.lins.values()]:
            lin.reset_parameters()  # type: ignore[operator]
        for matrices in (self.k_rel, self.v_rel):
            glorot_(matrices.weight)
        with torch.no_grad():
            for parameter in [*self.skip.values(), *self.p_rel.values()]:
                parameter.fill_(1.0)

    def forward(self, x: TypedRows, edges: TypedEdges) -> dict[NodeType, Tensor]:
        given = resolve_typed(x, edges, self.edge_types, type(self).__name__)
        check_widths(given, self.widths, type(self).__name__)
        weight_of = {t: (0, row) for row, t in enumerate(self.edge_types)}
        typed = typed_relations(given, self.edge_types, weight_of, self.makes, "sum")
        starts = list(accumulate(typed.num_dst, initial=0))
        queries = [self._part(t, given.dst(t), 1) for t in typed.out_types]
        if typed.groups is None:
            sums = torch.cat([q.new_zeros(q.shape) for q in queries])
        else:
            pairs = pairs_of(typed.groups)
            relations, total = [r._replace(out=0) for r in typed.relations], [pairs.num_groups]
            scale = torch.cat([self.p_rel[name] for name in self._names]) / math.sqrt(self.dim)  # [relations, heads]
            of_keys = self.k_rel.by_relation() * scale[:, :, None, None]
            keys = [self._part(t, rows, 0) for t, rows in zip(typed.node_types, typed.x, strict=True)]
            values = [self._part(t, rows, 2) for t, rows in zip(typed.node_types, typed.x, strict=True)]
            k = relation_conv(pairs, keys, [of_keys], relations, total)[0]
            v = relation_conv(pairs, values, [self.v_rel.by_relation()], relations, total)[0]
            csc = typed.groups.by_destination([starts[r.out] for r in typed.relations], starts[-1]).csc
            q = self._heads(torch.cat(queries))
            alpha = edge_softmax(csc, sddmm(csc, q, self._heads(k).to(q.dtype)))
            sums = spmm(csc, self._heads(v).to(q.dtype), weight=alpha).flatten(1)
        parts = zip(typed.out_types, sums.split(typed.num_dst), strict=True)
        return {t: self._finished(t, rows, given.dst(t)) for t, rows in parts}

    def why_unfit(self, x: Mapping[NodeType, Any]) -> str | None:
        return why_unfit_by_type(self, x, dict.fromkeys(self.widths))  # widths were checked

    def _part(self, node_type: NodeType, rows: Tensor, part: int) -> Tensor:
        """K, Q or V: a third of the layer, so that none is cut out of a wider row."""
        lin = self.kqv_lin[node_type]
        here = slice(part * self.out_channels, (part + 1) * self.out_channels)
        return F.linear(rows, lin.weight[here], lin.bias[here])

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.heads, self.dim)

    def _finished(self, node_type: NodeType, sums: Tensor, own: Tensor) -> Tensor:
        out = self.out_lin[node_type](F.gelu(sums))
        if out.shape[-1] != own.shape[-1]:
            return out
        share = self.skip[module_key(node_type)].sigmoid()
        return share * out + (1 - share) * own

    def extra_repr(self) -> str:
        return f"{self.out_channels}, num_relations={len(self.edge_types)}, heads={self.heads}"
