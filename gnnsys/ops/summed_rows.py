"""Rows of a batch whose first layer's sums are made already: what the layer takes is there, the rest where it was.

`SummedRows` is a tensor of all rows to whoever looks at it. A layer that takes sums over in-edges asks for these first,
and for its destinations' own rows; any other use gathers all rows, once, and goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gnnsys.ops.csc import CSC

SUMMED = "sums of these edges are made"  # a key of STRUCTURES: which sums, for an edge_index


class SumsOf:
    """Names the structure that sums are of: the batch's edges, all of them, as the first layer sees them."""

    __slots__ = ("__weakref__", "num_dst", "num_edges", "reduce")

    def __init__(self, reduce: str, num_dst: int, num_edges: int) -> None:
        self.reduce, self.num_dst, self.num_edges = reduce, num_dst, num_edges

    def are_of(self, csc: CSC, reduce: str) -> bool:
        return (
            csc.sums is self
            and self.reduce == reduce
            and (csc.num_dst, csc.num_edges) == (self.num_dst, self.num_edges)
        )


class SummedRows(Tensor):
    """Rows [num_rows, d] of a batch's nodes: `own` [n, d] are the first of them, `sums` [num_dst, d] those of `of`.

    `gather()` returns all rows; it is called where something else than sums and own rows is asked for. Rows have no
    gradient. What is written into them is seen from then on, by layers too.
    """

    own: Tensor
    sums: Tensor
    of: SumsOf
    _gather: Callable[[], Tensor]
    _rows: Tensor | None
    _versions: tuple[int, int]  # of own rows, and of all rows when they were gathered

    @staticmethod
    def __new__(cls, own: Tensor, sums: Tensor, of: SumsOf, num_rows: int, gather: Callable[[], Tensor]) -> SummedRows:
        shape = (num_rows, *own.shape[1:])
        made: SummedRows = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)  # type: ignore[attr-defined]
        made.own, made.sums, made.of, made._gather = own, sums, of, gather
        made._rows, made._versions = None, (own._version, 0)
        return made

    def rows(self) -> Tensor:
        """All rows, as a plain tensor. The same one every time."""
        if self._rows is None:
            self._rows = self._gather()
            self._versions = self._versions[0], self._rows._version
            if self.own._version != self._versions[0]:
                self._rows[: self.own.shape[0]] = self.own
        return self._rows

    @property
    def is_gathered(self) -> bool:
        """Whether somebody has asked for all rows."""
        return self._rows is not None

    def sums_for(self, csc: CSC, reduce: str) -> Tensor | None:
        """The sums over in-edges of a structure, where they are those that were made and rows are as they were."""
        is_written = self.own._version != self._versions[0] or self.own.requires_grad
        if self._rows is not None:
            is_written |= self._rows._version != self._versions[1] or self._rows.requires_grad
        if is_written:
            return None
        return self.sums if self.of.are_of(csc, reduce) else None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        me = args[0] if args and isinstance(args[0], SummedRows) else None
        if me is not None and me._rows is None:
            if function in _OF_ITS_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            if function is Tensor.__getitem__ and (found := _first_rows(me, args[1])) is not None:
                return found
            if function is Tensor.record_stream:
                me.own.record_stream(args[1])
                me.sums.record_stream(args[1])
                return None
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))


def _whole(value: Any) -> Any:
    return value.rows() if isinstance(value, SummedRows) else value


def _first_rows(rows: SummedRows, index: Any) -> Tensor | None:
    """`rows[:n]` without a look at others; None where it takes one."""
    if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
        return None
    stop = rows.size(0) if index.stop is None else index.stop
    if not isinstance(stop, int) or stop < 0:
        return None
    if stop >= rows.size(0):
        return rows
    return rows.own[:stop] if stop <= rows.own.shape[0] else None


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_OF_ITS_SHAPE = {
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__,
    *_getters("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "is_cuda", "is_sparse"),
    *_getters("requires_grad"),
}  # fmt: skip
