"""Rows of a batch that are not there yet: a tensor of all rows to whoever looks at it, and nothing has moved before.

A first layer that needs less than the rows asks for that (`SummedRows`, `MultipliedRows`). Any other use gathers all
rows, once, and goes on with them. From then on what was made of the rows is not used any more: what was done to them
cannot be seen in all cases.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_gathering = threading.RLock()  # the first rows of some are gathered with all of them


class LateRows(Tensor):
    """`gather()` returns all rows, on the tensor's device; it is called where somebody asks for them. `rows()` is the
    plain tensor, for code that torch does not see (a C extension, say).

    Such code gets a RuntimeError where it reads the memory of what is no plain tensor: `torch.utils.dlpack.to_dlpack`
    does. `np.from_dlpack`, `torch.from_dlpack` and `__dlpack__` give all rows.
    """

    _gather: Callable[[], Tensor]
    _rows: Tensor | None

    @classmethod
    def _make(cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device, gather: Callable[[], Tensor]) -> Any:
        _keep_from_dynamo()
        made: Any = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)  # type: ignore[attr-defined]
        torch._C._set_throw_on_mutable_data_ptr(made)  # there is no memory behind it: reading it would end the process
        made._gather, made._rows = gather, None
        return made

    def rows(self) -> Tensor:
        """All rows, as a plain tensor. The same one every time."""
        with _gathering:
            if self._rows is None:
                found = self._gather()
                if found.device != self.device or found.shape[0] != self.size(0):
                    raise RuntimeError(f"rows were gathered as {list(found.shape)} on {found.device}: this is a bug")
                self._rows = found
            return self._rows

    @property
    def is_gathered(self) -> bool:
        """Whether somebody has asked for all rows."""
        return self._rows is not None

    def first_rows(self, count: int) -> Tensor:
        """The first `count` rows, to be read."""
        return self.rows()[:count]

    def _parts(self) -> Iterable[Tensor]:
        """What is on the device in place of the rows."""
        return ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        me = args[0] if args and isinstance(args[0], LateRows) else None
        if me is not None:
            if function in _OF_ITS_SHAPE and me._rows is None:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            if function is Tensor.__getitem__ and me._rows is None and _is_all(me, args[1]):
                return me
            if function is Tensor.to and me._rows is None and _stays(me, args[1:], kwargs):
                return me
            if function is Tensor.record_stream:
                for tensor in (*me._parts(), *([] if me._rows is None else [me._rows])):
                    tensor.record_stream(args[1])
                return None
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))


def _whole(value: Any) -> Any:
    return value.rows() if isinstance(value, LateRows) else value


def _is_all(rows: LateRows, index: Any) -> bool:
    """Whether `rows[index]` is all of them, as a slice: layers that trim a batch ask for that."""
    if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
        return False
    return index.stop is None or (isinstance(index.stop, int) and index.stop >= rows.size(0))


def _stays(rows: LateRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `rows.to(...)` is the same tensor, as torch has it: where it is there already, and no copy is wanted."""
    is_plain = all(isinstance(each, str | torch.device | torch.dtype) for each in args)
    if len(args) > 2 or not is_plain or not kwargs.keys() <= {"device", "dtype", "non_blocking"}:
        return False
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if device is None or device.type != "cuda" or device.index is not None:
        is_there = device is None or device == rows.device
    else:
        is_there = rows.is_cuda and rows.device.index == torch.cuda.current_device()
    return is_there and dtype in (None, rows.dtype)


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_OF_ITS_SHAPE = {
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__,
    *_getters("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "is_cuda", "is_sparse"),
    *_getters("requires_grad"),
}  # fmt: skip


def _keep_from_dynamo() -> None:
    """Has compiled code call `rows` without a look into it; where nobody compiles, dynamo is not imported for it."""
    if "torch._dynamo" in sys.modules and not hasattr(LateRows.rows, "_torchdynamo_orig_callable"):
        LateRows.rows = torch.compiler.disable(LateRows.rows)  # type: ignore[method-assign]
