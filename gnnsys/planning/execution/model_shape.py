"""A model as a planner sees it: the kind of its layers, their widths, and whether its first layer can be rewritten.

`KINDS` are the layers that are known. Their products and sums are those of the layers in `gnnsys.nn`: a test counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

PURE, TRANSFORM, AGGREGATE, SPLIT = "pure GPU", "pre-transform", "pre-aggregate", "split"


@dataclass(frozen=True)
class LayerKind:
    """`products` by weights: of the sums, and of own rows. `own_rows`: a destination's own row is not in its sum;
    `self_edges`: it is, by one more edge. `has_mlp`: an MLP of one hidden layer follows the sums, so they come first on
    a device; its first product may come before them as well.
    `edge_passes`: how often edges are gone over, once for sums and once for scores. `why_not_linear` is None where the
    reduction is."""

    products: int = 1
    own_rows: bool = False
    self_edges: bool = False
    has_mlp: bool = False
    edge_passes: int = 1
    why_not_linear: str | None = None


KINDS = {
    "sage": LayerKind(products=2, own_rows=True),
    "gcn": LayerKind(self_edges=True),
    "gin": LayerKind(own_rows=True, has_mlp=True),
    "gat": LayerKind(edge_passes=2, why_not_linear="attention weighs rows by weights that train"),
}


@dataclass(frozen=True)
class ModelShape:
    """A model of `kind`, one of `KINDS`; `widths` from features to classes, one more than layers."""

    kind: str
    widths: tuple[int, ...]
    rows_are_constant: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a model is one of {', '.join(KINDS)}, got {self.kind!r}")
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise ValueError(f"widths are of features, hidden layers and classes, got {self.widths}")

    @property
    def num_layers(self) -> int:
        return len(self.widths) - 1

    @property
    def num_parameters(self) -> int:
        kind, hidden = KINDS[self.kind], self.widths[1]
        if kind.has_mlp:
            return sum(a * hidden + hidden + hidden * b + b for a, b in pairwise(self.widths))
        return sum(kind.products * a * b + b for a, b in pairwise(self.widths))

    def why_not(self, rule: str) -> str | None:
        """Why the first layer cannot be rewritten by a rule; None where it can."""
        kind = KINDS[self.kind]
        if rule == PURE:
            return None
        if not self.rows_are_constant:
            return "rows train, so what the host made of them is old after a step"
        return kind.why_not_linear


@dataclass(frozen=True)
class LayerSize:
    """A layer's bipartite graph in one batch."""

    sources: float
    destinations: float
    edges: float

    def summed_edges(self, kind: LayerKind) -> float:
        """With those of nodes to themselves, where the layer has such, and as often as it goes over them."""
        return kind.edge_passes * (self.edges + (self.destinations if kind.self_edges else 0))
