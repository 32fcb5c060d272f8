"""Rows of a batch whose first layer's sums are made already: what the layer takes is there, the rest where it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from gnnsys.ops.csc import CSC
from gnnsys.ops.late_rows import LateRows

SUMMED = "sums of these edges are made"  # a key of STRUCTURES: which sums, for an edge_index


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


class SummedRows(LateRows):
    """Rows [num_rows, d] of a batch's nodes: `own` [n, d] are the first of them, `sums` [num_dst, d] those of `of`.

    A layer that takes sums over in-edges asks for these first, and for its destinations' own rows.
    """

    own: Tensor
    sums: Tensor
    of: SumsOf

    @staticmethod
    def __new__(cls, own: Tensor, sums: Tensor, of: SumsOf, num_rows: int, gather: Callable[[], Tensor]) -> SummedRows:
        made: SummedRows = cls._make((num_rows, *own.shape[1:]), own.dtype, own.device, gather)
        made.own, made.sums, made.of = own, sums, of
        return made

    def sums_for(self, csc: CSC, reduce: str) -> Tensor | None:
        """The sums over in-edges of a structure, where they are those that were made, and nobody has had the rows."""
        return self.sums if self._rows is None and self.of.are_of(csc, reduce) else None

    def first_rows(self, count: int) -> Tensor:
        return self.own[:count] if self._rows is None and count <= self.own.shape[0] else self.rows()[:count]

    def _parts(self) -> Iterable[Tensor]:
        return self.own, self.sums


def _version(tensor: Tensor) -> int:
    """-1 where torch does not count writes."""
    return -1 if tensor.is_inference() else tensor._version
