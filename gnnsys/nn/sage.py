"""GraphSAGE's layer (Hamilton 2017): lin_l(reduce of the neighbours) + lin_r(own row). Parameters as PyG's SAGEConv."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.nn.init import reduce_name
from gnnsys.nn.order import transform_first
from gnnsys.nn.structure import Edges, Rows, resolve
from gnnsys.ops import CSC, spmm
from gnnsys.ops.aggregate import spmm_and_own


class SAGEConv(nn.Module):
    """x'_v = lin_l(aggr over u -> v of x_u) + lin_r(x_v).

    `aggr` is "mean", "sum", "max" or "min". Linear reductions are done before or after lin_l, whichever is cheaper.

    >>> conv = SAGEConv(16, 8)
    >>> out = conv(x, edge_index)           # a whole graph, PyG's way
    >>> out = conv(x_of_sources, block)     # a block of a sampled batch, DGL's way
    """

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
            self.lin = nn.Linear(in_src, in_src)
        self.lin_l = nn.Linear(in_src, out_channels, bias=bias)
        if root_weight:
            self.lin_r = nn.Linear(in_dst, out_channels, bias=False)

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def transform(self, rows: Tensor) -> Tensor:
        """The dense half, row by row: lin_l without its bias (which belongs after the reduction)."""
        return F.linear(rows, self.lin_l.weight)

    def aggregate(self, csc: CSC, rows: Tensor) -> Tensor:
        """The sparse half: the reduction over in-edges."""
        return spmm(csc, rows, reduce=self.aggr)

    @property
    def _aggregates_as_written(self) -> bool:
        """Whether nobody has put another `aggregate` in the place of ours."""
        return type(self).aggregate is SAGEConv.aggregate and "aggregate" not in self.__dict__

    def forward(self, x: Rows, edges: Edges, size: tuple[int, int] | None = None) -> Tensor:
        given = resolve(x, edges, size)
        rows = self.lin(given.src).relu() if self.project else given.src
        own, is_linear = given.dst, self.aggr in ("mean", "sum")
        if is_linear and transform_first(given.csc, rows, self.out_channels):
            out = self.aggregate(given.csc, self.transform(rows))
            out = out if self.lin_l.bias is None else out + self.lin_l.bias
        else:
            if self.root_weight and given.dst_is_first and not self.project and self._aggregates_as_written:
                reduced, own = spmm_and_own(given.csc, rows, self.aggr)
            else:
                reduced = self.aggregate(given.csc, rows)
            out = self.lin_l(reduced)  # the product adds the bias as it goes
        if self.root_weight and own is not None:
            out = torch.addmm(out, own, self.lin_r.weight.t())  # and here what is there already
        return F.normalize(out, dim=-1) if self.normalize else out

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"
