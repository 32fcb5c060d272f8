"""What a layer says of itself to whoever computes it in two halves, a dense one and sums over in-edges.

Full-graph training does so: sums are made where rows lie, and where the dense half makes rows narrower it goes first,
so that narrow rows travel. A layer states its halves by `GraphLayer.halves`; one that states none is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

REDUCTIONS = ("sum", "mean", "gcn")


class RowWeights(NamedTuple):
    """What a layer that multiplies rows first multiplies them by: those of sources by `src`, and destinations' own by
    `own` as well, where it has such a weight."""

    src: Tensor
    own: Tensor | None = None

    @property
    def all(self) -> list[Tensor]:
        return [self.src] if self.own is None else [self.src, self.own]


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense function of rows, and which parameters it uses; both read the layer when they are called.

    `uses` may name None for a parameter that the layer does not have.
    """

    work: Callable[..., Tensor]
    uses: Callable[[], Sequence[Tensor | None]] = list


@dataclass(frozen=True, eq=False, kw_only=True)
class NarrowFirst:
    """The order with the dense half before the sums: finish(add_own(combine(sums of transform(rows)), own rows))."""

    transform: Dense  # (rows) -> narrower rows
    combine: Dense  # (sums) -> rows
    add_own: Dense | None = None  # (rows, the nodes' own rows before `transform`) -> rows
    finish: Dense | None = None  # (rows) -> rows


@dataclass(frozen=True, eq=False, kw_only=True)
class Halves:
    """A layer as `combine(sums, own)` of its nodes' sums over in-edges and of their own rows.

    `reduce` is how sums are made: "sum", "mean" (by in-degree) or "gcn" (one self loop each, D^-1/2 on both sides).
    `takes_weight`: weights of edges count in them, where there are some. `narrow_first` is the other order, where that
    makes rows narrower.
    """

    reduce: str
    combine: Callable[[Tensor, Tensor], Tensor]
    takes_own: bool = False
    takes_weight: bool = False
    narrow_first: NarrowFirst | None = None

    def __post_init__(self) -> None:
        if self.reduce not in REDUCTIONS:
            raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {self.reduce!r}: state no halves")
