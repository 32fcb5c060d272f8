"""Layers that aggregate by sums, taken in their two halves, so that a bin costs no more than its share of the whole.

Sums are made where rows lie, over all local rows, instead of over rows gathered for the bin; their gradients are pulled
over the transposed structure when they are asked for, instead of pushed into a sum that every bin adds to. Where a
layer makes rows narrower its dense half goes first, and the narrow rows travel. Where rows move they come in pieces,
and `passes` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import Rows
from gnnsys.fullgraph.plan.module_layout import is_bare
from gnnsys.fullgraph.plan.stages import Join, Stage
from gnnsys.nn import GCNConv, GINConv, SAGEConv, whole_scales
from gnnsys.ops import CSC, WEIGHT, WholeDegrees, narrow_weights, native, sum_dtype

Dense = Callable[[Tensor, Tensor], Tensor]
_SUMS = ("mean", "sum")


class View:
    """A structure over all local rows, [core, halo], and how its sums are weighted.

    `kind` is "sum", "mean" (by in-degree) or "gcn" (one self loop each, D^-1/2 on both sides). Where the structure has
    weights of edges, those count as much in sums and, of "gcn", in degrees.
    """

    def __init__(self, kind: str, csc: CSC, whole: WholeDegrees) -> None:
        self.kind, self._whole = kind, whole
        weight = None if csc.edge_data is None else csc.edge_data.rows[WEIGHT]
        self._of_weights = None if csc.edge_data is None else replace(csc.edge_data, rows={})
        if kind == "gcn":
            csc, weight = self._looped(csc, weight)
        self._factors: Tensor | None = None  # of each node's weights: float16 can say what is left, others lose nothing
        if kind == "gcn" and weight is not None:
            narrow, self._factors = narrow_weights(csc, weight)
            weight = narrow.to(weight.dtype) if weight.is_floating_point() else narrow
        self.csc, self.weight = csc, weight
        self._ends = self.csc.indptr.cpu()  # to cut by without asking a device
        self._transposed: tuple[CSC, Tensor] | None = None
        self._scales: dict[torch.dtype, tuple[Tensor | None, Tensor | None]] = {}
        self._weights: dict[tuple[torch.dtype, bool], Tensor] = {}

    def sums(self, rows: Tensor, first: int, end: int, scale: Tensor | None = None) -> Tensor:
        """What the nodes at places first to end have as in-neighbours, summed; `rows` are all local ones.

        With `scale`, [rows], each counts so many times.
        """
        src, dst = self.scales(rows.dtype)
        if scale is not None:
            scale = scale.to(sum_dtype(rows.dtype))
            src = scale if src is None else src * scale
        weight, dst = self._weight_of(rows.dtype, False), None if dst is None else dst[first:end]
        return _spmm(self.csc, self._ends, first, end, rows, weight, src, dst)

    def pull(self, grads: Tensor, first: int, end: int, into: Tensor | None = None) -> Tensor:
        """The gradient of local rows first to end, from those of all nodes' sums; added to `into`, if that is given."""
        if self._transposed is None:
            turned = self.csc.transpose()
            self._transposed = (turned, turned.indptr.cpu())
        src, dst = self.scales(grads.dtype)
        weight, src = self._weight_of(grads.dtype, True), None if src is None else src[first:end]
        return _spmm(*self._transposed, first, end, grads, weight, dst, src, into)

    def scales(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What rows of `dtype`, and the nodes' sums of them, are multiplied by: [num_local] and [num_core]."""
        dtype = sum_dtype(dtype)
        if dtype not in self._scales:
            if self.kind == "gcn":
                piece = replace(self.csc, whole=self._whole, edge_data=self._of_weights)
                src, dst, _ = whole_scales(piece, True, 1.0, dtype, self._of_weights is not None)
                self._scales[dtype] = (src, dst if self._factors is None else dst / self._factors.to(dtype))
            elif self.kind == "mean":
                self._scales[dtype] = (None, native.inverse_degrees(self.csc.indptr, dtype))
            else:
                self._scales[dtype] = (None, None)
        return self._scales[dtype]

    def _weight_of(self, dtype: torch.dtype, turned: bool) -> Tensor | None:
        """What edges weigh, by position of the structure, or of the transposed one."""
        if self.weight is None:
            return None
        if (dtype, turned) not in self._weights:
            weight = turned_weight(self.csc, self.weight) if turned else self.weight
            self._weights[dtype, turned] = weight.to(dtype)
        return self._weights[dtype, turned]

    def _looped(self, csc: CSC, weight: Tensor | None) -> tuple[CSC, Tensor | None]:
        """Every node with one self loop, whatever it had; one that it had keeps its weight."""
        dst = csc.dst()
        kept = csc.indices != dst
        loops = torch.arange(csc.num_dst, device=dst.device)
        edges = torch.stack([torch.cat([csc.indices[kept].long(), loops]), torch.cat([dst[kept], loops])])
        looped = CSC.from_edge_index(edges, csc.num_src, csc.num_dst, narrow=True)
        if weight is not None:
            assert self._of_weights is not None and self._of_weights.whole is not None
            has_loop, own = self._whole.num_loops[: csc.num_dst] > 0, self._of_weights.whole.loop[: csc.num_dst]
            weight = torch.cat([weight[kept], torch.where(has_loop, own, 1.0).to(weight.dtype)])
            weight = weight if looped.edge_ids is None else weight[looped.edge_ids.long()]
        return CSC(looped.indptr, looped.indices, csc.num_src), weight


def turned_weight(csc: CSC, weight: Tensor) -> Tensor:
    """What edges weigh by position of the transposed structure."""
    positions = csc.transpose().edge_ids
    assert positions is not None
    return weight.index_select(0, positions)


def _spmm(
    csc: CSC, ends: Tensor, first: int, end: int, rows: Tensor, weight: Tensor | None, src_scale: Tensor | None,
    dst_scale: Tensor | None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sums of columns first to end, added to `into` or by themselves; `ends` is indptr on the CPU."""
    indptr, indices = csc.indptr, csc.indices
    if (first, end) != (0, csc.num_dst):
        positions = slice(int(ends[first]), int(ends[end]))
        indices, weight = indices[positions], None if weight is None else weight[positions]
        indptr = indptr[first : end + 1] - int(ends[first])
    with torch.no_grad():
        rows = rows.contiguous()
        if into is None:
            return native.spmm(indptr, indices, None, rows, weight, src_scale, dst_scale, None, None, None)
        native.spmm_add(indptr, indices, None, rows, weight, src_scale, dst_scale, into)
        return into


@dataclass
class LinearStage(Stage):
    """A stage whose graph layer is `dense` of its nodes' sums (of a `View` of that kind) and their own rows."""

    kind: str = "sum"
    dense: Dense = field(default_factory=lambda: _sums_alone)
    takes_own: bool = False
    weighted: bool = False
    uses: Callable[[], list[Any]] | None = None  # of the layer's parameters, where some are used elsewhere

    def parameters(self) -> list[nn.Parameter]:
        if self.uses is None:
            return super().parameters()
        found: list[Any] = [*self.uses(), *(p for module in self.then for p in module.parameters())]
        return list({id(p): p for p in found if p is not None and p.requires_grad}.values())

    def run_sums(self, sums: Tensor, own: Tensor, joined: Sequence[Tensor], now: Rows) -> Tensor:
        """As `run`, from sums instead of rows of sources."""
        with self.at_work(now):
            rows = self.dense(sums, own)
            return self.finish(rows.clone() if rows is sums and self.writes else rows, joined)


def _sums_alone(sums: Tensor, own: Tensor) -> Tensor:
    return sums


def with_halves(stages: Sequence[Stage], x_trains: bool, weighted: bool = False) -> list[Stage]:
    """The stages, with graph layers that aggregate linearly as sums, after their dense half where that is narrower.

    A layer that reads features which never change (not `x_trains`) is left as it is: they travel and are summed once.
    So is one that was changed, or one of whose linears was: it is called. What stages hold are modules, never their
    parameters, which may be other ones in the next pass.
    `weighted` says that layers which take weights of edges are given some.
    """
    out: list[Stage] = []
    for index, stage in enumerate(stages):
        conv, may_narrow = stage.conv, index > 0 or x_trains
        if isinstance(conv, SAGEConv) and is_bare(conv, SAGEConv) and conv.aggr in _SUMS and not conv.project:
            out += _sage(stage, conv, may_narrow)
        elif isinstance(conv, GCNConv) and is_bare(conv, GCNConv) and _is_looped(conv):
            out += _gcn(stage, conv, may_narrow, weighted)
        elif isinstance(conv, GINConv) and is_bare(conv, GINConv):
            out.append(_linear(stage, "sum", _gin(conv), True))
        else:
            out.append(stage)
    for stage in out:
        stage.look()
    return out


def _is_looped(conv: GCNConv) -> bool:
    """Whether a View of "gcn", or of "sum" where nothing is normalised, is what it sums up."""
    return not conv.improved and (conv.add_self_loops or not conv.normalize)


def _linear(stage: Stage, kind: str, dense: Dense, takes_own: bool) -> LinearStage:
    return LinearStage(
        stage.conv, stage.then, stage.norm, stage.keep_as, stage.number, stage.in_place, kind=kind, dense=dense,
        takes_own=takes_own,
    )  # fmt: skip


def _sage(stage: Stage, conv: SAGEConv, may_narrow: bool) -> list[Stage]:
    takes_own = conv.root_weight

    def finish(out: Tensor) -> Tensor:
        return nn.functional.normalize(out, dim=-1) if conv.normalize else out

    def last(sums: Tensor, own: Tensor) -> Tensor:
        out = conv.lin_l(sums)
        return finish(torch.addmm(out, own, conv.lin_r.weight.t()) if takes_own else out)

    def biased(sums: Tensor, own: Tensor) -> Tensor:
        return sums if conv.lin_l.bias is None else sums + conv.lin_l.bias

    if not (may_narrow and _narrows(conv.lin_l)):
        return [_linear(stage, conv.aggr, last, takes_own)]
    dense_half = _Rows(conv.transform, lambda: [_weight(conv.lin_l)])
    first = Stage(then=[dense_half], keep_as=stage.keep_as, number=stage.number)
    joins = []
    if takes_own:
        name = f"rows of stage {stage.number}"
        first.keep_as = [*stage.keep_as, name]
        joins = [_Root(name, conv)]
    then = [*joins, *([_Rows(finish)] if conv.normalize else []), *stage.then]
    last_half = _linear(replace(stage, then=then, keep_as=[]), conv.aggr, biased, False)
    last_half.uses = lambda: [conv.lin_l.bias]
    return [first, last_half]


def _gcn(stage: Stage, conv: GCNConv, may_narrow: bool, weighted: bool) -> list[Stage]:
    kind = "gcn" if conv.normalize else "sum"

    def biased(rows: Tensor) -> Tensor:
        return rows if conv.bias is None else rows + conv.bias

    if not (may_narrow and _narrows(conv.lin)):
        whole = _linear(stage, kind, lambda sums, own: biased(conv.lin(sums)), False)
        whole.weighted = weighted
        return [whole]
    first = Stage(then=[conv.lin], keep_as=stage.keep_as, number=stage.number)
    last_half = _linear(replace(stage, keep_as=[]), kind, lambda sums, own: biased(sums), False)
    last_half.uses, last_half.weighted = lambda: [conv.bias], weighted
    return [first, last_half]


def _gin(conv: GINConv) -> Dense:
    return lambda sums, own: conv.transform(sums + (1 + conv.eps) * own)


def _narrows(linear: nn.Linear) -> bool:
    return linear.out_features < linear.in_features


def _weight(linear: Any) -> nn.Parameter:
    weight: nn.Parameter = linear.weight
    return weight


class _Rows(nn.Module):
    """A function of rows, as a module that has the parameters it uses, which are those of a layer."""

    def __init__(self, work: Callable[[Tensor], Tensor], uses: Callable[[], list[nn.Parameter]] = list) -> None:
        super().__init__()
        self._uses, self._work = uses, work

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from self._uses()

    def forward(self, rows: Tensor) -> Tensor:
        return self._work(rows)


class _Root(Join):
    """Adds what a layer's `lin_r` makes of the rows at a mark."""

    def __init__(self, name: str, conv: SAGEConv) -> None:
        super().__init__(name)
        self._conv = (conv,)  # in a tuple it is no child

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield _weight(self._conv[0].lin_r)

    def forward(self, rows: Tensor, kept: Tensor) -> Tensor:
        return torch.addmm(rows, kept, self._conv[0].lin_r.weight.t())
