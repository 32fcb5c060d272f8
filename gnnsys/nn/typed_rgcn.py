"""RGCN's layer on rows by node type: a weight per edge type, a root and a bias per node type, in one op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.graph import EdgeType, NodeType, some
from gnnsys.nn.init import glorot_, zeros_
from gnnsys.nn.input_errors import why_unfit_by_type
from gnnsys.nn.layer import TypedLayer
from gnnsys.nn.relation_rows import RelationRows, check_ids
from gnnsys.nn.rgcn import add_bias
from gnnsys.nn.typed_groups import check_widths, sum_wide_rows, typed_relations, widths_by_type
from gnnsys.nn.typed_inputs import TypedEdges, TypedInputs, TypedRows, module_key, resolve_typed
from gnnsys.ops import relation_conv


class TypedRGCNConv(TypedLayer):
    """x'_v = root_t(x_v) + sum over edge types r of W_r (mean over u -r-> v of x_u) + b_t, t being v's node type.

    `edge_types` are those with weights, `makes` the node types with results (those that edge types lead to, by
    default). Node types may have rows of different widths; edge types whose sources are equally wide share their bases
    (`num_bases`). `num_blocks` makes weights block-diagonal. `aggr` is "mean" or "sum".

    Types in `num_ids` have no features but so many nodes: x_u is one-hot, and `x` has int64 node ids. What comes from
    them is in `by_id`. Where `x` has ids of parts, `original_ids` has the user's id of each, by which rows are kept.
    """

    def __init__(
        self,
        in_channels: int | Mapping[NodeType, int],
        out_channels: int,
        edge_types: Sequence[EdgeType],
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
        makes: Sequence[NodeType] | None = None,
        num_ids: Mapping[NodeType, int] | None = None,
        original_ids: Mapping[NodeType, Tensor] | None = None,
    ) -> None:
        super().__init__()
        if num_bases is not None and num_blocks is not None:
            raise ValueError("num_bases and num_blocks exclude each other: choose one decomposition")
        if aggr not in ("mean", "sum"):
            raise ValueError(f'aggr must be "mean" or "sum", got {aggr!r}')
        self.edge_types, self.out_channels, self.aggr = [*edge_types], out_channels, aggr
        self.makes = list(dict.fromkeys(t[2] for t in edge_types)) if makes is None else list(makes)
        ends = [*(t for edge_type in edge_types for t in (edge_type[0], edge_type[2])), *self.makes]
        wanted = list(dict.fromkeys(ends))
        self.num_ids = {t: n for t, n in (num_ids or {}).items() if t in wanted}
        if self.num_ids and num_blocks is not None:
            raise ValueError(f"num_blocks needs features, and {some(list(self.num_ids))} have none: use num_bases")
        wanted = [t for t in wanted if t not in self.num_ids]
        numbers = "which num_ids={type: number of nodes} is for: name them there, or give"
        self.widths = widths_by_type(in_channels, wanted, numbers)
        if min(self.widths.values(), default=1) < 1:
            raise ValueError(f"in_channels must be positive, TypedRGCNConv is not lazily sized: got {in_channels}")
        by_width: dict[int, list[EdgeType]] = {}
        for edge_type in (t for t in edge_types if t[0] in self.widths):
            by_width.setdefault(self.widths[edge_type[0]], []).append(edge_type)
        self.weight_of = {t: (slot, row) for slot, same in enumerate(by_width.values()) for row, t in enumerate(same)}
        weights, comps = [], []
        for width, same in by_width.items():
            if num_blocks is not None and (width % num_blocks or out_channels % num_blocks):
                raise ValueError(
                    f"num_blocks={num_blocks} must divide in_channels={width} and out_channels={out_channels}"
                )
            shape: tuple[int, ...] = (num_bases or len(same), width, out_channels)
            if num_blocks is not None:
                shape = (len(same), num_blocks, width // num_blocks, out_channels // num_blocks)
            weights.append(nn.Parameter(torch.empty(shape)))
            if num_bases is not None:
                comps.append(nn.Parameter(torch.empty(len(same), num_bases)))
        self.weight, self.comp = nn.ParameterList(weights), nn.ParameterList(comps)
        of_rows = [t for t in self.makes if t in self.widths]
        roots = {module_key(t): nn.Parameter(torch.empty(self.widths[t], out_channels)) for t in of_rows}
        biases = {module_key(t): nn.Parameter(torch.empty(out_channels)) for t in self.makes}
        self.root = nn.ParameterDict(roots if root_weight else {})
        self.bias = nn.ParameterDict(biases if bias else {})
        own = [t for t in self.makes if t in self.num_ids and root_weight]
        by_id = [t for t in edge_types if t[0] in self.num_ids]
        self.by_id = None
        if self.num_ids:
            original = {t: ids for t, ids in (original_ids or {}).items() if t in self.num_ids}
            self.by_id = RelationRows(self.num_ids, out_channels, by_id, num_bases, aggr, own, original)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in [*self.weight, *self.comp, *self.root.values()]:
            glorot_(parameter)
        for parameter in self.bias.values():
            zeros_(parameter)
        if self.by_id is not None:
            self.by_id.reset_parameters()

    def relation_weights(self) -> list[Tensor]:
        """[edge types, in, out] for every width of sources, or [edge types, blocks, in / blocks, out / blocks]."""
        if not len(self.comp):
            return list(self.weight)
        pairs = zip(self.comp, self.weight, strict=True)
        return [torch.einsum("rb,bio->rio", comp, weight) for comp, weight in pairs]

    def forward(self, x: TypedRows, edges: TypedEdges) -> dict[NodeType, Tensor]:
        given = resolve_typed(x, edges, self.edge_types, type(self).__name__)
        check_widths(given, self.widths, type(self).__name__)
        outs: dict[NodeType, Tensor] = {}
        for node_type, rows in self._summands(given):
            outs[node_type] = outs[node_type] + rows if node_type in outs else rows
        for node_type in (t for t in self.makes if t in given.src and t not in outs):
            like = next(rows for rows in self.parameters())
            outs[node_type] = like.new_zeros(given.block.num_dst[node_type], self.out_channels)
        biases = {t: self.bias[module_key(t)] if len(self.bias) else None for t in outs}
        return {t: add_bias(outs[t], biases[t]) for t in self.makes if t in outs}

    def why_unfit(self, x: Mapping[NodeType, Any]) -> str | None:
        return why_unfit_by_type(self, x, dict.fromkeys(self.widths))  # widths were checked

    def _summands(self, given: TypedInputs) -> Iterator[tuple[NodeType, Tensor]]:
        if self.by_id is None:
            yield from self._of_rows(given)
            return
        check_ids(given, self.num_ids, type(self).__name__)
        rows = {t: each for t, each in given.src.items() if t not in self.num_ids}
        yield from self._of_rows(TypedInputs(given.block, rows, given.edge_order))
        yield from self.by_id(given)

    def _of_rows(self, given: TypedInputs) -> Iterator[tuple[NodeType, Tensor]]:
        """What arrives from rows, and the destinations' own where those are rows."""
        makes = [t for t in self.makes if t in given.block.num_dst]
        there = [t for t in self.edge_types if t in given.block.csc and t[2] in makes]
        edge_types = [t for t in there if t in self.weight_of]
        own = [t for t in makes if module_key(t) in self.root]
        is_fused = own == makes and len(edge_types) > 0  # one op adds roots to all of its outputs
        if edge_types:
            to = makes if is_fused else [t for t in makes if any(t == edge_type[2] for edge_type in edge_types)]
            typed = typed_relations(given, edge_types, self.weight_of, to, self.aggr)
            typed = sum_wide_rows(typed, self.out_channels)
            assert typed.groups is not None
            roots = ([self.root[module_key(t)] for t in to], typed.own) if is_fused else ()
            outs = relation_conv(typed.groups, typed.x, self.relation_weights(), typed.relations, typed.num_dst, *roots)
            yield from zip(to, outs, strict=True)
        if not is_fused:
            yield from ((t, given.dst(t) @ self.root[module_key(t)]) for t in own)

    def extra_repr(self) -> str:
        return f"{self.out_channels}, num_relations={len(self.edge_types)}, aggr={self.aggr}"
