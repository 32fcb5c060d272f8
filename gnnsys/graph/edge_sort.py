"""Edges to CSC without holding them: a bucket sort by destination through temporary files.

Edges are first written down as they come. Then they are divided into buckets of neighbouring destinations, each small
enough to be sorted in memory; a bucket that is not is divided again, down to a single destination, whose in-edges are
in order as they are. Every step keeps the input's order, so the result is the one that `CSC.from_edge_index` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.capacity import check_num_nodes
from gnnsys.graph.disk_room import naming
from gnnsys.ops import CSC

_INT32_MAX = 2**31 - 1
_ANY = 2**63  # a bound on ids where none is known
_MAX_BUCKETS = 128  # files open at a time
_CELLS = 1 << 12  # into which a range of destinations is cut to see where its edges are
_EDGE_BYTES = 14  # memory per edge of a bucket or piece at work, for each byte of an id
_NODE_BYTES = 40  # memory per destination of a bucket


class RawFile:
    """An array that grows on disk, row after row, and is then mapped; the file has no header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by map()
        self._dtype: torch.dtype | None = None
        self._shape: tuple[int, ...] = ()
        self.num_rows = 0

    def append(self, rows: Tensor) -> None:
        if self._dtype is None:
            self._dtype, self._shape = rows.dtype, tuple(rows.shape[1:])
        assert rows.dtype == self._dtype and tuple(rows.shape[1:]) == self._shape
        data = np.ascontiguousarray(rows.numpy()).data.cast("B") if rows.numel() else memoryview(b"")
        with naming(self.path):
            while len(data):  # a raw write may be cut short
                data = data[self._file.write(data) :]
        self.num_rows += rows.shape[0]

    def map(self) -> Tensor:
        """The whole array, memory-mapped; nothing can be appended any more."""
        self._file.close()
        assert self._dtype is not None
        return map_raw(self.path, self._dtype, (self.num_rows, *self._shape))

    def close(self) -> None:
        self._file.close()


def map_raw(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A file without a header as a tensor, memory-mapped and private to the process where written to."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(np.memmap(path, np.uint8, "c")).view(dtype).view(shape)


@dataclass(frozen=True)
class _Bucket:
    """Edges to destinations [begin, end) in a file: a record is source, destination and, once numbered, its number."""

    path: Path
    dtype: torch.dtype
    numbered: bool
    begin: int
    end: int

    @property
    def num_edges(self) -> int:
        return self.path.stat().st_size // self._record_bytes

    @property
    def _record_bytes(self) -> int:
        return self.dtype.itemsize * (2 + self.numbered)

    def read(self, first: int, count: int) -> Tensor:
        """[count, 2 or 3]; read rather than mapped, so that no page of the file stays with the process."""
        numpy_dtype = np.int32 if self.dtype == torch.int32 else np.int64
        width = 2 + self.numbered
        values = np.fromfile(self.path, numpy_dtype, count * width, offset=first * self._record_bytes)
        return torch.from_numpy(values).view(count, width)


class EdgeSort:
    """Takes edges in any number of pieces, then gives their CSC as mapped files in `folder`.

    `memory` bytes is about what it holds at any time. `num_nodes` (sources, destinations) bounds the ids; where it is
    not known yet there are as many of both as the largest id says. Ids are written down as `id_dtype`.

    >>> edges = EdgeSort(folder, 1 << 28)  # doctest: +SKIP
    >>> for src, dst in pieces: edges.add(src, dst)  # doctest: +SKIP
    >>> csc = edges.sort()  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: Path,
        memory: int,
        num_nodes: tuple[int, int] | None = None,
        *,
        id_dtype: torch.dtype = torch.int64,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        check_num_nodes(max(num_nodes or (0,)), folder=folder)
        self.folder = folder
        self.num_edges = 0
        self._num_nodes = num_nodes
        self._memory = memory
        self._spool = RawFile(folder / "edges")
        self._spool.append(torch.empty(0, 2, dtype=id_dtype, device="cpu"))
        self._id_dtype = id_dtype
        self._largest = -1
        self._is_sorted = True
        self._last_dst = -1
        self._num_files = 0

    def add(self, src: Tensor, dst: Tensor) -> None:
        """Edges, numbered in the order in which they are added. ValueError for an id that cannot be."""
        if dst.numel() == 0:
            return
        for name, ids, limit in zip(("src", "dst"), (src, dst), self._num_nodes or (_ANY, _ANY), strict=True):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= limit:
                wide = ids.long()  # torch would cut the limit to the type of the ids
                at = int(((wide < 0) | (wide > limit - 1)).nonzero()[0])
                allowed = f"in [0, {limit})" if limit != _ANY else ">= 0"
                raise ValueError(f"{name} must be {allowed}, got {int(ids[at])} at position {self.num_edges + at}")
            if high > self._largest:
                self._largest = high
                if self._num_nodes is None:
                    check_num_nodes(high + 1, edge=self.num_edges + int(ids.argmax()), folder=self.folder)
        if self._is_sorted:
            self._is_sorted = int(dst[0]) >= self._last_dst and bool((dst[1:] >= dst[:-1]).all())
            self._last_dst = int(dst[-1])
        self._spool.append(torch.stack([src, dst], 1).to(self._id_dtype))
        self.num_edges += dst.numel()

    def sort(self, *, edge_ids: bool = True, progress: Callable[[float], None] | None = None) -> CSC:
        """All in-edges by destination, the dtypes those of `CSC.from_edge_index(..., narrow=True)`.

        `edge_ids` of the result is None where the edges came sorted, or are not wanted. `progress` is told the share of
        the edges that are in their place.
        """
        self._spool.close()
        num_src, num_dst = self._num_nodes or (self._largest + 1, self._largest + 1)
        many = self.num_edges > _INT32_MAX
        wide = self._id_dtype == torch.int64 and (num_src > _INT32_MAX or many)
        self._index_dtype = torch.int64 if wide else torch.int32
        self._number_dtype = torch.int64 if wide or many else torch.int32
        self._record_dtype = torch.int64 if wide or many or num_dst > _INT32_MAX else torch.int32
        self._num_src = num_src
        self._keeps_ids = edge_ids and not self._is_sorted
        self._progress = progress or (lambda share: None)
        self._indptr, self._indices, self._numbers = (RawFile(self.folder / n) for n in ("indptr", "indices", "ids"))
        self._indptr.append(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._indices.append(torch.empty(0, dtype=self._index_dtype, device="cpu"))
        self._numbers.append(torch.empty(0, dtype=self._number_dtype, device="cpu"))
        self._place(_Bucket(self._spool.path, self._id_dtype, False, 0, num_dst))
        indptr, indices, numbers = self._indptr.map(), self._indices.map(), self._numbers.map()
        return CSC(indptr, indices, num_src, numbers if self._keeps_ids else None)

    # -- one range of destinations -----------------------------------------------------------------------------------

    def _place(self, bucket: _Bucket) -> None:
        """Appends the destinations of a bucket, and their edges, to the result; removes its file."""
        buckets = []
        if bucket.numbered < self._keeps_ids:  # the edges as they came: dividing them numbers them
            buckets = self._divide(bucket)
        elif self._fits(bucket.num_edges, bucket.end - bucket.begin):
            self._place_bucket(bucket)
        elif bucket.end - bucket.begin == 1:
            self._place_column(bucket)
        else:
            buckets = self._divide(bucket)
        bucket.path.unlink()
        for smaller in buckets:
            self._place(smaller)

    def _fits(self, num_edges: int, num_dst: int) -> bool:
        edge_bytes = _EDGE_BYTES * self._record_dtype.itemsize
        return num_edges * edge_bytes + num_dst * _NODE_BYTES <= max(self._memory, 2 * (edge_bytes + _NODE_BYTES))

    def _place_bucket(self, bucket: _Bucket) -> None:
        records = bucket.read(0, bucket.num_edges)
        edges = torch.stack([records[:, 0], records[:, 1] - bucket.begin])
        numbers = records[:, 2].to(self._number_dtype) if self._keeps_ids else None
        del records
        csc = CSC.from_edge_index(edges, self._num_src, bucket.end - bucket.begin)
        del edges
        self._append(csc.indices, csc.indptr[1:])
        if numbers is not None:
            self._numbers.append(numbers if csc.edge_ids is None else numbers[csc.edge_ids.long()])

    def _place_column(self, bucket: _Bucket) -> None:
        """The in-edges of one destination, more than fit in memory, are in order as they are."""
        start = self._indices.num_rows
        for piece in self._pieces(bucket):
            self._append(piece[:, 0], torch.empty(0, dtype=torch.int64, device="cpu"))
            if self._keeps_ids:
                self._numbers.append(piece[:, 2].to(self._number_dtype))
        self._indptr.append(torch.tensor([start + bucket.num_edges], device="cpu"))

    def _append(self, src: Tensor, ends: Tensor) -> None:
        self._indptr.append(ends + self._indices.num_rows)
        self._indices.append(src.to(self._index_dtype))
        self._progress(self._indices.num_rows / max(self.num_edges, 1))

    # -- dividing ----------------------------------------------------------------------------------------------------

    def _divide(self, bucket: _Bucket) -> list[_Bucket]:
        num_dst = bucket.end - bucket.begin
        cell = max(-(-num_dst // _CELLS), 1)  # destinations per cell
        counts = torch.zeros(-(-num_dst // cell), dtype=torch.int64, device="cpu")
        for piece in self._pieces(bucket):
            counts += torch.bincount((piece[:, 1] - bucket.begin) // cell, minlength=counts.numel())
        bucket_of_cell, starts = self._choose_buckets(counts, cell, num_dst)
        files = [RawFile(self.folder / f"bucket-{self._num_files + i}") for i in range(len(starts))]
        self._num_files += len(files)
        position = 0
        for piece in self._pieces(bucket):
            chosen = bucket_of_cell[(piece[:, 1] - bucket.begin) // cell]
            piece = piece.to(self._record_dtype)
            if bucket.numbered < self._keeps_ids:
                numbers = torch.arange(position, position + piece.shape[0], dtype=self._record_dtype, device="cpu")
                piece = torch.cat([piece, numbers[:, None]], 1)
                position += piece.shape[0]
            self._distribute(piece, chosen, files)
        for file in files:
            file.close()
        begins = [bucket.begin + start * cell for start in starts]
        ends = [*begins[1:], bucket.end]
        return [
            _Bucket(file.path, self._record_dtype, self._keeps_ids, begin, end)
            for file, begin, end in zip(files, begins, ends, strict=True)
        ]

    def _choose_buckets(self, counts: Tensor, cell: int, num_dst: int) -> tuple[Tensor, list[int]]:
        """Runs of cells that fit in memory, no more than there may be files: bucket per cell, first cell per bucket."""
        share = int(counts.sum()) // _MAX_BUCKETS, num_dst // _MAX_BUCKETS
        bucket_of_cell, starts, held = [], [0], [0, 0]
        for i, count in enumerate(counts.tolist()):
            full = [held[0] + count, held[1] + cell]
            fits = self._fits(*full) or (full[0] <= share[0] and full[1] <= share[1])
            if i > starts[-1] and not fits and len(starts) < _MAX_BUCKETS:
                starts.append(i)
                full = [count, cell]
            held = full
            bucket_of_cell.append(len(starts) - 1)
        return torch.tensor(bucket_of_cell, dtype=torch.int32, device="cpu"), starts

    @staticmethod
    def _distribute(piece: Tensor, chosen: Tensor, files: list[RawFile]) -> None:
        grouped = CSC.from_edge_index(torch.stack([chosen, chosen]), len(files))
        ordered = piece if grouped.edge_ids is None else piece[grouped.edge_ids.long()]
        bounds = grouped.indptr.tolist()
        for file, first, last in zip(files, bounds[:-1], bounds[1:], strict=True):
            if first < last:
                file.append(ordered[first:last])

    def _pieces(self, bucket: _Bucket) -> Iterator[Tensor]:
        size = max(self._memory // (_EDGE_BYTES * bucket.dtype.itemsize), 2)
        for first in range(0, bucket.num_edges, size):
            yield bucket.read(first, min(size, bucket.num_edges - first))
