"""What an epoch of full-graph training does by each rewriting rule of its first layer: the whole graph is one batch.

    (AH)W on the GPU, A(HW) on the GPU     the two orders; gnnsys takes the cheaper one, DAHA's baseline the first
    pre-transform, pre-aggregate           as for batches (DAHA, section 3.2.2)
    hoist                                  AH once for all epochs, as H is constant; each epoch begins with (AH)W

Where H lies decides as much. `KEPT`: on the device, once for all. `COPIED`: it goes up every epoch with A, and stays
until the epoch's end; DAHA measured this. `STREAMED`: the device has no room for it, so where the backward pass needs H
or AH it crosses the bus again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnsys.planning.execution.model_shape import AGGREGATE, KINDS, TRANSFORM, LayerSize, ModelShape
from gnnsys.planning.execution.operation_list import FLOAT, After, OperationList
from gnnsys.planning.scheduling.operations import CORES, DOWN, GPU, UP, OperatorCosts, PlanGraph

AGGREGATE_FIRST, TRANSFORM_FIRST, HOIST = "(AH)W on the GPU", "A(HW) on the GPU", "hoist"
KEPT, COPIED, STREAMED = "rows stay on the device", "rows are copied every epoch", "rows are streamed"
EPOCH_RULES = {
    KEPT: (AGGREGATE_FIRST, TRANSFORM_FIRST, HOIST),
    COPIED: (AGGREGATE_FIRST, TRANSFORM_FIRST, TRANSFORM, AGGREGATE, HOIST),
    STREAMED: (AGGREGATE_FIRST, TRANSFORM_FIRST, TRANSFORM, AGGREGATE, HOIST),
}
PAPER_RULES = (AGGREGATE_FIRST, TRANSFORM, AGGREGATE)  # what DAHA chooses among, with rows that are copied
_ID = 4  # bytes of an edge's end, and of a count


@dataclass(frozen=True)
class EpochPlan:
    """`once` are seconds before the first epoch."""

    rule: str
    rows: str
    graph: PlanGraph
    once: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.rows}"


def plan_epoch(
    costs: OperatorCosts, model: ModelShape, size: LayerSize, rule: str, rows: str, *, trains: bool = True
) -> EpochPlan:
    """One epoch, or one forward pass. ValueError where the rule is not legal for the model."""
    if rule not in EPOCH_RULES.get(rows, ()):
        raise ValueError(f"there is no rule {rule!r} where {rows!r}")
    if (why := why_not_epoch(model, rule)) is not None:
        raise ValueError(f"{rule} of {model.kind}: {why}")
    made = _Epoch(costs, model, size, rows, trains)
    {
        AGGREGATE_FIRST: made.aggregate_first,
        TRANSFORM_FIRST: made.transform_first,
        TRANSFORM: made.pre_transform,
        AGGREGATE: made.pre_aggregate,
        HOIST: made.hoist,
    }[rule]()
    return EpochPlan(rule, rows, PlanGraph(made.operations), made.once)


def why_not_epoch(model: ModelShape, rule: str) -> str | None:
    """Why a rule is not legal; None where it is."""
    if rule in (TRANSFORM_FIRST, TRANSFORM) and KINDS[model.kind].has_mlp:
        return "an MLP follows its sums, so they come first"
    if rule == TRANSFORM_FIRST:
        return None
    if rule == AGGREGATE_FIRST:
        return KINDS[model.kind].why_not_linear
    return model.why_not(AGGREGATE if rule == HOIST else rule)


class _Epoch(OperationList):
    """The operations of one epoch. Layers above the first, forward and backward, are one stretch on the device."""

    def __init__(self, costs: OperatorCosts, model: ModelShape, size: LayerSize, rows: str, trains: bool) -> None:
        super().__init__(costs, model.widths[1], trains=trains)
        self._model, self._size, self._rows = model, size, rows
        self._kind, (self._features, self._width) = KINDS[model.kind], model.widths[:2]
        self._count, self._edges = size.sources, size.summed_edges(self._kind)
        self.once = 0.0

    def aggregate_first(self) -> None:
        step = self._sums(self._features, self._rows_up())
        step = self._upper(self._products(step))
        if self._trains and self._rows == STREAMED:
            step = self._sums(self._features, self._up(step))
        self._finish(self._weights_gradient(step))

    def transform_first(self) -> None:
        step = self._products(self._rows_up())
        step = self._upper(self._sums(self._width, step))
        if self._trains:
            step = self._sums(self._width, step)
            step = self._up(step) if self._rows == STREAMED else step
        self._finish(self._weights_gradient(step))

    def pre_aggregate(self) -> None:
        self._of_sums(self._sums(self._features, (), on="host"))

    def hoist(self) -> None:
        on = "device" if self._rows == KEPT else "host"
        once = OperationList(self._costs, self._width)
        once.sums(self._edges, self._count, self._features, (), sources=self._count, on=on)
        self.once = sum(one.seconds for one in once.operations)
        self._of_sums(())

    def _of_sums(self, after: After) -> None:
        """(AH)W with AH where H would be."""
        step = after if self._rows == KEPT else self._up(after)
        step = self._upper(self._products(step))
        step = self._up(step) if self._trains and self._rows == STREAMED else step
        self._finish(self._weights_gradient(step))

    def pre_transform(self) -> None:
        """HW on the cores while A goes up; gradients of HW come back, as the gradient of W needs H."""
        weights = self._kind.products * FLOAT * self._features * self._width
        rows_bytes = self._kind.products * FLOAT * self._count * self._width
        here = self.add("copy/down", DOWN, (), bytes=weights)
        structure = self._structure_up()
        for _ in range(self._kind.products):
            here = self.add(
                "product/host", CORES, here, rows=self._count, inner=self._features, width=self._width
            )  # fmt: skip
        step = (*self.add("copy/up", UP, here, bytes=rows_bytes), *structure)
        step = self._upper(self._sums(self._width, step))
        if self._trains:
            step = self._sums(self._width, step)
            step = self.add("copy/down", DOWN, step, bytes=rows_bytes)
            for _ in range(self._kind.products):
                step = self.add(
                    "backward/host", CORES, step, rows=self._count, inner=self._features, width=self._width,
                    input_gradient=0,
                )  # fmt: skip
            step = self.add("copy/up", UP, step, bytes=weights)
        self._finish(step)

    def _structure_up(self) -> After:
        """A, where it goes up with H; otherwise it lies on the device."""
        if self._rows != COPIED:
            return ()
        return self.add("copy/up", UP, (), bytes=_ID * (self._size.edges + self._count))

    def _rows_up(self) -> After:
        structure = self._structure_up()
        return structure if self._rows == KEPT else self._up(structure)

    def _up(self, after: After) -> After:
        """H, or what is as large."""
        return self.add("copy/up", UP, after, bytes=FLOAT * self._count * self._features)

    def _sums(self, width: int, after: After, on: str = "device") -> After:
        return self.sums(self._edges, self._count, width, after, sources=self._count, on=on)

    def _products(self, after: After) -> After:
        return self.products(self._kind, self._count, self._features, self._width, after=after)

    def _weights_gradient(self, after: After) -> After:
        if not self._trains:
            return after
        return self.gradients(
            self._kind, self._count, self._features, self._width, after=after, of_inputs=False
        )  # fmt: skip

    def _upper(self, after: After) -> After:
        return self.upper_layers(self._model, [self._size] * self._model.num_layers, after)

    def _finish(self, after: After) -> None:
        if self._trains:
            self.add("optimizer/device", GPU, after, parameters=self._model.num_parameters)
