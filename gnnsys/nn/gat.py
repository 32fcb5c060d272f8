"""Graph attention (Velickovic 2018), fused: no tensor per edge and feature is made. Parameters as PyG's GATConv."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.nn.init import glorot_, linear, zeros_
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, LayerInputs, Looped, Rows, resolve, with_self_loops
from gnnsys.nn.plain import is_bare_product, is_untouched
from gnnsys.ops import CSC, dropout_rows, edge_softmax, gat_aggregate, is_captured, spmm

_MAX_PLACES = 1 << 24  # of a node's in-edges: further ones have the masks of another node's


class Transformed(NamedTuple):
    """What the dense half makes: rows per head, and each node's share of the attention scores.

    How many destinations there are the structure knows. Until they are scored, `dst` are their rows, the first num_dst
    of it, and None where they have none and score 0.
    """

    rows: Tensor  # [num_src, heads, out_channels]
    score_src: Tensor  # [num_src, heads]
    dst: Tensor | None  # [num_dst or more, heads, out_channels]
    score_dst: Tensor | None = None  # [num_dst, heads]


def _drawn_key(rows: Tensor) -> int:
    """Of this step's dropout, from torch's generator. Of rows on the CPU CUDA is not asked: that would start it."""
    if is_captured(rows):
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

    def transform(self, rows: Rows) -> Transformed:
        """The dense half. A node's score is linear in its row: a . (W x).

        One tensor are rows of sources, of which destinations are the first, so that W is applied to them once. A pair
        has rows of both. Only whoever made them knows: equal memory may be a detached half, which has no gradient.
        """
        shape = (-1, self.heads, self.out_channels)
        of_src, of_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        assert of_src is not None and of_dst is not None
        src, dst = rows if isinstance(rows, tuple) else (rows, rows)
        out = of_src(src).view(shape)
        score_src = self._score(out, self.att_src)
        shares_rows = self.lin is not None and not isinstance(rows, tuple)
        return Transformed(out, score_src, out if shares_rows else None if dst is None else of_dst(dst).view(shape))

    def _scored(self, csc: CSC, node: Transformed) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, and the scores of sources and of destinations."""
        score = node.score_dst
        if score is None and node.dst is None:
            score = node.score_src.new_zeros(csc.num_dst, self.heads)
        elif score is None:
            score = self._score(node.dst[: csc.num_dst], self.att_dst)  # type: ignore[index]
        return node.rows, node.score_src, score

    def _with_scores(self, csc: CSC, node: Transformed) -> Transformed:
        rows, score_src, score_dst = self._scored(csc, node)
        return Transformed(rows, score_src, None, score_dst)

    @staticmethod
    def _score(rows: Tensor, attention: Tensor) -> Tensor:
        """a . row per head, in the dtype of the rows also under autocast, which leaves products to promotion."""
        return (rows * attention.to(rows.dtype)).sum(-1, dtype=rows.dtype)

    def aggregate(self, csc: CSC, rows: Transformed, edge_rows: Tensor | None = None) -> Tensor:
        """The sparse half: softmax over in-edges and weighted sum in one pass, [num_dst, heads, out_channels].

        `edge_rows` are the edges' own share of the scores, [num_edges, heads].
        """
        drops = self.training and self.dropout > 0
        return gat_aggregate(
            csc,
            *self._scored(csc, rows),
            edge_score=edge_rows,
            negative_slope=self.negative_slope,
            dropout=self.dropout if drops else 0.0,
            key=_drawn_key(rows.rows) if drops else 0,
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
        node = self.transform(given.src if given.dst_is_first and self.lin is not None else (given.src, given.dst))
        node = self._with_scores(given.csc, node)
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

    def draws(self) -> bool:
        return self.training and float(self.dropout) > 0 and is_untouched(self, GATConv)

    def forward_keyed(
        self, rows: Tensor, csc: CSC, ids: Tensor, key: int, edge_attr: Tensor | None = None, **_: Any
    ) -> Tensor:
        """`forward` with a dropout of attention whose mask depends on key, destination, in-edge and head alone.

        An in-edge goes by its place among the node's, which keep their order in any piece; the self loop is the last.
        """
        given = resolve(rows, csc)
        node = self._with_scores(csc, self.transform(rows if self.lin is not None else (rows, given.dst)))
        edges, edge_score = self.scored_edges(given, edge_attr)
        dst = edges.dst()
        score_src, score_dst = self._scored(edges, node)[1:]
        score = score_src.index_select(0, edges.indices) + score_dst.index_select(0, dst)
        score = score if edge_score is None else score + edge_score.to(score.dtype)
        alpha = edge_softmax(edges, F.leaky_relu(score, self.negative_slope))
        place = torch.arange(edges.num_edges, device=dst.device) - edges.indptr.index_select(0, dst)
        of_edges = ids.index_select(0, dst).long() * _MAX_PLACES + place
        alpha = dropout_rows(alpha, of_edges, self.dropout, key)
        return self._finish(spmm(edges, node.rows, weight=alpha), None if self.res is None else self.res(given.dst))

    def _attention(self, csc: CSC, node: Transformed, edge_score: Tensor | None) -> Tensor:
        score_src, score_dst = self._scored(csc, node)[1:]
        score = score_src.index_select(0, csc.indices) + score_dst.index_select(0, csc.dst())
        score = score if edge_score is None else score + edge_score
        alpha = edge_softmax(csc, F.leaky_relu(score, self.negative_slope))
        return F.dropout(alpha, self.dropout, self.training)

    def _finish(self, out: Tensor, residual: Tensor | None) -> Tensor:
        out = out.flatten(1) if self.concat else out.mean(1)
        out = out if residual is None else out + residual
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"
