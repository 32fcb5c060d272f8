"""Native ops that have a gradient, called with as little Python around them as may be.

A gradient that is registered with torch.library can be compiled and exported, and takes several times as long to call
as one of `torch.autograd.Function`: a layer of a small batch would spend more time there than in its op. So each op
has both, of the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.ops._library import native


def differentiable(name: str, backward: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """Registers the gradient of the op `name`; returns what to call the op by.

    `save(ctx, inputs, output)` keeps what `backward(ctx, *grads)` needs, which gives a gradient for each input. It may
    be differentiated again where `backward` calls ops by what this function returned, or `again`: a native op that has
    no gradient of its own would end the graph there, and torch would only warn.
    """
    op = getattr(native, name).default
    torch.library.register_autograd(f"gnnsys::{name}", backward, setup_context=save)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = _without_gradient(op, inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*inputs)
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            return Eager.apply(*inputs)
        return _without_gradient(op, inputs)

    return call


def _without_gradient(op: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


def again(work: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """The gradients of `work(*inputs)`, for a `backward` that runs under `create_graph`: to be differentiated again.

    `work` does with ops that have gradients what a fused op did. The result has None for inputs that need no gradient.
    """
    with torch.enable_grad():
        # Views are nodes of their own: where one tensor was given twice, each gets its own share.
        own = [None if value is None else value.view_as(value) for value in inputs]
        wanted = [value for value in own if value is not None and value.requires_grad]
        found = iter(torch.autograd.grad(work(*own), wanted, grad, create_graph=True, materialize_grads=True))
    return [next(found) if value is not None and value.requires_grad else None for value in own]
