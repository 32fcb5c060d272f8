"""A whole pass as one operation for autograd: forward runs the bins, backward runs them in reverse."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.fullgraph.run.backward import Backward
from gnnsys.fullgraph.run.constant_sums import ConstantSums
from gnnsys.fullgraph.run.forward import Forward
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.fullgraph.run.pass_times import Times
from gnnsys.ops import gather_rows


@dataclass(eq=False)
class PlacedRows:
    """Features by place, and behind them, where some layer asked for it, the halo; and sums of them."""

    rows: Tensor
    has_halo: bool
    sums: ConstantSums


class KnownFeatures(NamedTuple):
    """Features that need no gradient: the user's tensor, and its rows by the device that they live on."""

    x: Any
    version: tuple[int, int, torch.dtype]
    layers_version: int
    placed: dict[torch.device, PlacedRows]


class PassRunner:
    """Runs the passes of one model, one at a time; `train_exchange` makes the exchange of those that train."""

    def __init__(
        self, halo: HaloPlan, train_exchange: Callable[[Pass], Exchange], output_device: torch.device | None = None
    ) -> None:
        self.halo, self.train_exchange, self.output_device = halo, train_exchange, output_device
        self.times = Times()  # of the last pass
        self.known: KnownFeatures | None = None  # features whose halo is here
        self._failure = ""  # what ended a pass in the middle

    def run(self, state: Pass, x: Tensor, parameters: Sequence[Tensor], trains: bool, layers_version: int) -> Tensor:
        """Rows of this rank's nodes. `trains`: the model does; `layers_version` goes up when its layers change."""
        out: Tensor = _WholePass.apply(self, state, trains, layers_version, x, *parameters)
        return out

    def knows(self, x: Tensor, layers_version: int) -> bool:
        """Whether x was given before, and is still what it was."""
        if self.known is not None and self.known.layers_version != layers_version:
            self.known = None
        return self.known is not None and self.known.x() is x and self.known.version == _version(x)

    def check(self) -> None:
        """Raises RuntimeError where an earlier pass failed in the middle."""
        if self._failure:
            raise RuntimeError(
                f"an earlier pass failed ({self._failure}) and left messages under way between the ranks: start again "
                "from the last checkpoint"
            )

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Remembers what a pass failed of: its messages would be met by another pass."""
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def input(self, x: Tensor, state: Pass, layers_version: int) -> tuple[Tensor, bool]:
        """The first step's input by place, with room for the halo, and whether the halo is there already."""
        device, has_halo = state.plan.rows_device, state.plan.steps[0].has_halo
        num_rows = self.halo.num_local if has_halo else self.halo.num_core
        if not state.is_known:
            version = _version(x)
            self.known = None if version is None else KnownFeatures(weakref.ref(x), version, layers_version, {})
        placed = None if self.known is None else self.known.placed.get(device)
        if placed is not None and (placed.has_halo or not has_halo):
            return placed.rows[:num_rows], True
        rows = state.host_rows((num_rows, x.shape[1]), x.dtype, device)
        own, order = rows[: self.halo.num_core], self.halo.order_on(x.device)
        if x.device == device:
            torch.index_select(x.detach(), 0, order, out=own)
        else:
            own.copy_(x.detach()[order])
        if self.known is not None:
            sums = ConstantSums(self.halo.num_core) if placed is None else placed.sums
            self.known.placed[device] = PlacedRows(rows, has_halo, sums)
        return rows.requires_grad_(x.requires_grad), not has_halo

    def constant(self, state: Pass) -> ConstantSums | None:
        """Sums of the first step's input, where it never changes and they are kept."""
        placed = None if self.known is None else self.known.placed.get(state.plan.rows_device)
        return placed.sums.begin() if placed is not None and state.keeps_sums else None

    def drop(self, *, sums: bool, devices: Collection[torch.device]) -> None:
        """Gives back rows on other devices than these, and with `sums` those of the others."""
        if self.known is None:
            return
        for device, placed in list(self.known.placed.items()):
            if device not in devices:
                del self.known.placed[device]
            elif sums:
                placed.sums = ConstantSums(self.halo.num_core)

    def recover(self) -> None:
        """Goes on behind a pass that failed; alone, where no messages are under way."""
        assert self.halo.world_size == 1
        self._failure = ""


def _version(x: Tensor) -> tuple[int, int, torch.dtype] | None:
    """What tells that a tensor is still what it was, None where nothing does.

    Writes that torch does not count, through `x.data` and numpy, leave no trace.
    """
    return None if x.requires_grad or x.is_inference() else (x._version, x.data_ptr(), x.dtype)


def _result(state: Pass, rows: Tensor, halo: HaloPlan, device: torch.device) -> Tensor:
    """Rows by place in the order of the nodes, on a device."""
    if rows.device == device:
        return _ordered(state, rows, halo.places_on(device))
    # Put in order where that is faster. To the host nothing is there before it was waited for.
    return rows.to(device, non_blocking=device.type != "cpu")[halo.places_on(device)]


def _by_place(state: Pass, grad: Tensor, halo: HaloPlan, device: torch.device) -> Tensor:
    """The gradient of a result by place, where rows live."""
    grad = _ordered(state, grad, halo.order_on(grad.device))
    return grad if grad.device == device else state.host_rows(tuple(grad.shape), grad.dtype, device).copy_(grad)


def _ordered(state: Pass, rows: Tensor, index: Tensor) -> Tensor:
    """Rows at the index, where bins move in memory that copies go from directly."""
    if rows.device.type != "cpu":
        return rows[index]
    out = state.host_rows((index.numel(), rows.shape[1]), rows.dtype, rows.device)
    return gather_rows(rows.contiguous(), index, out=out)


def _timed(state: Pass, *, is_back: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if state.clock is None else state.clock.running(is_back=is_back)


class _WholePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, runner: PassRunner, state: Pass, trains: bool, layers_version: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        with _timed(state, is_back=False):
            return _WholePass._forward(ctx, runner, state, trains, layers_version, x, parameters)

    @staticmethod
    def _forward(
        ctx: Any, runner: PassRunner, state: Pass, trains: bool, layers_version: int, x: Tensor,
        parameters: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        rows, is_here = runner.input(x, state, layers_version)
        state.constant = runner.constant(state)
        state.wants_grad = state.wants_grad and any(t.requires_grad for t in (x, *parameters))
        ctx.runner, ctx.state, ctx.parameters, ctx.is_done = runner, state, parameters, False
        ctx.exchange = runner.train_exchange(state) if trains and state.wants_grad else Exchange(state)
        with torch.set_grad_enabled(state.wants_grad), runner.failing():
            out = Forward(state, ctx.exchange).run(rows, is_here)
        runner.times = state.times
        ctx.rows_device, ctx.x_device = out.device, x.device
        return _result(state, out.detach(), runner.halo, runner.output_device or x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.is_done:
            raise RuntimeError("a pass over the graph is differentiated once, and nothing of it is kept: run it again")
        ctx.is_done = True
        state, exchange, halo = ctx.state, ctx.exchange, ctx.runner.halo
        ctx.state = ctx.exchange = None
        with ctx.runner.failing(), _timed(state, is_back=True):
            x_grad, found = Backward(state, exchange).run(_by_place(state, grads[0], halo, ctx.rows_device))
            if x_grad is not None:
                x_grad = x_grad[halo.places_on(x_grad.device)].to(ctx.x_device)
        return None, None, None, None, x_grad, *(found.get(id(p)) for p in ctx.parameters)
