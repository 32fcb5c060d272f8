"""The graph convolution of Kipf & Welling (2017), D^-1/2 (A + I) D^-1/2 X W. Parameters as PyG's GCNConv.

Normalisation scales rows before and after the reduction instead of weighting every edge, so it costs no edge tensor.
Degrees and scales are float32 or wider, whatever rows are: float16 ends at 65504 in-edges.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from gnnsys.nn.halves import Dense, Halves, NarrowFirst, RowWeights
from gnnsys.nn.init import glorot_, linear, narrows, zeros_
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, LayerInputs, last_self_loop, resolve, self_loops, without_self_loops
from gnnsys.nn.order import transform_first
from gnnsys.nn.plain import as_written, is_bare_product, is_untouched
from gnnsys.ops import CSC, WEIGHT, narrow_weights, scaled_spmm, spmm, sum_dtype

_OTHER_WEIGHTS = f"a piece of a graph knows degrees by its own {WEIGHT} alone, and these are others"


class GCNConv(GraphLayer):
    """x' = D^-1/2 (A + I) D^-1/2 x W + b, with D the (weighted) in-degrees, self loops counted.

    A self loop that is there already stays with its weight, several become one. On a block the sources' D is their
    out-degree in the block, as in DGL's GraphConv; on a piece that knows the whole graph's (`CSC.whole`) it is that.
    `improved` gives added loops weight 2. `cached` is PyG's and needs nothing here: what depends on the structure alone
    is always remembered.
    """

    decides: ClassVar = ("normalize", "improved", "add_self_loops")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if add_self_loops and not normalize:
            raise ValueError("add_self_loops=True needs normalize=True: loops are part of the normalisation")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.cached, self.normalize = improved, cached, normalize
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        self.lin = linear(in_channels, out_channels, bias=False, glorot=True)
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        glorot_(self.lin.weight)
        zeros_(self.bias)

    def transform(self, rows: Tensor) -> Tensor:
        """The dense half: x W."""
        return self.lin(rows)

    def halves(self) -> Halves | None:
        is_known = not self.improved and (self.add_self_loops or not self.normalize)
        if not is_known or not is_untouched(self, GCNConv, {"lin": is_bare_product}):
            return None

        def add_bias(rows: Tensor) -> Tensor:
            return rows if self.bias is None else rows + self.bias

        narrow_first = NarrowFirst(
            transform=Dense(self.transform, lambda: [self.lin.weight]), combine=Dense(add_bias, lambda: [self.bias])
        )
        return Halves(
            reduce="gcn" if self.normalize else "sum",
            combine=lambda sums, own: add_bias(self.transform(sums)),
            takes_weight=True,
            narrow_first=narrow_first if narrows(self.lin) else None,
        )

    def row_weights(self) -> RowWeights | str:
        if not is_untouched(self, GCNConv, {"lin": is_bare_product}):
            return "was changed, or its linear layer"
        return RowWeights(self.lin.weight)

    def aggregate(self, csc: CSC, rows: Tensor, edge_rows: Tensor | None = None) -> Tensor:
        """The sparse half: D^-1/2 (A + I) D^-1/2 rows; `edge_rows` are weights of edges."""
        edge_weight = edge_rows
        if self.normalize and csc.whole is not None:
            return self._aggregate_piece(csc, rows, edge_weight)
        if not self.normalize:
            return _plain_sum(csc, rows, edge_weight)
        dtype, loop_weight = sum_dtype(rows.dtype), None
        edge_weight = None if edge_weight is None else edge_weight.to(dtype)
        if self.add_self_loops:
            loop_weight = self._loop_weight(csc, edge_weight, dtype)
            csc, edge_weight = _without_self_loops(csc, edge_weight)
        scale_src, scale_dst = _scales(csc, edge_weight, loop_weight, dtype)
        return _normalised_sum(csc, rows, edge_weight, scale_src, scale_dst, loop_weight)

    def _aggregate_piece(self, csc: CSC, rows: Tensor, edge_weight: Tensor | None) -> Tensor:
        """`aggregate` where degrees are those of a whole graph of which this is a piece."""
        data, weighted = csc.edge_data, edge_weight is not None
        if weighted and (data is None or edge_weight is not data.rows.get(WEIGHT)):
            raise ValueError(_OTHER_WEIGHTS)
        dtype, fill = sum_dtype(rows.dtype), 2.0 if self.improved else 1.0
        edge_weight = None if edge_weight is None else edge_weight.to(dtype)
        scale_src, scale_dst, loop_weight = whole_scales(csc, self.add_self_loops, fill, dtype, weighted)
        if not self.add_self_loops:
            return _normalised_sum(csc, rows, edge_weight, scale_src, scale_dst, None)
        csc, edge_weight = _without_self_loops(csc, edge_weight)
        return _normalised_sum(csc, rows, edge_weight, scale_src, scale_dst, loop_weight)

    def forward(self, x: Tensor, edges: Edges, edge_weight: Tensor | None = None) -> Tensor:
        if isinstance(x, tuple):
            raise ValueError("x must be one tensor: GCNConv has no weights of its own for destinations, SAGEConv has")
        given: LayerInputs = resolve(x, edges, derives=True)
        weight = None if edge_weight is None else given.edge_rows(edge_weight, "edge_weight")
        products = given.host_products(self.row_weights()) if given.waits_on_host else None
        if products is not None:
            out = self.aggregate(given.csc, products[0], weight)
            return out if self.bias is None else out + self.bias
        # PyG transforms first. What is only a product of two matrices may be done in the cheaper order.
        has_order = not (is_bare_product(self.lin) and as_written(self, GCNConv, "transform", "aggregate"))
        if has_order or transform_first(given.csc, given.src, self.out_channels):
            out = self.aggregate(given.csc, self.transform(given.src), weight)
        else:
            out = self.transform(self.aggregate(given.csc, given.src, weight))
        return out if self.bias is None else out + self.bias

    def _loop_weight(self, csc: CSC, edge_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What each destination's self loop weighs, [num_dst]."""
        fill = 2.0 if self.improved else 1.0
        if self_loops(csc).numel() == 0:
            return torch.full((csc.num_dst,), fill, dtype=dtype, device=csc.device)
        last = last_self_loop(csc)  # of a node's several loops the last one counts, and alone has a gradient
        if edge_weight is None:
            return torch.where(last < 0, fill, 1.0).to(dtype)
        return torch.where(last < 0, fill, edge_weight.index_select(0, last.clamp(min=0)))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


def whole_scales(
    csc: CSC, loops: bool, fill: float, dtype: torch.dtype, weighted: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """D^-1/2 of sources and destinations by the whole graph's degrees, and what the destinations' loops weigh.

    With `loops` every node has one, of its own weight (1, unless edges are `weighted`) where it had one already and
    `fill` where it had none; without, those that are there count as in-edges.
    """
    assert csc.whole is not None
    asked, dtype = dtype, sum_dtype(dtype)
    degrees, num_loops = csc.whole
    others, loop = degrees - num_loops, torch.ones_like(num_loops)
    if weighted:
        if csc.edge_data is None or csc.edge_data.whole is None:
            raise ValueError(_OTHER_WEIGHTS)
        degrees, others, loop = csc.edge_data.whole
    if not loops:
        scale = _inverse_sqrt(degrees.to(dtype), None).to(asked)
        return scale, scale[: csc.num_dst], scale.new_zeros(csc.num_dst)
    loop_weight = torch.where(num_loops > 0, loop.to(dtype), fill)
    scale = _inverse_sqrt(others.to(dtype), loop_weight).to(asked)
    return scale, scale[: csc.num_dst], loop_weight[: csc.num_dst].to(asked)


def _without_self_loops(csc: CSC, edge_weight: Tensor | None) -> tuple[CSC, Tensor | None]:
    csc, kept = without_self_loops(csc)
    return csc, edge_weight if edge_weight is None or kept is None else edge_weight.index_select(0, kept)


def _plain_sum(csc: CSC, rows: Tensor, edge_weight: Tensor | None) -> Tensor:
    if edge_weight is None or rows.dtype != torch.float16 or edge_weight.requires_grad:
        return spmm(csc, rows, weight=None if edge_weight is None else edge_weight.to(rows.dtype))
    weight, factors = narrow_weights(csc, edge_weight)
    return scaled_spmm(csc, rows, weight.to(rows.dtype), None, 1 / factors)


def _normalised_sum(
    csc: CSC,
    rows: Tensor,
    edge_weight: Tensor | None,
    scale_src: Tensor,
    scale_dst: Tensor,
    loop_weight: Tensor | None,
) -> Tensor:
    """scale_dst * (sum of edge_weight * scale_src * rows, and loop_weight times the own ones), in the dtype of rows.

    Scales and weights are float32 or wider. So is the sum before it is scaled: of a node with many in-edges it may be
    more than float16 can say, where the result is not. Weights become float16 only as shares of their destination's.
    """
    dtype, num_dst = rows.dtype, csc.num_dst
    trains = any(each is not None and each.requires_grad for each in (scale_src, scale_dst, edge_weight))
    if dtype != scale_src.dtype and not trains:
        weight, of_sums = edge_weight, scale_dst
        if weight is not None and dtype == torch.float16:
            weight, factors = narrow_weights(csc, weight)
            of_sums = scale_dst / factors
        out = scaled_spmm(csc, rows, None if weight is None else weight.to(dtype), scale_src, of_sums)
        if loop_weight is None:
            return out
        return out + _scaled(rows[:num_dst], (scale_src[:num_dst] * loop_weight * scale_dst).to(dtype))
    scaled = _scaled(rows.to(scale_src.dtype), scale_src)
    out = spmm(csc, scaled, weight=edge_weight)
    out = out if loop_weight is None else out + _scaled(scaled[:num_dst], loop_weight)
    return _scaled(out, scale_dst).to(dtype)


def _scales(
    csc: CSC, edge_weight: Tensor | None, loop_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """D^-1/2 of sources and of destinations; square graphs have one D, by in-edges."""
    dst = _inverse_sqrt(_degrees(csc, edge_weight, dtype), loop_weight)
    if csc.num_src == csc.num_dst:
        return dst, dst
    reverse = csc.transpose()
    if edge_weight is not None:
        assert reverse.edge_ids is not None
        edge_weight = edge_weight.index_select(0, reverse.edge_ids)
    if loop_weight is not None:
        loop_weight = torch.cat([loop_weight, loop_weight.new_zeros(csc.num_src - csc.num_dst)])
    return _inverse_sqrt(_degrees(reverse, edge_weight, dtype), loop_weight), dst


def _degrees(csc: CSC, edge_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    if edge_weight is None:
        return csc.in_degrees().to(dtype)
    return spmm(csc, edge_weight.new_ones(csc.num_src, 1, dtype=dtype), weight=edge_weight).view(-1)


def _inverse_sqrt(degrees: Tensor, loop_weight: Tensor | None) -> Tensor:
    """degree^-1/2, and 0 where a node has no edge at all."""
    degrees = degrees if loop_weight is None else degrees + loop_weight
    is_zero = degrees == 0
    return degrees.masked_fill(is_zero, 1).pow(-0.5).masked_fill(is_zero, 0)


def _scaled(rows: Tensor, scale: Tensor) -> Tensor:
    return rows * scale.unsqueeze(-1)
