"""What a batch does by each rewriting rule of its first layer (DAHA, section 3.2.2), and who samples it.

    pure GPU        rows arrive on the device; A and W are applied there
    pre-transform   HW on the cores, A(HW) on the device. The gradient of W needs H, so it is made on the cores too
    pre-aggregate   AH on the cores, (AH)W on the device. Needs no weights: any number of batches ahead
    split           rows that the device's cache lacks are summed on the cores, the cached ones on the device

All but the first are legal where the reduction is linear and rows are constant. Seconds come from `OperatorCosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gnnsys.planning.scheduling.operations import CORES, DOWN, GPU, UP, Operation, OperatorCosts, PlanGraph

PURE, TRANSFORM, AGGREGATE, SPLIT = "pure GPU", "pre-transform", "pre-aggregate", "split"
RULES = (PURE, TRANSFORM, AGGREGATE, SPLIT)
SAMPLING = {"host": CORES, "pinned": UP, "device": GPU}
ROWS = {"host": "gathered by the host", "bus": "over the bus", "cached": "from the cache", "device": "on the device"}
FLOAT = 4  # bytes
EDGE_BYTES, NODE_BYTES = 8, 8  # of sampled structure: an id each
_CALLS_PER_LAYER = 6  # kernels beside products and sums: bias, activation, dropout and their gradients
_CALLS_PER_STEP = 8  # loss and its gradient


@dataclass(frozen=True)
class LayerKind:
    """`products` by weights: of the sums, and of own rows. `own_rows`: a destination's own row is not in its sum;
    `self_edges`: it is, by one more edge. `has_mlp`: an MLP of one hidden layer follows the sums, so they come first.
    `why_not_linear` is None where the reduction is."""

    products: int = 1
    own_rows: bool = False
    self_edges: bool = False
    has_mlp: bool = False
    why_not_linear: str | None = None


KINDS = {
    "sage": LayerKind(products=2, own_rows=True),
    "gcn": LayerKind(self_edges=True),
    "gin": LayerKind(own_rows=True, has_mlp=True),
    "gat": LayerKind(why_not_linear="attention weighs rows by weights that train"),
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
        if rule == TRANSFORM and kind.has_mlp:
            return "an MLP follows its sums, so they come first"
        return kind.why_not_linear


@dataclass(frozen=True)
class LayerSize:
    """A layer's bipartite graph in one batch."""

    sources: float
    destinations: float
    edges: float


@dataclass(frozen=True)
class BatchSizes:
    """`layers`, the first one first; `sampled_edges`, each once. A device cache has `hit_rate` of the input rows and
    `edge_hit_rate` of the first layer's edges, which is more where rows are cached that many edges begin at."""

    layers: tuple[LayerSize, ...]
    sampled_edges: float
    hit_rate: float = 0.0
    edge_hit_rate: float | None = None

    @classmethod
    def of_hops(cls, nodes: Sequence[float], edges: Sequence[float], hit_rate: float = 0.0) -> BatchSizes:
        """From new nodes per hop, seeds first, and edges per hop, as a batch's `num_sampled_nodes` and `..._edges`.

        >>> BatchSizes.of_hops([10, 40, 90], [50, 200]).layers[0]
        LayerSize(sources=140, destinations=50, edges=250)
        """
        known, drawn = list(accumulate(nodes)), list(accumulate(edges))
        if len(known) != len(drawn) + 1:
            raise ValueError(f"there are nodes of every hop and the seeds: {len(known)} counts and {len(drawn)} hops")
        hops = range(len(drawn) - 1, -1, -1)
        layers = tuple(LayerSize(known[hop + 1], known[hop], drawn[hop]) for hop in hops)
        return cls(layers, drawn[-1], hit_rate)

    @property
    def edge_hits(self) -> float:
        return self.hit_rate if self.edge_hit_rate is None else self.edge_hit_rate

    @property
    def structure_bytes(self) -> float:
        return EDGE_BYTES * self.sampled_edges + NODE_BYTES * self.layers[0].sources


@dataclass(frozen=True)
class BatchRule:
    """How a batch is made: the first layer's `rule`, who samples, and by which way rows reach the device."""

    rule: str
    sampling: str
    rows: str

    def __post_init__(self) -> None:
        if self.rule not in RULES or self.sampling not in SAMPLING or self.rows not in ROWS:
            raise ValueError(f"no such rule: {self}")
        if self.rule == SPLIT and self.rows != "cached":
            raise ValueError("split sums the rows that a cache lacks: rows='cached'")
        if self.rule in (TRANSFORM, AGGREGATE) and self.rows != "host":
            raise ValueError(f"{self.rule} reads rows in host memory: rows='host'")

    @property
    def name(self) -> str:
        by = {"host": "sampled by the host", "pinned": "sampled over the bus", "device": "sampled on the device"}
        rows = f", rows {ROWS[self.rows]}" if self.rule == PURE else ""
        return f"{self.rule}{rows}, {by[self.sampling]}"


def plan_batch(costs: OperatorCosts, model: ModelShape, batch: BatchSizes, how: BatchRule) -> PlanGraph:
    """The operations of one batch of training. ValueError where the rule is not legal for the model."""
    if len(batch.layers) != model.num_layers:
        raise ValueError(f"the model has {model.num_layers} layers, a batch {len(batch.layers)}")
    if (why := model.why_not(how.rule)) is not None:
        raise ValueError(f"{how.rule} of {model.kind}: {why}")
    made = _Operations(costs, model.widths[1])
    sampled = _sample(made, batch, how.sampling)
    first, kind = batch.layers[0], KINDS[model.kind]
    features, width = model.widths[0], model.widths[1]
    if how.rule == TRANSFORM:
        _pre_transform(made, kind, model, batch, sampled, is_host_sample=how.sampling == "host")
        return PlanGraph(made.operations)
    if how.rule == PURE:
        arrived = _rows(made, batch, FLOAT * features, how.rows, sampled)
        step = made.layer(kind, first, features, width, after=arrived, is_first=True)
    else:
        arrived = _sums(made, kind, batch, features, how, sampled)
        step = made.products(kind, first.destinations, features, width, after=arrived, needs_weights=True)
        step = made.gradients(kind, first.destinations, features, width, after=step, of_inputs=False)
    step = _upper_layers(made, model, batch, step)
    made.add("optimizer/device", GPU, step, parameters=model.num_parameters)
    return PlanGraph(made.operations)


After = tuple[int, ...]


class _Operations:
    """Operations as they are added; what has no work is left out, and passes on what it would have waited for."""

    def __init__(self, costs: OperatorCosts, hidden: int) -> None:
        self._costs, self._hidden, self.operations = costs, hidden, list[Operation]()

    def add(self, operator: str, resource: str, after: After, *, needs_weights: bool = False, **sizes: float) -> After:
        if any(size == 0 for name, size in sizes.items() if name not in ("hit_rate", "input_gradient")):
            return after
        seconds = self._costs.seconds(operator, **sizes)
        self.operations.append(Operation(operator, resource, seconds, tuple(sorted(set(after))), needs_weights))
        return (len(self.operations) - 1,)

    def products(
        self, kind: LayerKind, rows: float, inner: int, width: int, *, after: After, needs_weights: bool = False,
        transformed: float | None = None,
    ) -> After:  # fmt: skip
        """By all weights of a layer on the device: of `rows` destinations, by one of them of `transformed` rows."""
        outer = self._hidden if kind.has_mlp else width
        counts = [rows if transformed is None else transformed] + [rows] * (kind.products - 1)
        for number, count in enumerate(counts):
            first = needs_weights and number == 0
            after = self.add(
                "product/device", GPU, after, needs_weights=first, rows=count, inner=inner, width=outer
            )  # fmt: skip
        if kind.has_mlp:
            after = self.add("product/device", GPU, after, rows=rows, inner=outer, width=width)
        return after

    def gradients(
        self, kind: LayerKind, rows: float, inner: int, width: int, *, after: After, of_inputs: bool,
        transformed: float | None = None,
    ) -> After:  # fmt: skip
        """Of the weights of the products above, and of what they were applied to."""
        outer = self._hidden if kind.has_mlp else width
        if kind.has_mlp:
            after = self._gradient(rows, outer, width, True, after)
        for count in [rows if transformed is None else transformed] + [rows] * (kind.products - 1):
            after = self._gradient(count, inner, outer, of_inputs, after)
        return after

    def _gradient(self, rows: float, inner: int, width: int, of_inputs: bool, after: After) -> After:
        return self.add(
            "backward/device", GPU, after, rows=rows, inner=inner, width=width, input_gradient=int(of_inputs)
        )

    def layer(
        self, kind: LayerKind, size: LayerSize, inner: int, width: int, *, after: After, is_first: bool = False
    ) -> After:
        """A layer on the device, forward and backward, in the order that takes less."""
        best: _Operations | None = None
        orders = (True,) if kind.why_not_linear is not None else (False,) if kind.has_mlp else (False, True)
        for transform_first in orders:
            trial = _Operations(self._costs, self._hidden)
            trial.operations = list(self.operations)
            trial._layer(kind, size, inner, width, after, transform_first=transform_first, is_first=is_first)
            if best is None or trial._total() < best._total():
                best = trial
        assert best is not None
        self.operations = best.operations
        return (len(self.operations) - 1,)

    def _layer(
        self, kind: LayerKind, size: LayerSize, inner: int, width: int, after: After, *, transform_first: bool,
        is_first: bool,
    ) -> None:  # fmt: skip
        edges, rows = _edges(kind, size), size.destinations
        transformed = size.sources if transform_first else None
        if not transform_first:
            after = self.sums(edges, rows, inner, after)
        after = self.products(kind, rows, inner, width, after=after, needs_weights=is_first, transformed=transformed)
        if transform_first:
            after = self.sums(edges, rows, width, after)
            after = self.sums(edges, size.sources, width, after)  # the gradient of what was summed
        after = self.gradients(
            kind, rows, inner, width, after=after, of_inputs=not is_first, transformed=transformed
        )  # fmt: skip
        if not transform_first and not is_first:
            self.sums(edges, size.sources, inner, after)

    def _total(self) -> float:
        return sum(one.seconds for one in self.operations)

    def sums(self, edges: float, destinations: float, width: int, after: After, on: str = "device") -> After:
        resource = GPU if on == "device" else CORES
        return self.add(
            f"spmm/{on}", resource, after, edges=edges, destinations=destinations, width=width, itemsize=FLOAT
        )


def _edges(kind: LayerKind, size: LayerSize) -> float:
    return size.edges + (size.destinations if kind.self_edges else 0)


def _sample(made: _Operations, batch: BatchSizes, sampling: str) -> After:
    """Structure, where it was sampled."""
    edges, nodes, hops = batch.sampled_edges, batch.layers[0].sources, len(batch.layers)
    return made.add(f"sample/{sampling}", SAMPLING[sampling], (), edges=edges, nodes=nodes, hops=hops)


def _structure_up(made: _Operations, batch: BatchSizes, sampled: After) -> After:
    """What the host has sampled, made blocks of on the device."""
    arrived = made.add("copy/up", UP, sampled, bytes=batch.structure_bytes)
    return made.add("compact/device", GPU, arrived, nodes=batch.layers[0].sources, edges=batch.sampled_edges)


def _structure_there(made: _Operations, batch: BatchSizes, sampled: After) -> After:
    is_host = made.operations[sampled[0]].operator == "sample/host"
    return _structure_up(made, batch, sampled) if is_host else sampled


def _structure_down(made: _Operations, batch: BatchSizes, sampled: After) -> After:
    """The first layer's edges and the ids of their rows, on the host."""
    if made.operations[sampled[0]].operator == "sample/host":
        return sampled
    first = batch.layers[0]
    return made.add("copy/down", DOWN, sampled, bytes=EDGE_BYTES * first.edges + NODE_BYTES * first.destinations)


def _rows(made: _Operations, batch: BatchSizes, row_bytes: int, rows: str, sampled: After) -> After:
    """All input rows on the device, and structure."""
    count = batch.layers[0].sources
    there = _structure_there(made, batch, sampled)
    if rows == "device":
        return made.add("gather/device", GPU, there, rows=count, row_bytes=row_bytes)
    if rows == "bus":
        return made.add("gather/bus", UP, there, rows=count, row_bytes=row_bytes)
    if rows == "cached":
        resource = UP if batch.hit_rate < 1 else GPU
        return made.add("gather/cached", resource, there, rows=count, row_bytes=row_bytes, hit_rate=batch.hit_rate)
    gathered = made.add("gather/host", CORES, _ids_down(made, batch, sampled), rows=count, row_bytes=row_bytes)
    return (*made.add("copy/up", UP, gathered, bytes=count * row_bytes), *there)


def _ids_down(made: _Operations, batch: BatchSizes, sampled: After) -> After:
    if made.operations[sampled[0]].operator == "sample/host":
        return sampled
    return made.add("copy/down", DOWN, sampled, bytes=NODE_BYTES * batch.layers[0].sources)


def _sums(
    made: _Operations, kind: LayerKind, batch: BatchSizes, features: int, how: BatchRule, sampled: After
) -> After:
    """The first layer's sums on the device, and the destinations' own rows: all of them from the host, or the part that
    the cache lacks."""
    first, row_bytes = batch.layers[0], FLOAT * features
    missing = 1 - batch.edge_hits if how.rule == SPLIT else 1.0
    edges = missing * _edges(kind, first)
    degree = _edges(kind, first) / max(1.0, first.destinations)
    summed = first.destinations * (1 - (1 - missing) ** degree)  # those with an edge that is missing
    own = first.destinations * (1 - batch.hit_rate if how.rule == SPLIT else 1.0) if kind.own_rows else 0.0
    at_host = _structure_down(made, batch, sampled)
    at_host = made.sums(edges, summed, features, at_host, on="host")
    at_host = made.add("gather/host", CORES, at_host, rows=own, row_bytes=row_bytes)
    arrived = made.add("copy/up", UP, at_host, bytes=(summed + own) * row_bytes)
    there = _structure_there(made, batch, sampled)
    if how.rule == SPLIT:
        hits = batch.hit_rate * first.sources
        there = made.add("gather/device", GPU, there, rows=hits, row_bytes=row_bytes)
        there = made.sums(batch.edge_hits * _edges(kind, first), first.destinations, features, there)
    return (*arrived, *there)


def _pre_transform(
    made: _Operations, kind: LayerKind, model: ModelShape, batch: BatchSizes, sampled: After, *, is_host_sample: bool
) -> None:
    first, (features, width) = batch.layers[0], model.widths[:2]
    sizes = [first.sources] + [first.destinations] * (kind.products - 1)
    weights = kind.products * FLOAT * features * width
    product_bytes = FLOAT * width * sum(sizes)
    ids = sampled if is_host_sample else _ids_down(made, batch, sampled)
    here = made.add("gather/host", CORES, ids, rows=first.sources, row_bytes=FLOAT * features)
    have_weights = made.add("copy/down", DOWN, (), needs_weights=True, bytes=weights)
    here = (*here, *have_weights)
    for rows in sizes:
        here = made.add("product/host", CORES, here, rows=rows, inner=features, width=width)
    step = (*made.add("copy/up", UP, here, bytes=product_bytes), *_structure_there(made, batch, sampled))
    step = made.sums(_edges(kind, first), first.destinations, width, step)
    step = _upper_layers(made, model, batch, step)
    step = made.sums(_edges(kind, first), first.sources, width, step)  # backward
    back = made.add("copy/down", DOWN, step, bytes=product_bytes)
    for rows in sizes:
        back = made.add("backward/host", CORES, back, rows=rows, inner=features, width=width, input_gradient=0)
    step = made.add("copy/up", UP, back, bytes=weights)
    made.add("optimizer/device", GPU, step, parameters=model.num_parameters)


def _upper_layers(made: _Operations, model: ModelShape, batch: BatchSizes, after: After) -> After:
    """All layers but the first, forward and backward, and what is launched beside products and sums."""
    kind = KINDS[model.kind]
    for size, (inner, width) in zip(batch.layers[1:], pairwise(model.widths[1:]), strict=True):
        after = made.layer(kind, size, inner, width, after=after)
    return made.add("launch/device", GPU, after, calls=_CALLS_PER_LAYER * model.num_layers + _CALLS_PER_STEP)
