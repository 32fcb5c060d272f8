"""Relabelling: from ids to local ids in first-seen order (the core of to_block).

`IdTable` is the incremental form that samplers use hop by hop; `compact` does several node types in one call. Both
cost time and memory by the number of ids, never by the number of nodes of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, takes_outputs_only, tells_workspace
from gnnsys.ops.buffers import BufferPool
from gnnsys.ops.csc import CSC
from gnnsys.ops.sampling import drawing_bytes

_HEADER = 8
_WIDE_FROM = 1 << 32
_MOST_ROOM = 1 << 23  # int64 entries that are asked of buffers at most


class NumberedNeighbors(NamedTuple):
    """The in-edges chosen for each seed, seed after seed, with local ids for their sources."""

    indptr: Tensor  # int64 [num_seeds + 1]
    local: Tensor  # int64
    positions: Tensor  # int64, positions in the CSC
    fresh: Tensor  # dtype of csc.indices, the sources that were new, in first-seen order


class IdTable:
    """Numbers ids in the order they are first seen; one table serves batch after batch.

    >>> table = IdTable(id_bound=100)
    >>> table.clear()
    >>> table.insert_seeds(torch.tensor([7, 3]))
    >>> table.insert(torch.tensor([3, 9, 9, 7]))
    (tensor([1, 2, 2, 0]), tensor([9]))

    On a CUDA device an insert waits once, for the number of new ids, and nothing else waits: a bad seed is told by the
    next insert, and what was refused leaves the table of no use until it is cleared.
    """

    def __init__(self, id_bound: int, room: int = 512, device: torch.device | str | int = "cpu") -> None:
        self._wide = id_bound > _WIDE_FROM
        self._words = torch.empty(0, dtype=torch.int64, device=device)
        self._log2 = max(10, (2 * room - 1).bit_length())
        self._ids: list[Tensor] = []
        self._rows = torch.empty(0, dtype=torch.int64, device="cpu")  # of seeds, in `insert_sampled`
        self.clear()

    @property
    def device(self) -> torch.device:
        return self._words.device

    @property
    def workspace_bytes(self) -> int:
        return self._words.nbytes + self._rows.nbytes

    def clear(self) -> None:
        """Forgets all ids; keeps the memory, and with it the size that earlier batches needed."""
        self._ids = []
        words = _HEADER + (1 << self._log2) * (1 + self._wide)
        if words > self._words.numel():
            self._words = torch.empty(words, dtype=torch.int64, device=self.device)
        native.id_table_init(self._words, self._log2, self._wide)

    def insert_seeds(self, ids: Tensor) -> None:
        """The ids take the next len(ids) places as they stand; a repeated id is known by its first place."""
        self._make_room(ids.numel())
        native.relabel_seeds(self._words, ids)
        self._ids.append(ids)

    def insert(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the local id of each (int64) and the ids that were new, in first-seen order."""
        if self._words.is_cuda:  # as if all were new: asking how many would be another wait
            self._make_room(ids.numel())
            local, fresh = native.relabel(self._words, ids)
        else:
            local, fresh = native.relabel(self._words, ids)
            while self._words[2]:
                self._grow(self._log2 + 1)
                local, fresh = native.relabel(self._words, ids)
        self._ids.append(fresh)
        return local, fresh

    def insert_sampled(
        self,
        csc: CSC,
        seeds: Tensor,
        fanout: int,
        *,
        key: int,
        replace: bool = False,
        buffers: BufferPool | None = None,
    ) -> NumberedNeighbors:
        """`insert` of what `sample_neighbors` draws uniformly, in one op on the host: neighbours are numbered while
        others are drawn. Where the table has to grow, they are drawn again. Edges are written to one of `buffers`."""
        num_seeds = seeds.numel()
        if 2 * num_seeds > self._rows.numel():
            self._rows = torch.from_numpy(np.empty(2 * num_seeds, np.int64))  # MemoryError, where torch has another
        most = 2 * num_seeds * max(fanout, 0)  # beyond that, and of all in-edges, the op takes what it needs
        room = self._rows[:0]
        if buffers is not None and most <= _MOST_ROOM:
            room = buffers.empty((most,), torch.int64)
        arguments = (csc.indptr, csc.indices, seeds, fanout, replace, key, self._rows, room)
        indptr, edges, fresh = native.sample_into_table(self._words, *arguments)
        while self._words[2]:
            self._grow(self._log2 + 1)
            indptr, edges, fresh = native.sample_into_table(self._words, *arguments)
        num_edges = int(indptr[-1])
        if 2 * num_edges <= room.numel():
            edges = room[: 2 * num_edges].view(2, num_edges)
        self._ids.append(fresh)
        return NumberedNeighbors(indptr, edges[0], edges[1], fresh)

    def lookup(self, ids: Tensor) -> Tensor:
        """The local id of each, -1 for ids never inserted."""
        return native.lookup(self._words, ids)

    def _make_room(self, num_more: int) -> None:
        log2 = self._log2_for(num_more, self._log2)
        if log2 > self._log2:
            self._grow(log2)

    def _log2_for(self, num_more: int, least: int) -> int:
        """Of a table for the ids that are known and so many more, and at least this large."""
        num_ids = sum(ids.numel() for ids in self._ids) + num_more
        # The device's table may be half full; on the CPU probing gets slow beyond three eighths.
        share = 4 if self._words.is_cuda else 3
        while 8 * num_ids > share << least:
            least += 1
        return least

    def _grow(self, log2: int) -> None:
        """At least so large. A small table may know more ids by now than one of twice its size is to have."""
        known = self._ids
        self._log2 = self._log2_for(0, log2)
        self.clear()
        self._ids = known
        for ids in known:
            native.relabel_seeds(self._words, ids)


def compact_scratch(num_ids: int, device: torch.device | str | int = "cpu") -> Tensor:
    """Scratch for `compact` calls in which no node type has more than num_ids seeds and ids together.

    CUDA devices need none: their allocator keeps it from call to call.
    """
    if torch.device(device).type == "cuda":
        return torch.empty(0, dtype=torch.int64, device="cpu")
    log2 = 10
    while 8 * num_ids > 3 << log2:
        log2 += 1
    return torch.empty(_HEADER + 2 * (1 << log2), dtype=torch.int64, device="cpu")


def compact(
    seeds: Sequence[Tensor], ids: Sequence[Tensor], types: Sequence[int], scratch: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """to_block for several node types at once.

    `seeds[t]` are the seeds of type t, `ids[k]` any ids of type `types[k]`. Returns, per type, its nodes (the seeds as
    given, repeats included, then every other id in first-seen order) and, per list, the local id of each entry.
    On a CUDA device, where all of them must be, it waits once for the numbers of nodes.
    """
    if scratch is None:
        per_type = [s.numel() for s in seeds]
        for k, t in enumerate(types):
            if not 0 <= t < len(seeds):
                raise ValueError(f"types[{k}] must be in [0, {len(seeds)}), got {t}")
            per_type[t] += ids[k].numel()
        device = next((t.device for t in (*seeds, *ids) if t.is_cuda), "cpu")
        scratch = compact_scratch(max(per_type, default=1), device)
    return native.compact(scratch, list(seeds), list(ids), list(types))


@torch.library.register_fake("gnnsys::relabel")
def _(table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    fresh = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(ids.shape[0], dtype=torch.int64), ids.new_empty(fresh)


@torch.library.register_fake("gnnsys::sample_into_table")
def _(table, indptr, indices, seeds, fanout, replace, key, rows, room):
    context = torch.library.get_ctx()
    edges = indptr.new_empty((2, context.new_dynamic_size()))
    return indptr.new_empty(seeds.shape[0] + 1), edges, indices.new_empty(context.new_dynamic_size())


@torch.library.register_fake("gnnsys::lookup")
def _(table: Tensor, ids: Tensor) -> Tensor:
    return ids.new_empty(ids.shape[0], dtype=torch.int64)


@torch.library.register_fake("gnnsys::relabel_seeds")
def _(table: Tensor, ids: Tensor) -> None:
    return None


@torch.library.register_fake("gnnsys::id_table_init")
def _(table: Tensor, log2_slots: int, wide: bool) -> None:
    return None


@torch.library.register_fake("gnnsys::compact")
def _(scratch: Tensor, seeds: list[Tensor], ids: list[Tensor], types: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    context = torch.library.get_ctx()
    nodes = [s.new_empty(context.new_dynamic_size()) for s in seeds]
    return nodes, [i.new_empty(i.shape[0], dtype=torch.int64) for i in ids]


_SEEDS_PER_CHUNK = 256


@tells_workspace("sample_into_table", "cpu")
def _(expected, table, indptr, indices, seeds, fanout, replace, key, rows, room) -> int:
    """Neighbours until they are numbered: of a chunk of seeds on one thread, else of all."""
    num_seeds, num_edges = seeds.numel(), indices.numel()
    neighbors = expected.taken(num_seeds, fanout, num_edges)
    if expected.threads(num_seeds, _SEEDS_PER_CHUNK) == 1:
        most = expected.degree(num_edges) if fanout < 0 else fanout
        neighbors = min(neighbors, 3 * _SEEDS_PER_CHUNK * most)  # three times while the array grows
    return indices.element_size() * neighbors + drawing_bytes(expected, num_seeds, fanout)


_SPARSE_IDS = 1 << 20  # fewer ids get three slots each
_IDS_PER_TILE = 1 << 10


@tells_workspace("relabel", "cuda")
def _(expected: Expected, table: Tensor, ids: Tensor) -> int:
    return 8 * (ids.numel() // _IDS_PER_TILE + 8) + 4 * (ids.numel() + 1)


@tells_workspace("compact", "cuda")
def _(expected: Expected, scratch: Tensor, seeds: Sequence[Tensor], ids: Sequence[Tensor], types: Sequence[int]) -> int:
    """Narrow slots; where an id turns out to be 2^32 or more, as much again and a half for wide ones."""
    num_ids = [each.numel() for each in seeds]
    for t, each in zip(types, ids, strict=True):
        num_ids[t] += each.numel()
    slots = sum((3 * n if n < _SPARSE_IDS else n + n // 2) + 12 for n in num_ids)
    listed = sum(each.numel() for each in ids)
    return 8 * (slots + listed // _IDS_PER_TILE + len(ids) + len(seeds) + 16) + 4 * (listed + 1)


takes_outputs_only("lookup", "relabel_seeds", "id_table_init")
takes_outputs_only("relabel", "compact", device_types=["cpu"])  # their tables are arguments
