"""What a batch does by each rewriting rule of its first layer (DAHA, section 3.2.2), and who samples it.

    pure GPU        rows arrive on the device; A and W are applied there
    pre-transform   HW on the cores, A(HW) on the device. The gradient of W needs H, so it is made on the cores too
    pre-aggregate   AH on the cores, (AH)W on the device. Needs no weights: any number of batches ahead
    split           rows that the device's cache lacks are summed on the cores, the cached ones on the device

All but the first are legal where the reduction is linear and rows are constant. Seconds come from `OperatorCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gnnsys.ops import whole_table
from gnnsys.planning.execution.model_shape import (
    AGGREGATE,
    KINDS,
    PURE,
    SPLIT,
    TRANSFORM,
    LayerKind,
    LayerSize,
    ModelShape,
)
from gnnsys.planning.execution.operation_list import FLOAT, After, OperationList
from gnnsys.planning.scheduling.operations import CORES, DOWN, GPU, UP, OperatorCosts, PlanGraph

RULES = (PURE, TRANSFORM, AGGREGATE, SPLIT)
SAMPLING = {"host": CORES, "pinned": UP, "device": GPU}
ROWS = {"host": "by the host", "bus": "over the bus", "cached": "from the cache", "device": "on the device"}
_SAMPLED = {"host": "host samples", "pinned": "sampled over the bus", "device": "device samples"}
EDGE_BYTES, NODE_BYTES = 8, 8  # of sampled structure: an id each


@dataclass(frozen=True)
class BatchSizes:
    """`layers`, the first one first; `sampled_edges`, each once. A device cache has `hit_rate` of the input rows and
    `edge_hit_rate` of the first layer's edges, which is more where rows are cached that many edges begin at. The graph
    has `num_nodes`, where that is known."""

    layers: tuple[LayerSize, ...]
    sampled_edges: float
    hit_rate: float = 0.0
    edge_hit_rate: float | None = None
    num_nodes: float | None = None

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
        rows = f", rows {ROWS[self.rows]}" if self.rule == PURE else ""
        return f"{self.rule}{rows}, {_SAMPLED[self.sampling]}"


def plan_batch(costs: OperatorCosts, model: ModelShape, batch: BatchSizes, how: BatchRule) -> PlanGraph:
    """The operations of one batch of training. ValueError where the rule is not legal for the model."""
    if len(batch.layers) != model.num_layers:
        raise ValueError(f"the model has {model.num_layers} layers, a batch {len(batch.layers)}")
    if (why := model.why_not(how.rule)) is not None:
        raise ValueError(f"{how.rule} of {model.kind}: {why}")
    made = OperationList(costs, model.widths[1])
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
    step = made.upper_layers(model, batch.layers, step)
    made.add("optimizer/device", GPU, step, parameters=model.num_parameters)
    return PlanGraph(made.operations)


def _sample(made: OperationList, batch: BatchSizes, sampling: str) -> After:
    """Structure, where it was sampled."""
    edges, nodes, hops = max(1.0, batch.sampled_edges), batch.layers[0].sources, len(batch.layers)
    return made.add(f"sample/{sampling}", SAMPLING[sampling], (), edges=edges, nodes=nodes, hops=hops)


def _structure_up(made: OperationList, batch: BatchSizes, sampled: After) -> After:
    """What the host has sampled, made blocks of on the device."""
    arrived = made.add("copy/up", UP, sampled, bytes=batch.structure_bytes)
    return made.add("compact/device", GPU, arrived, nodes=batch.layers[0].sources, edges=batch.sampled_edges)


def _structure_there(made: OperationList, batch: BatchSizes, sampled: After) -> After:
    is_host = made.operations[sampled[0]].operator == "sample/host"
    return _structure_up(made, batch, sampled) if is_host else sampled


def _structure_down(made: OperationList, batch: BatchSizes, sampled: After) -> After:
    """The first layer's edges and the ids of their rows, on the host."""
    if made.operations[sampled[0]].operator == "sample/host":
        return sampled
    first = batch.layers[0]
    return made.add("copy/down", DOWN, sampled, bytes=EDGE_BYTES * first.edges + NODE_BYTES * first.destinations)


def _rows(made: OperationList, batch: BatchSizes, row_bytes: int, rows: str, sampled: After) -> After:
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


def _ids_down(made: OperationList, batch: BatchSizes, sampled: After) -> After:
    if made.operations[sampled[0]].operator == "sample/host":
        return sampled
    return made.add("copy/down", DOWN, sampled, bytes=NODE_BYTES * batch.layers[0].sources)


def _sums(
    made: OperationList, kind: LayerKind, batch: BatchSizes, features: int, how: BatchRule, sampled: After
) -> After:
    """The first layer's sums on the device, and the destinations' own rows: all of them from the host, or the part that
    the cache lacks."""
    first, row_bytes = batch.layers[0], FLOAT * features
    missing = 1 - batch.edge_hits if how.rule == SPLIT else 1.0
    edges = missing * first.summed_edges(kind)
    degree = first.summed_edges(kind) / max(1.0, first.destinations)
    summed = first.destinations * (1 - (1 - missing) ** degree)  # those with an edge that is missing
    own = first.destinations * (1 - batch.hit_rate if how.rule == SPLIT else 1.0) if kind.own_rows else 0.0
    at_host = _structure_down(made, batch, sampled) if edges + own > 0 else sampled
    at_host = made.sums(edges, summed, features, at_host, sources=max(1.0, missing * first.sources), on="host")
    at_host = made.add("gather/host", CORES, at_host, rows=own, row_bytes=row_bytes)
    arrived = made.add("copy/up", UP, at_host, bytes=(summed + own) * row_bytes)
    there = _structure_there(made, batch, sampled)
    if how.rule == SPLIT:
        hits = batch.hit_rate * first.sources
        there = made.add("gather/device", GPU, there, rows=hits, row_bytes=row_bytes)
        there = made.sums(
            batch.edge_hits * first.summed_edges(kind), first.destinations, features, there, sources=max(1.0, hits)
        )
    return (*arrived, *there)


def _pre_transform(
    made: OperationList, kind: LayerKind, model: ModelShape, batch: BatchSizes, sampled: After, *, is_host_sample: bool
) -> None:
    """Rows are gathered as they are multiplied, a few at a time: for the product, and again for the gradient. Where a
    batch has most of a graph's rows, all of these are multiplied as they lie."""
    first, (features, width) = batch.layers[0], model.widths[:2]
    sizes = [first.sources] + [first.destinations] * (kind.products - 1)
    num_nodes = math.inf if batch.num_nodes is None else batch.num_nodes
    whole = whole_table(sizes, num_nodes)
    multiplied = [num_nodes if i in whole else rows for i, rows in enumerate(sizes)]
    gathered = max((rows for i, rows in enumerate(sizes) if i not in whole), default=0.0)
    weights = kind.products * FLOAT * features * width
    product_bytes, row_bytes = FLOAT * width * sum(sizes), FLOAT * features
    ids = sampled if is_host_sample else _ids_down(made, batch, sampled)
    here = (*ids, *made.add("copy/down", DOWN, (), needs_weights=True, bytes=weights))
    here = made.add("gather/host", CORES, here, rows=gathered, row_bytes=row_bytes)
    for rows in multiplied:
        here = made.add("product/host", CORES, here, rows=rows, inner=features, width=width)
    step = (*made.add("copy/up", UP, here, bytes=product_bytes), *_structure_there(made, batch, sampled))
    step = made.sums(first.summed_edges(kind), first.destinations, width, step, sources=first.sources)
    if kind.has_mlp:  # the rest of it
        step = made.add("product/device", GPU, step, rows=first.destinations, inner=width, width=width)
    step = made.upper_layers(model, batch.layers, step)
    if kind.has_mlp:
        step = made.add(
            "backward/device", GPU, step, rows=first.destinations, inner=width, width=width, input_gradient=1
        )  # fmt: skip
    step = made.sums(first.summed_edges(kind), first.sources, width, step, sources=first.destinations)  # backward
    back = made.add("copy/down", DOWN, step, bytes=product_bytes)
    back = made.add("gather/host", CORES, back, rows=gathered, row_bytes=row_bytes)
    for rows in multiplied:
        back = made.add("backward/host", CORES, back, rows=rows, inner=features, width=width, input_gradient=0)
    step = made.add("copy/up", UP, back, bytes=weights)
    made.add("optimizer/device", GPU, step, parameters=model.num_parameters)
