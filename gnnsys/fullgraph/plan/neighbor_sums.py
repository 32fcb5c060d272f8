"""Sums over in-neighbours, made where rows lie, over all local rows, instead of over rows gathered for a bin.

Their gradients are pulled over the transposed structure when they are asked for, instead of pushed into a sum that
every bin adds to. Where rows move they come in pieces, and `offload/piecewise_sums.py` says how.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gnnsys.nn import whole_scales
from gnnsys.ops import CSC, WEIGHT, WholeDegrees, narrow_weights, native, sum_dtype, workspace_bytes

_MANY_EDGES = 1 << 20


class NeighborSums:
    """A structure over all local rows, [core, halo], and how its sums are weighted.

    `kind` is "sum", "mean" (by in-degree) or "gcn" (one self loop each, D^-1/2 on both sides). Where the structure has
    weights of edges, those count as much in sums and, of "gcn", in degrees.
    """

    def __init__(self, kind: str, csc: CSC, whole: WholeDegrees) -> None:
        self.kind, self._whole = kind, whole
        weight = None if csc.edge_data is None else csc.edge_data.rows[WEIGHT]
        self._of_weights = None if csc.edge_data is None else replace(csc.edge_data, rows={})
        if kind == "gcn":
            csc, weight = self._looped(csc, weight)
        self._factors: Tensor | None = None  # of each node's weights: float16 can say what is left, others lose nothing
        if kind == "gcn" and weight is not None:
            narrow, self._factors = narrow_weights(csc, weight)
            weight = narrow.to(weight.dtype) if weight.is_floating_point() else narrow
        self.csc, self.weight = csc, weight
        self._ends = self.csc.indptr.cpu()  # to cut by without asking a device
        self._transposed: tuple[CSC, Tensor] | None = None
        self._scales: dict[torch.dtype, tuple[Tensor | None, Tensor | None]] = {}
        self._weights: dict[tuple[torch.dtype, bool], Tensor] = {}

    def sums(self, rows: Tensor, first: int, end: int, scale: Tensor | None = None) -> Tensor:
        """What the nodes at places first to end have as in-neighbours, summed; `rows` are all local ones.

        With `scale`, [rows], each counts so many times.
        """
        src, dst = self.scales(rows.dtype)
        if scale is not None:
            scale = scale.to(sum_dtype(rows.dtype))
            src = scale if src is None else src * scale
        weight, dst = self._weight_of(rows.dtype, False), None if dst is None else dst[first:end]
        return _spmm(self.csc, self._ends, first, end, rows, weight, src, dst)

    def pull(self, grads: Tensor, first: int, end: int, into: Tensor | None = None) -> Tensor:
        """The gradient of local rows first to end, from those of all nodes' sums; added to `into`, if that is given."""
        if self._transposed is None:
            turned = self.csc.transpose()
            self._transposed = (turned, turned.indptr.cpu())
        src, dst = self.scales(grads.dtype)
        weight, src = self._weight_of(grads.dtype, True), None if src is None else src[first:end]
        return _spmm(*self._transposed, first, end, grads, weight, dst, src, into)

    def scales(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What rows of `dtype`, and the nodes' sums of them, are multiplied by: [num_local] and [num_core]."""
        dtype = sum_dtype(dtype)
        if dtype not in self._scales:
            if self.kind == "gcn":
                piece = replace(self.csc, whole=self._whole, edge_data=self._of_weights)
                src, dst, _ = whole_scales(piece, True, 1.0, dtype, self._of_weights is not None)
                self._scales[dtype] = (src, dst if self._factors is None else dst / self._factors.to(dtype))
            elif self.kind == "mean":
                self._scales[dtype] = (None, native.inverse_degrees(self.csc.indptr, dtype))
            else:
                self._scales[dtype] = (None, None)
        return self._scales[dtype]

    def _weight_of(self, dtype: torch.dtype, turned: bool) -> Tensor | None:
        """What edges weigh, by position of the structure, or of the transposed one."""
        if self.weight is None:
            return None
        if (dtype, turned) not in self._weights:
            weight = turned_weight(self.csc, self.weight) if turned else self.weight
            self._weights[dtype, turned] = weight.to(dtype)
        return self._weights[dtype, turned]

    def _looped(self, csc: CSC, weight: Tensor | None) -> tuple[CSC, Tensor | None]:
        """Every node with one self loop, whatever it had; one that it had keeps its weight."""
        dst = csc.dst()
        kept = csc.indices != dst
        loops = torch.arange(csc.num_dst, device=dst.device)
        edges = torch.stack([torch.cat([csc.indices[kept].long(), loops]), torch.cat([dst[kept], loops])])
        looped = CSC.from_edge_index(edges, csc.num_src, csc.num_dst, narrow=True)
        if weight is not None:
            assert self._of_weights is not None and self._of_weights.whole is not None
            has_loop, own = self._whole.num_loops[: csc.num_dst] > 0, self._of_weights.whole.loop[: csc.num_dst]
            weight = torch.cat([weight[kept], torch.where(has_loop, own, 1.0).to(weight.dtype)])
            weight = weight if looped.edge_ids is None else weight[looped.edge_ids.long()]
        return CSC(looped.indptr, looped.indices, csc.num_src), weight


def turned_weight(csc: CSC, weight: Tensor) -> Tensor:
    """What edges weigh by position of the transposed structure."""
    positions = csc.transpose().edge_ids
    assert positions is not None
    return weight.index_select(0, positions)


def _spmm(
    csc: CSC, ends: Tensor, first: int, end: int, rows: Tensor, weight: Tensor | None, src_scale: Tensor | None,
    dst_scale: Tensor | None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sums of columns first to end, added to `into` or by themselves; `ends` is indptr on the CPU."""
    indptr, indices = csc.indptr, csc.indices
    if (first, end) != (0, csc.num_dst):
        positions = slice(int(ends[first]), int(ends[end]))
        indices, weight = indices[positions], None if weight is None else weight[positions]
        indptr = indptr[first : end + 1] - int(ends[first])
    with torch.no_grad():
        rows = rows.contiguous()
        if into is None:
            return native.spmm(indptr, indices, None, rows, weight, src_scale, dst_scale, None, None, None)
        native.spmm_add(indptr, indices, None, rows, weight, src_scale, dst_scale, into)
        return into


def scratch_per_edge(width: int, dtype: torch.dtype) -> int:
    """Bytes that a device takes per edge while it adds rows up, rounded up: `spmm_add` says it of very many edges."""
    indptr, indices = torch.empty(2, device="meta"), torch.empty(_MANY_EDGES, device="meta")
    x = torch.empty(1, width, dtype=dtype, device="meta")
    told = workspace_bytes("spmm_add", indptr, indices, None, x, None, None, None, x, device="cuda")
    return -(-told // _MANY_EDGES)
