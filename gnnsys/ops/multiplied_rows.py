"""Rows of a batch that stay in host memory: a first layer that multiplies them asks for the products.

What moves to the device are products, in the forward pass, and what comes back are their gradients: with wide rows and
narrow layers a small part of the rows' bytes. The gradient of the weights is made of these and the rows, on the host,
and lands where autograd puts every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnsys.ops.copies_together import to_host_together
from gnnsys.ops.host_products import HostMultiplier
from gnnsys.ops.late_rows import LateRows


class MadeAhead(Protocol):
    """Products that were begun before a layer asked for them."""

    def take(self, weights: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor] | None:
        """On the host, and once; None where they are of other weights, or of weights that are too old."""
        ...


class RowsOnHost:
    """The rows of one batch: `ids` [num_rows], on the host, of a multiplier's table.

    `check()` raises where the table was written since. `ahead` may have products already.
    """

    def __init__(self, multiplier: HostMultiplier, ids: Tensor, check: Callable[[], None]) -> None:
        self.multiplier, self.ids, self._check = multiplier, ids, check
        self.ahead: MadeAhead | None = None
        self.is_multiplied = False

    def products(self, weights: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """The first `counts[i]` rows times `weights[i].T`, where the weights are."""
        self._check()
        device = weights[0].device
        made = None if self.ahead is None else self.ahead.take(weights, counts)
        if made is None:
            made = self.make([weight.detach() for weight in weights], counts)
        self.is_multiplied = True
        return tuple(product.to(device, non_blocking=True) for product in made)

    def make(self, weights: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """The same, left on the host."""
        self._check()
        here = to_host_together(weights)
        return self.multiplier.products(self.ids, here, counts, pin=not weights[0].is_cpu)

    def gradients(self, grads: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Of the weights, from those of the products, where these are."""
        self._check()
        device = grads[0].device
        here = to_host_together([grad.detach() for grad in grads])
        found = self.multiplier.gradients(self.ids, here, counts, pin=device.type != "cpu")
        return tuple(grad.to(device, non_blocking=True) for grad in found)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: RowsOnHost, counts: Sequence[int], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.counts = rows, counts
        return rows.products(weights, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = [i for i, is_wanted in enumerate(ctx.needs_input_grad[2:]) if is_wanted]
        counts = [ctx.counts[i] for i in wanted]
        found = dict(zip(wanted, _Gradients.apply(ctx.rows, counts, *(grads[i] for i in wanted)), strict=True))
        return (None, None, *(found.get(i) for i in range(len(grads))))


class _Gradients(torch.autograd.Function):
    """What `_Multiply.backward` does: a product too, of gradients, whose own gradient is one of rows again."""

    @staticmethod
    def forward(ctx: Any, rows: RowsOnHost, counts: Sequence[int], *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.counts = rows, counts
        return rows.gradients(grads, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *_Multiply.apply(ctx.rows, ctx.counts, *grads))


class MultipliedRows(LateRows):
    """Rows [num_rows, d] of a batch's nodes on `device`, which are on the host: `host` makes products of them."""

    host: RowsOnHost

    @staticmethod
    def __new__(cls, host: RowsOnHost, device: torch.device, gather: Callable[[], Tensor]) -> MultipliedRows:
        table = host.multiplier.table
        made: MultipliedRows = cls._make((host.ids.numel(), table.shape[1]), table.dtype, device, gather)
        made.host = host
        return made

    def first_rows(self, count: int) -> Tensor:
        """Not read before somebody does something else to them than to multiply all."""
        if self._rows is not None:
            return self._rows[:count]
        first: Tensor = LateRows._make((count, self.size(1)), self.dtype, self.device, lambda: self.rows()[:count])
        return first

    def times(self, weights: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...] | None:
        """The first `counts[i]` rows times `weights[i].T`, differentiable. None where it takes the rows themselves:
        somebody has had them, weights are elsewhere or of another dtype or are cast (autocast), or code is compiled."""
        if torch.compiler.is_compiling():  # the host's work is none of a graph's
            return None
        device, dtype = self.device, self.dtype
        is_like = all(w.device == device and w.dtype == dtype and w.shape[1:] == self.shape[1:] for w in weights)
        if self._rows is not None or not is_like or torch.is_autocast_enabled(device.type):
            return None
        made: tuple[Tensor, ...] = _Multiply.apply(self.host, tuple(counts), *weights)
        return made
