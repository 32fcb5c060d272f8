"""What autograd does in place, but not while a dispatch mode watches.

A tensor that feeds two operators gets two gradients. The engine adds the second into the first where it holds the last
reference to that; under a dispatch mode it makes a third tensor, for it cannot know what the mode does with them. The
formulas of gradients are the same: that of `index_select` adds rows into zeros in place, and under a mode makes another
tensor for the result. A trace that let them would find a peak that no run has. So the mode does what they would do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_ADD = _ATEN.add.Tensor
_INTO_FIRST = {  # in formulas of gradients: their first argument is what the result is made of
    _ATEN.index_add.default,
    _ATEN.index_put.default,
    _ATEN.masked_fill.Scalar,
    _ATEN.scatter.src,
    _ATEN.scatter.value,
    _ATEN.scatter_add.default,
}
_ENGINE = "_engine_run_backward"
# References to a tensor that C++ alone holds, as seen below: C++, the tuple of arguments, a local, the call.
_LAST_REFERENCE, _LAST_STORAGE = 4, 2


def works_in_place(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether autograd would have written this operator's result into its first argument.

    Called by a dispatch mode. Autograd is told from Python code by the frame that called: the engine's own.
    """
    is_sum = func is _ADD and not kwargs and len(args) == 2
    if not is_sum and func not in _INTO_FIRST:
        return False
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None or not _is_called_by_engine():
        return False
    first = args[0]
    if is_sum and (not isinstance(args[1], Tensor) or first is args[1] or not _are_alike(first, args[1])):
        return False
    if not _is_dense(first):
        return False
    storage = first.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == _LAST_STORAGE and sys.getrefcount(first) <= _LAST_REFERENCE


def in_place(func: Any) -> Any:
    """The operator that writes its result into its first argument."""
    return getattr(getattr(_ATEN, f"{func._opname}_"), func._overloadname)


def _are_alike(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape


def _is_called_by_engine() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("__torch_dispatch__", "inner", "_fn"):
        frame = frame.f_back
    return frame.f_code.co_name == _ENGINE


def _is_dense(tensor: Tensor) -> bool:
    """Whether values fill their memory, each in a place of its own, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True
