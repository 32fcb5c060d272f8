"""Sums over in-neighbours where rows move: a bin's sources come piece by piece, and sums are added up in their order.

A bin is then as large as its nodes allow, whatever they have as in-neighbours: a node that is connected to all others
takes as many pieces as its sources need. On the way back the gradient of the sums is pushed through the same pieces,
over their transposed structures, and what each says of its sources goes back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gnnsys.fullgraph.offload.mover import BroughtInputs, Mover, Pick
from gnnsys.fullgraph.plan.bins import Bin, BudgetError
from gnnsys.fullgraph.plan.neighbor_sums import NeighborSums, turned_weight
from gnnsys.ops import CSC, compact, native, sum_dtype

Adds = Callable[[Tensor | slice, Tensor], None]  # takes which rows, and their gradients


@dataclass(frozen=True, eq=False)
class SourcePiece:
    """Some of a bin's sources, as rows of [core, halo], and the in-edges that its nodes have from them.

    `weights` are what those weigh, by position of the structure and of the transposed one; none where all count alike.
    """

    src: Tensor | None  # None: all rows as they are
    csc: CSC
    weights: tuple[Tensor, ...] = ()

    def to(self, device: torch.device) -> SourcePiece:
        """The structure there; sources are picked on the host."""
        return SourcePiece(self.src, self.csc.to(device), tuple(each.to(device) for each in self.weights))

    def structure(self, turned: bool) -> list[Tensor]:
        """What it is made of, as `PiecewiseSums` takes it."""
        csc = self.csc.transpose() if turned else self.csc
        return [csc.indptr, csc.indices, *self.weights[turned : turned + 1]]


@dataclass(frozen=True)
class PieceCosts:
    """Bytes of a piece: per source, there or back, and per edge; `limit` is what one may take, None: as it comes."""

    source: int
    edge: int
    limit: int | None = None

    def fits(self, num_sources: int, num_edges: int) -> bool:
        """Whether so many may be one piece."""
        return self.limit is None or num_sources * self.source + num_edges * self.edge <= self.limit

    def cuts(self, sources: Tensor) -> list[int]:
        """Where the pieces of edges begin whose sources, counted from 0, ascend; a source may go on in the next."""
        num_edges = sources.numel()
        assert self.limit is not None
        if self.source + self.edge > self.limit:
            raise BudgetError(
                f"one row of a neighbour takes {self.source + self.edge:,} bytes, and memory_budget leaves "
                f"{self.limit:,} for a piece of a bin's inputs: raise it"
            )
        at = torch.arange(num_edges)
        spent = (sources + 1) * self.source + (at + 1) * self.edge  # up to and with each edge
        cuts = [0]
        while cuts[-1] < num_edges:
            first = cuts[-1]
            before = int(sources[first]) * self.source + first * self.edge
            cuts.append(int(torch.searchsorted(spent, self.limit + before, right=True)))
        return cuts


def make_pieces(csc: CSC, first: int, end: int, costs: PieceCosts, weight: Tensor | None = None) -> list[SourcePiece]:
    """The in-edges of nodes first to end, cut by source; a node's edges keep their order inside a piece."""
    if (first, end) == (0, csc.num_dst) and costs.limit is None:
        return [_piece(None, csc, weight)]
    dtype, indptr = csc.indices.dtype, csc.indptr[first : end + 1] - csc.indptr[first]
    positions = slice(int(csc.indptr[first]), int(csc.indptr[end]))
    ids, weight = csc.indices[positions], None if weight is None else weight[positions]
    (src,), (local,) = compact([ids[:0]], [ids], [0])
    if costs.fits(src.numel(), ids.numel()):
        return [_piece(src, CSC(indptr, local.to(dtype), src.numel()), weight)] if ids.numel() else []
    dst = torch.repeat_interleave(torch.arange(end - first), indptr.diff())
    by_source = torch.sort(local, stable=True).indices
    pieces = []
    for a, b in pairwise(costs.cuts(local[by_source])):
        edges = torch.sort(by_source[a:b]).values  # in their order again
        low, high = int(local[by_source[a]]), int(local[by_source[b - 1]]) + 1
        counts = torch.bincount(dst[edges], minlength=end - first)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        piece = CSC(indptr, (local[edges] - low).to(dtype), high - low)
        pieces.append(_piece(src[low:high], piece, None if weight is None else weight[edges]))
    return pieces


def _piece(src: Tensor | None, csc: CSC, weight: Tensor | None) -> SourcePiece:
    csc.transpose()
    return SourcePiece(src, csc, () if weight is None else (weight, turned_weight(csc, weight)))


@dataclass(frozen=True, eq=False)
class PiecewiseSums:
    """The pieces of a step's bins. `view`, on the host, says how sums are weighted."""

    view: NeighborSums
    pieces: list[list[SourcePiece]]
    brings_structure: bool

    def dst_scale(self, dtype: torch.dtype) -> Tensor | None:
        """What nodes' sums are multiplied by, by place."""
        return self.view.scales(dtype)[1]

    def load(self, mover: Mover, here: Bin, number: int, rows: Tensor, scale: Tensor | None) -> None:
        """Begins to bring a piece; with `scale`, [rows, 1], each row counts so many times."""
        if number >= len(self.pieces[here.number]):
            return
        piece, weights = self.pieces[here.number][number], (self.view.scales(rows.dtype)[0], scale)
        picks = [Pick(rows, piece.src), *(Pick(weight, piece.src) for weight in weights if weight is not None)]
        if self.brings_structure:
            picks += map(Pick, piece.structure(False))
        mover.load((here, number), picks)

    def sums(
        self, mover: Mover, here: Bin, rows: Tensor, own: Tensor, scale: Tensor | None, dst_scale: Tensor | None
    ) -> tuple[Tensor, list[BroughtInputs]]:
        """The sums of a bin whose first piece is loaded, and what brought the last, which is still read.

        `own` are the nodes' rows, on the device.
        """
        pieces, loads = self.pieces[here.number], []
        out = torch.zeros_like(own)
        for number, piece in enumerate(pieces):
            load = mover.take((here, number))
            given, *rest = load.tensors
            indptr, indices, weight = self._structure(piece, rest, False, out.dtype)
            src_scale = _product(rest, sum_dtype(out.dtype))
            with torch.no_grad():
                native.spmm_add(indptr, indices, None, given, weight, src_scale, dst_scale, out)
            if number + 1 < len(pieces):
                mover.send_back([], _nothing, [load])
                mover.finish(keep=1)
                self.load(mover, here, number + 1, rows, scale)
            else:
                loads.append(load)
        return out, loads

    def push(self, mover: Mover, here: Bin, grad: Tensor, dst_scale: Tensor | None, then: Adds) -> None:
        """Makes the gradients of a bin's sources from that of its sums; `then` gets rows and gradients, by piece."""
        pieces, weight, grad = self.pieces[here.number], self.view.scales(grad.dtype)[0], grad.contiguous()
        if pieces:
            self._load_back(mover, here, 0, weight)
        for number, piece in enumerate(pieces):
            load = mover.take((here, number))
            rest = list(load.tensors)
            indptr, indices, edge_weight = self._structure(piece, rest, True, grad.dtype)
            scale = _product(rest, sum_dtype(grad.dtype))
            found = native.spmm(indptr, indices, None, grad, edge_weight, dst_scale, scale, None, None, None)
            mover.send_back([found], _of_piece(then, piece.src), [load])
            del found
            mover.finish(keep=1)
            if number + 1 < len(pieces):
                self._load_back(mover, here, number + 1, weight)

    def _load_back(self, mover: Mover, here: Bin, number: int, weight: Tensor | None) -> None:
        piece = self.pieces[here.number][number]
        picks = [] if weight is None else [Pick(weight, piece.src)]
        if self.brings_structure:
            picks += map(Pick, piece.structure(True))
        mover.load((here, number), picks)

    def _structure(
        self, piece: SourcePiece, came: list[Tensor], turned: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A piece's indptr, indices and weights of edges, which are taken off the end of what came, if they came."""
        parts = piece.structure(turned)
        if self.brings_structure:
            parts = came[-len(parts) :]
            del came[-len(parts) :]
        indptr, indices, *weights = parts
        return indptr, indices, weights[0].to(dtype) if weights else None


def _product(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Of weights of rows, [rows] or [rows, 1]."""
    out: Tensor | None = None
    for weight in weights:
        flat = weight.reshape(-1).to(dtype)
        out = flat if out is None else out * flat
    return out


def _of_piece(then: Adds, src: Tensor | None) -> Callable[[list[Tensor]], None]:
    return lambda came: then(slice(None) if src is None else src, came[0])


def _nothing(came: Sequence[Tensor]) -> None:
    pass
