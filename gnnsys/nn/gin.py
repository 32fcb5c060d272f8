"""The graph isomorphism layer (Xu 2019): an MLP of (1 + eps) x own row + sum of the neighbours. As PyG's GINConv."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gnnsys.nn.halves import Halves, RowWeights
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, LayerInputs, Rows, resolve
from gnnsys.nn.plain import as_written, is_bare_linear, is_untouched, runs_as
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

    def row_weights(self) -> RowWeights | str:
        first = self._first_linear()
        if first is None:
            return "has an MLP that does not begin with torch's own linear layer"
        return RowWeights(first.weight) if is_untouched(self, GINConv) else "was changed"

    def _first_linear(self) -> nn.Linear | None:
        """What the MLP begins with, where it is a product and a bias: W (sum of rows) = sum of W rows."""
        is_sequence = type(self.nn) is nn.Sequential and runs_as(self.nn, nn.Sequential) and len(self.nn) > 0
        first: nn.Module = self.nn[0] if is_sequence else self.nn  # type: ignore[index]
        return first if isinstance(first, nn.Linear) and is_bare_linear(first) else None

    def _of_products(self, given: LayerInputs, products: Tensor, first: nn.Linear) -> Tensor:
        """`forward` where rows were multiplied on the host: the bias, and the rest of the MLP, come behind the sum."""
        out = self.aggregate(given.csc, products)
        out = out if first.bias is None else out + first.bias
        for module in self.nn[1:] if first is not self.nn else ():  # type: ignore[index]
            out = module(out)
        return out

    def forward(self, x: Rows, edges: Edges, size: tuple[int, int] | None = None) -> Tensor:
        given = resolve(x, edges, size)
        products = given.host_products(self.row_weights()) if given.waits_on_host else None
        if products is not None and (first := self._first_linear()) is not None:
            return self._of_products(given, products[0], first)
        sums = given.made_sums("sum") if as_written(self, GINConv, "aggregate") else None
        if sums is not None and given.dst is not None:
            return self.transform(sums + (1 + self.eps) * given.dst)
        return self.transform(self.aggregate(given.csc, (given.src, given.dst)))
