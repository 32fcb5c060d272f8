"""The graph isomorphism layer (Xu 2019): an MLP of (1 + eps) x own row + sum of the neighbours. As PyG's GINConv."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gnnsys.nn.halves import Halves
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, Rows, resolve
from gnnsys.nn.plain import as_written, is_untouched
from gnnsys.ops import CSC, spmm


class GINConv(GraphLayer):
    """x'_v = nn((1 + eps) x_v + sum over u -> v of x_u), eps a parameter when `train_eps`, else a buffer."""

    eps: Tensor

    def __init__(self, nn: nn.Module, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.nn = nn
        self.initial_eps = eps
        value = torch.full((1,), eps)
        if train_eps:
            self.eps = torch.nn.Parameter(value)
        else:
            self.register_buffer("eps", value)

    def reset_parameters(self) -> None:
        for module in self.nn.modules():
            if module is not self.nn and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def transform(self, rows: Tensor) -> Tensor:
        """The dense half: the MLP, row by row."""
        return self.nn(rows)

    def aggregate(self, csc: CSC, rows: Rows, edge_rows: Tensor | None = None) -> Tensor:
        """The sparse half: the sum over in-edges, and (1 + eps) times the own row.

        One tensor are rows of sources, of which destinations are the first; a pair has rows of both.
        """
        src, own = rows if isinstance(rows, tuple) else (rows, rows[: csc.num_dst])
        out = spmm(csc, src, weight=edge_rows)
        return out if own is None else out + (1 + self.eps) * own

    def halves(self) -> Halves | None:
        if not is_untouched(self, GINConv):
            return None
        return Halves(
            reduce="sum", combine=lambda sums, own: self.transform(sums + (1 + self.eps) * own), takes_own=True
        )

    def forward(self, x: Rows, edges: Edges, size: tuple[int, int] | None = None) -> Tensor:
        given = resolve(x, edges, size)
        sums = given.made_sums("sum") if as_written(self, GINConv, "aggregate") else None
        if sums is not None and given.dst is not None:
            return self.transform(sums + (1 + self.eps) * given.dst)
        return self.transform(self.aggregate(given.csc, (given.src, given.dst)))
