"""Rows of a batch whose first layer's sums are made already: what the layer takes is there, the rest where it was.

`SummedRows` is a tensor of all rows to whoever looks at it. A layer that takes sums over in-edges asks for these first,
and for its destinations' own rows; any other use gathers all rows, once, and goes on with them. From then on sums are
not used any more: what was done to the rows cannot be seen in all cases.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gnnsys.ops.csc import CSC

SUMMED = "sums of these edges are made"  # a key of STRUCTURES: which sums, for an edge_index
_gathering = threading.Lock()


class SumsOf:
    """Names the structure that sums are of: the batch's edges, all of them, as the first layer sees them."""

    __slots__ = ("__weakref__", "_bound", "num_dst", "num_edges", "reduce")

    def __init__(self, reduce: str, num_dst: int, num_edges: int) -> None:
        self.reduce, self.num_dst, self.num_edges = reduce, num_dst, num_edges
        self._bound: list[tuple[weakref.ref[Tensor], int]] | None = None

    def bind(self, csc: CSC) -> None:
        """Says whose sums they are where the CSC itself goes to the user: of these tensors, as they are now."""
        csc.sums = self
        self._bound = [(weakref.ref(tensor), _version(tensor)) for tensor in (csc.indptr, csc.indices)]

    def are_of(self, csc: CSC, reduce: str) -> bool:
        if csc.sums is not self or self.reduce != reduce:
            return False
        if (csc.num_dst, csc.num_edges) != (self.num_dst, self.num_edges):
            return False
        if self._bound is None:
            return True
        now = [(tensor, _version(tensor)) for tensor in (csc.indptr, csc.indices)]
        return all(
            ref() is tensor and seen == version >= 0
            for (ref, seen), (tensor, version) in zip(self._bound, now, strict=True)
        )


class SummedRows(Tensor):
    """Rows [num_rows, d] of a batch's nodes: `own` [n, d] are the first of them, `sums` [num_dst, d] those of `of`.

    `gather()` returns all rows, on the device of `own`; it is called where something else than sums and own rows is
    asked for. `rows()` is the plain tensor, for code that torch does not see (a C extension, say).
    """

    own: Tensor
    sums: Tensor
    of: SumsOf
    _gather: Callable[[], Tensor]
    _rows: Tensor | None

    @staticmethod
    def __new__(cls, own: Tensor, sums: Tensor, of: SumsOf, num_rows: int, gather: Callable[[], Tensor]) -> SummedRows:
        _keep_from_dynamo()
        shape = (num_rows, *own.shape[1:])
        made: SummedRows = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)  # type: ignore[attr-defined]
        made.own, made.sums, made.of, made._gather, made._rows = own, sums, of, gather, None
        return made

    def rows(self) -> Tensor:
        """All rows, as a plain tensor. The same one every time."""
        with _gathering:
            if self._rows is None:
                found = self._gather()
                if found.device != self.own.device or found.shape[0] != self.size(0):
                    raise RuntimeError(f"rows were gathered as {list(found.shape)} on {found.device}: this is a bug")
                self._rows = found
            return self._rows

    @property
    def is_gathered(self) -> bool:
        """Whether somebody has asked for all rows."""
        return self._rows is not None

    def sums_for(self, csc: CSC, reduce: str) -> Tensor | None:
        """The sums over in-edges of a structure, where they are those that were made, and nobody has had the rows."""
        return self.sums if self._rows is None and self.of.are_of(csc, reduce) else None

    def first_rows(self, count: int) -> Tensor:
        """The first `count` rows, to be read."""
        return self.own[:count] if self._rows is None and count <= self.own.shape[0] else self.rows()[:count]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        me = args[0] if args and isinstance(args[0], SummedRows) else None
        if me is not None:
            if function in _OF_ITS_SHAPE and me._rows is None:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            if function is Tensor.__getitem__ and me._rows is None and _is_all(me, args[1]):
                return me
            if function is Tensor.record_stream:
                for tensor in (me.own, me.sums, *([] if me._rows is None else [me._rows])):
                    tensor.record_stream(args[1])
                return None
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))


def _whole(value: Any) -> Any:
    return value.rows() if isinstance(value, SummedRows) else value


def _version(tensor: Tensor) -> int:
    """-1 where torch does not count writes."""
    return -1 if tensor.is_inference() else tensor._version


def _is_all(rows: SummedRows, index: Any) -> bool:
    """Whether `rows[index]` is all of them, as a slice: layers that trim a batch ask for that."""
    if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
        return False
    return index.stop is None or (isinstance(index.stop, int) and index.stop >= rows.size(0))


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
    if "torch._dynamo" in sys.modules and not hasattr(SummedRows.rows, "_torchdynamo_orig_callable"):
        SummedRows.rows = torch.compiler.disable(SummedRows.rows)  # type: ignore[method-assign]
