"""The operations of layers with their seconds, one after the other: what plans of batches and epochs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gnnsys.planning.execution.model_shape import KINDS, LayerKind, LayerSize, ModelShape
from gnnsys.planning.scheduling.operations import CORES, GPU, Operation, OperatorCosts

FLOAT = 4  # bytes
_CALLS_PER_LAYER = 6  # kernels beside products and sums: bias, activation, dropout and their gradients
_CALLS_PER_STEP = 8  # loss and its gradient
After = tuple[int, ...]


class OperationList:
    """Operations as they are added. What has no work is left out, and passes on what it would have waited for.

    MLPs are `hidden` wide. Layers have a backward pass where the model `trains`.
    """

    def __init__(self, costs: OperatorCosts, hidden: int, *, trains: bool = True) -> None:
        self._costs, self._hidden, self._trains = costs, hidden, trains
        self.operations: list[Operation] = []

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
        best: OperationList | None = None
        orders = (True,) if kind.why_not_linear is not None else (False,) if kind.has_mlp else (False, True)
        for transform_first in orders:
            trial = OperationList(self._costs, self._hidden, trains=self._trains)
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
        edges, rows = size.summed_edges(kind), size.destinations
        transformed = size.sources if transform_first else None
        if not transform_first:
            after = self.sums(edges, rows, inner, after, sources=size.sources)
        after = self.products(kind, rows, inner, width, after=after, needs_weights=is_first, transformed=transformed)
        if transform_first:
            after = self.sums(edges, rows, width, after, sources=size.sources)
        if not self._trains:
            return
        if transform_first:
            after = self.sums(edges, size.sources, width, after, sources=rows)  # the gradient of what was summed
        after = self.gradients(
            kind, rows, inner, width, after=after, of_inputs=not is_first, transformed=transformed
        )  # fmt: skip
        if not transform_first and not is_first:
            self.sums(edges, size.sources, inner, after, sources=rows)

    def _total(self) -> float:
        return sum(one.seconds for one in self.operations)

    def upper_layers(self, model: ModelShape, sizes: Sequence[LayerSize], after: After) -> After:
        """All layers but the first, forward and backward, and what is launched beside products and sums."""
        for size, (inner, width) in zip(sizes[1:], pairwise(model.widths[1:]), strict=True):
            after = self.layer(KINDS[model.kind], size, inner, width, after=after)
        return self.add("launch/device", GPU, after, calls=_CALLS_PER_LAYER * model.num_layers + _CALLS_PER_STEP)

    def sums(
        self, edges: float, destinations: float, width: int, after: After, *, sources: float, on: str = "device"
    ) -> After:
        """Over edges from `sources` rows to `destinations`."""
        resource = GPU if on == "device" else CORES
        return self.add(
            f"spmm/{on}", resource, after, edges=edges, destinations=destinations, width=width, itemsize=FLOAT,
            sources=sources,
        )  # fmt: skip
