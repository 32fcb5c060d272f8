"""Stages whose graph layer is computed in its two halves, so that a bin costs no more than its share of the whole.

A layer states its halves (`gnnsys.nn.Halves`): sums over in-edges, and what is dense. Sums are made where rows lie.
Where a layer makes rows narrower its dense half goes first, and the narrow rows travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import KeyedRows
from gnnsys.fullgraph.modules import JoinKept
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.pyg_halves import pyg_halves
from gnnsys.nn import Dense, GraphLayer, Halves, NarrowFirst, has_hooks


@dataclass
class SumStage(ModelStage):
    """A stage whose graph layer is `combine` of its nodes' sums, of `NeighborSums` of that kind, and own rows."""

    kind: str = "sum"
    combine: Callable[[Tensor, Tensor], Tensor] = field(default_factory=lambda: _sums_alone)
    takes_own: bool = False
    weighted: bool = False
    uses: Callable[[], Sequence[Any]] | None = None  # of the layer's parameters, where some are used elsewhere

    def parameters(self) -> list[nn.Parameter]:
        if self.uses is None:
            return super().parameters()
        found: list[Any] = [*self.uses(), *(p for module in self.then for p in module.parameters())]
        return list({id(p): p for p in found if p is not None and p.requires_grad}.values())

    def run_sums(self, sums: Tensor, own: Tensor, joined: Sequence[Tensor], now: KeyedRows) -> Tensor:
        """As `run`, from sums instead of rows of sources."""
        with self.at_work(now):
            rows = self.combine(sums, own)
            return self.finish(rows.clone() if rows is sums and self.writes else rows, joined)


def _sums_alone(sums: Tensor, own: Tensor) -> Tensor:
    return sums


def with_halves(
    stages: Sequence[ModelStage], narrows_first: bool, weighted: bool = False, *, takes_apart: bool = False
) -> list[ModelStage]:
    """The stages, with graph layers that state their halves as sums, after their dense half where that is narrower.

    A layer that reads features which never change sums them up first, unless `narrows_first` says otherwise: they
    travel and are summed once. With `takes_apart` PyG's layers are taken in their halves too.
    One that states no halves, as somebody has changed it, is called. What stages hold are modules, never their
    parameters, which may be other ones in the next pass.
    `weighted` says that layers which take weights of edges are given some.
    """
    out: list[ModelStage] = []
    for index, stage in enumerate(stages):
        halves = None if stage.conv is None else stated_halves(stage.conv, takes_apart)
        if halves is None:
            out.append(stage)
        elif halves.narrow_first is not None and (index > 0 or narrows_first):
            out += _narrow_first(stage, halves, halves.narrow_first, weighted)
        else:
            out.append(_sums_first(stage, halves, halves.combine, halves.takes_own, weighted))
    for stage in out:
        stage.look()
    return out


def stated_halves(conv: nn.Module, takes_apart: bool) -> Halves | None:
    """What a graph layer of ours says of itself, or with `takes_apart` what is known of PyG's; None: it is called."""
    if isinstance(conv, GraphLayer):
        return _stated(conv)
    return pyg_halves(conv) if takes_apart else None


def _stated(conv: GraphLayer) -> Halves | None:
    """What a layer says of itself, unless that is not about the `forward` it has: of a subclass, or with hooks."""
    if has_hooks(conv):
        return None
    kinds = type(conv).__mro__
    said, runs = (next(kind for kind in kinds if name in vars(kind)) for name in ("halves", "forward"))
    halves = conv.halves() if said is runs else None
    if halves is not None and halves.narrow_first is not None:
        order = halves.narrow_first
        dense = [each for each in (order.transform, order.combine, order.add_own, order.finish) if each is not None]
        used = {id(p) for each in dense for p in each.uses()}
        unsaid = [name for name, p in conv.named_parameters() if p.requires_grad and id(p) not in used]
        if unsaid:
            raise ValueError(
                f"{type(conv).__name__}.halves(): no Dense of narrow_first says that it uses {', '.join(unsaid)}, "
                "which would get no gradient: name them in `uses`"
            )
    return halves


def _sums_first(
    stage: ModelStage, halves: Halves, combine: Callable[[Tensor, Tensor], Tensor], takes_own: bool, weighted: bool
) -> SumStage:
    return SumStage(
        stage.conv, stage.then, stage.norm, stage.keep_as, stage.number, stage.in_place, kind=halves.reduce,
        combine=combine, takes_own=takes_own, weighted=weighted and halves.takes_weight,
    )  # fmt: skip


def _narrow_first(stage: ModelStage, halves: Halves, order: NarrowFirst, weighted: bool) -> list[ModelStage]:
    """Two stages: the dense half, whose rows travel, and the sums with what is left."""
    first = ModelStage(then=[_DenseRows(order.transform)], keep_as=stage.keep_as, number=stage.number)
    then: list[nn.Module] = []
    if order.add_own is not None:
        name = f"rows of stage {stage.number}"
        first.keep_as = [*stage.keep_as, name]
        then.append(_DenseJoin(name, order.add_own))
    if order.finish is not None:
        then.append(_DenseRows(order.finish))
    last = _sums_first(
        replace(stage, then=[*then, *stage.then], keep_as=[]), halves, lambda sums, own: order.combine.work(sums),
        False, weighted,
    )  # fmt: skip
    last.uses = order.combine.uses
    return [first, last]


def _used(dense: Dense) -> Iterator[Any]:
    """The parameters, or what stands in their place: tensors of `torch.func.functional_call`."""
    yield from (p for p in dense.uses() if p is not None)


class _DenseRows(nn.Module):
    """A dense function of rows, as a module that has the parameters it uses, which are those of a layer."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self._dense = dense

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from _used(self._dense)

    def forward(self, rows: Tensor) -> Tensor:
        return self._dense.work(rows)


class _DenseJoin(JoinKept):
    """The same of rows and of those at a mark."""

    def __init__(self, name: str, dense: Dense) -> None:
        super().__init__(name)
        self._dense = dense

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from _used(self._dense)

    def forward(self, rows: Tensor, kept: Tensor) -> Tensor:
        return self._dense.work(rows, kept)
