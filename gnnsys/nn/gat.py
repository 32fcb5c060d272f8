"""Graph attention (Velickovic 2018), fused: no tensor per edge and feature is made. Parameters as PyG's GATConv."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.nn.init import glorot_, linear, zeros_
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.plain import is_bare_product
from gnnsys.nn.structure import Edges, LayerInputs, Looped, Rows, resolve, with_self_loops
from gnnsys.ops import CSC, edge_softmax, gat_aggregate, spmm


class Transformed(NamedTuple):
    """What the dense half makes: rows per head, and each node's share of the attention scores."""

    rows: Tensor  # [num_src, heads, out_channels]
    score_src: Tensor  # [num_src, heads]
    score_dst: Tensor  # [num_dst, heads]


def _drawn_key() -> int:
    """Of this step's dropout, from torch's generator."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a captured CUDA graph would drop the same attention in every replay: set dropout to 0")
    return int(torch.randint(1 << 62, (), device="cpu"))


class GATConv(GraphLayer):
    """x'_v = sum over u -> v of softmax_v(LeakyReLU(a_src . W x_u + a_dst . W x_v)) W x_u, per head.

    Heads are concatenated, or averaged with `concat=False`. Self loops are replaced by one per node (of the nodes that
    are source and destination); with `edge_dim` a loop's features are the mean of those of the in-edges ("mean") or a
    number. Attention dropout draws its stream from torch's generator, so `torch.manual_seed` repeats it.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | str = "mean",
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(fill_value, str) and fill_value != "mean":
            raise ValueError(f'fill_value must be a number or "mean", got {fill_value!r}')
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.negative_slope, self.dropout = negative_slope, dropout
        self.add_self_loops, self.edge_dim, self.fill_value = add_self_loops, edge_dim, fill_value
        width, total = heads * out_channels, out_channels * (heads if concat else 1)
        self.lin = self.lin_src = self.lin_dst = None
        if isinstance(in_channels, int):
            self.lin = linear(in_channels, width, bias=False, glorot=True)
        else:
            self.lin_src = linear(in_channels[0], width, bias=False, glorot=True)
            self.lin_dst = linear(in_channels[1], width, bias=False, glorot=True)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else linear(edge_dim, width, bias=False, glorot=True)
        self.att_edge = None if edge_dim is None else nn.Parameter(torch.empty(1, heads, out_channels))
        in_dst = in_channels if isinstance(in_channels, int) else in_channels[1]
        self.res = linear(in_dst, total, bias=False, glorot=True) if residual else None
        self.bias = nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for dense in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            glorot_(None if dense is None else dense.weight)
        for attention in (self.att_src, self.att_dst, self.att_edge):
            glorot_(attention)
        zeros_(self.bias)

    def transform(self, src: Tensor, dst: Tensor | None, num_dst: int, dst_is_first: bool = False) -> Transformed:
        """The dense half. A node's score is linear in its row: a . (W x).

        `dst_is_first` says that the destinations are the first sources, so that W is applied to them once. Only whoever
        made both knows: equal memory may be a detached half, which has no gradient.
        """
        shape = (-1, self.heads, self.out_channels)
        of_src, of_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        assert of_src is not None and of_dst is not None
        rows = of_src(src).view(shape)
        score_src = self._score(rows, self.att_src)
        if dst is None:
            return Transformed(rows, score_src, score_src.new_zeros(num_dst, self.heads))
        shares_rows = dst_is_first and self.lin is not None
        rows_dst = rows[:num_dst] if shares_rows else of_dst(dst).view(shape)
        return Transformed(rows, score_src, self._score(rows_dst, self.att_dst))

    @staticmethod
    def _score(rows: Tensor, attention: Tensor) -> Tensor:
        """a . row per head, in the dtype of the rows also under autocast, which leaves products to promotion."""
        return (rows * attention.to(rows.dtype)).sum(-1, dtype=rows.dtype)

    def aggregate(self, csc: CSC, node: Transformed, edge_score: Tensor | None = None) -> Tensor:
        """The sparse half: softmax over in-edges and weighted sum in one pass, [num_dst, heads, out_channels]."""
        drops = self.training and self.dropout > 0
        return gat_aggregate(
            csc,
            *node,
            edge_score=edge_score,
            negative_slope=self.negative_slope,
            dropout=self.dropout if drops else 0.0,
            key=_drawn_key() if drops else 0,
        )

    def forward(
        self,
        x: Rows,
        edges: Edges,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """With `return_attention_weights` also (edge_index, alpha) of the edges used, self loops among them."""
        given = resolve(x, edges, size, derives=True)
        residual = None if self.res is None or given.dst is None else self.res(given.dst)
        node = self.transform(given.src, given.dst, given.csc.num_dst, given.dst_is_first)
        csc, edge_score = self.scored_edges(given, edge_attr)
        edge_score = None if edge_score is None else edge_score.to(node.rows.dtype)
        if return_attention_weights:
            alpha = self._attention(csc, node, edge_score)
            out = self._finish(spmm(csc, node.rows, weight=alpha), residual)
            return out, (torch.stack([csc.indices.long(), csc.dst()]), alpha)
        return self._finish(self.aggregate(csc, node, edge_score), residual)

    def scored_edges(self, given: LayerInputs, edge_attr: Tensor | None) -> tuple[CSC, Tensor | None]:
        """The edges attention runs over, and their own share of the scores: a_edge . (W_edge e)."""
        looped = with_self_loops(given.csc) if self.add_self_loops else None
        csc = given.csc if looped is None else looped.csc
        if edge_attr is None or self.lin_edge is None or self.att_edge is None:
            return csc, None
        rows = given.edge_rows(edge_attr, "edge_attr")
        if is_bare_product(self.lin_edge):
            return csc, self._scores_at_once(rows, looped)
        # As PyG does: loops are given features, and lin_edge is called on those of all edges.
        rows = rows.unsqueeze(1) if rows.dim() == 1 else rows
        if looped is not None:
            if self.fill_value == "mean":
                filled = spmm(looped.others, rows, reduce="mean")[: looped.num_loops]
            else:
                filled = rows.new_full((looped.num_loops, *rows.shape[1:]), float(self.fill_value))
            rows = looped.extend(rows, filled)
        return csc, self._score(self.lin_edge(rows).view(-1, self.heads, self.out_channels), self.att_edge)

    def _scores_at_once(self, rows: Tensor, looped: Looped | None) -> Tensor:
        """Where lin_edge is a product, scores are linear in the features: no heads x channels per edge are made."""
        assert self.lin_edge is not None and self.att_edge is not None
        num_edges, width = rows.shape[0], self.lin_edge.weight.shape[1]
        if rows.shape[1:].numel() != width:
            raise ValueError(f"edge_attr has shape {list(rows.shape)}, expected {width} columns, edge_dim")
        weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        to_score = torch.einsum("hce,hc->eh", weight, self.att_edge[0])  # [edge_dim, heads]
        score = rows.reshape(num_edges, width) @ to_score
        if looped is None:
            return score
        if self.fill_value == "mean":  # a mean's score is the mean of the scores
            return looped.extend(score, spmm(looped.others, score, reduce="mean")[: looped.num_loops])
        return looped.extend(score, (float(self.fill_value) * to_score.sum(0)).expand(looped.num_loops, -1))

    def _attention(self, csc: CSC, node: Transformed, edge_score: Tensor | None) -> Tensor:
        score = node.score_src.index_select(0, csc.indices) + node.score_dst.index_select(0, csc.dst())
        score = score if edge_score is None else score + edge_score
        alpha = edge_softmax(csc, F.leaky_relu(score, self.negative_slope))
        return F.dropout(alpha, self.dropout, self.training)

    def _finish(self, out: Tensor, residual: Tensor | None) -> Tensor:
        out = out.flatten(1) if self.concat else out.mean(1)
        out = out if residual is None else out + residual
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"
