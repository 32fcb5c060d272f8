"""GraphSAGE's layer (Hamilton 2017): lin_l(reduce of the neighbours) + lin_r(own row). Parameters as PyG's SAGEConv."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.nn.halves import Dense, Halves, NarrowFirst, RowWeights
from gnnsys.nn.init import linear, narrows, reduce_name
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import Edges, LayerInputs, Rows, resolve
from gnnsys.nn.order import transform_first
from gnnsys.nn.plain import as_written, is_bare_linear, is_bare_product, is_untouched
from gnnsys.ops import CSC, spmm, spmm_and_own

# Behind a sum there is room for a bias; what is added to it must be a product alone.
_LINEARS = {"lin_l": is_bare_linear, "lin_r": is_bare_product}


class SAGEConv(GraphLayer):
    """x'_v = lin_l(aggr over u -> v of x_u) + lin_r(x_v).

    `aggr` is "mean", "sum", "max" or "min". Linear reductions are done before or after lin_l, whichever is cheaper,
    as long as lin_l is torch's own and nobody has changed it; else the linear layers are called as PyG does.

    >>> conv = SAGEConv(16, 8)
    >>> out = conv(x, edge_index)           # a whole graph, PyG's way
    >>> out = conv(x_of_sources, block)     # a block of a sampled batch, DGL's way
    """

    decides: ClassVar = ("aggr", "normalize", "project", "root_weight")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        in_src, in_dst = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        self.in_channels, self.out_channels = in_channels, out_channels
        self.aggr = reduce_name(aggr)
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        if project:
            if in_src < 0:
                raise ValueError("project=True needs a number of in_channels: lin has as many outputs")
            self.lin = linear(in_src, in_src)
        self.lin_l = linear(in_src, out_channels, bias)
        if root_weight:
            self.lin_r = linear(in_dst, out_channels, bias=False)

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def transform(self, rows: Tensor) -> Tensor:
        """The dense half, row by row: lin_l without its bias, which belongs after the reduction.

        Where lin_l is not torch's own, or was changed, it is called as it is and adds what bias it has.
        """
        return F.linear(rows, self.lin_l.weight) if is_bare_linear(self.lin_l) else self.lin_l(rows)

    def aggregate(self, csc: CSC, rows: Tensor, edge_rows: Tensor | None = None) -> Tensor:
        """The sparse half: the reduction over in-edges, which weigh `edge_rows` or alike."""
        return spmm(csc, rows, weight=edge_rows, reduce=self.aggr)

    def halves(self) -> Halves | None:
        if self.aggr not in ("mean", "sum") or self.project or not is_untouched(self, SAGEConv, _LINEARS):
            return None
        adds_own = self.root_weight

        def finish(out: Tensor) -> Tensor:
            return F.normalize(out, dim=-1) if self.normalize else out

        def combine(sums: Tensor, own: Tensor) -> Tensor:
            out = self.lin_l(sums)
            return finish(torch.addmm(out, own, self.lin_r.weight.t()) if adds_own else out)

        def add_bias(sums: Tensor) -> Tensor:
            return sums if self.lin_l.bias is None else sums + self.lin_l.bias

        def add_own(rows: Tensor, own: Tensor) -> Tensor:
            return torch.addmm(rows, own, self.lin_r.weight.t())

        narrow_first = NarrowFirst(
            transform=Dense(self.transform, lambda: [self.lin_l.weight]),
            combine=Dense(add_bias, lambda: [self.lin_l.bias]),
            add_own=Dense(add_own, lambda: [self.lin_r.weight]) if adds_own else None,
            finish=Dense(finish) if self.normalize else None,
        )
        return Halves(
            reduce=self.aggr, combine=combine, takes_own=adds_own,
            narrow_first=narrow_first if narrows(self.lin_l) else None,
        )  # fmt: skip

    def row_weights(self) -> RowWeights | str:
        if self.aggr not in ("mean", "sum"):
            return f"takes the {self.aggr} of rows before it multiplies them"
        if self.project:
            return "projects rows before it sums them"
        if not is_untouched(self, SAGEConv, _LINEARS):
            return "was changed, or a linear layer of it"
        return RowWeights(self.lin_l.weight, self.lin_r.weight if self.root_weight else None)

    def _of_products(self, given: LayerInputs, products: tuple[Tensor, ...]) -> Tensor:
        """`forward` where rows were multiplied on the host."""
        out = self.aggregate(given.csc, products[0])
        out = out if self.lin_l.bias is None else out + self.lin_l.bias
        out = out + products[1] if self.root_weight else out
        return F.normalize(out, dim=-1) if self.normalize else out

    def forward(self, x: Rows, edges: Edges, size: tuple[int, int] | None = None) -> Tensor:
        given = resolve(x, edges, size)
        products = given.host_products(self.row_weights()) if given.waits_on_host else None
        if products is not None:
            return self._of_products(given, products)
        rows = self.lin(given.src).relu() if self.project else given.src
        lin_r = self.lin_r if self.root_weight else None
        adds_own = is_bare_product(lin_r)  # a product that adds what is there already as it goes
        out, own = self._reduced(given, rows, adds_own)
        if lin_r is not None and own is not None:
            out = torch.addmm(out, own, lin_r.weight.t()) if adds_own else out + lin_r(own)
        return F.normalize(out, dim=-1) if self.normalize else out

    def _reduced(self, given: LayerInputs, rows: Tensor, adds_own: bool) -> tuple[Tensor, Tensor | None]:
        """lin_l of the reduced rows, and the destinations' own rows."""
        lin_l = self.lin_l
        is_bare, aggregates_as_written = is_bare_linear(lin_l), as_written(self, SAGEConv, "aggregate")
        transforms_as_written = as_written(self, SAGEConv, "transform")
        has_order = not (is_bare and aggregates_as_written and transforms_as_written and self.aggr in ("mean", "sum"))
        sums = None if has_order or self.project else given.made_sums(self.aggr)
        if sums is not None:
            return lin_l(sums), given.dst
        if not has_order and transform_first(given.csc, rows, self.out_channels):
            out, bias = self.aggregate(given.csc, F.linear(rows, lin_l.weight)), lin_l.bias
            return out if bias is None else out + bias, given.dst
        own = given.dst
        if adds_own and given.dst_is_first and not self.project and aggregates_as_written:
            reduced, own = spmm_and_own(given.csc, rows, self.aggr)
        else:
            reduced = self.aggregate(given.csc, rows)
        if transforms_as_written:
            return lin_l(reduced), own  # the product adds the bias as it goes
        out = self.transform(reduced)
        return out + lin_l.bias if is_bare and lin_l.bias is not None else out, own

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"
