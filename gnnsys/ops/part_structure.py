"""Cutting a part out of a CSC and fingerprinting what is in it: typed faces of cpu/partition/relabel_part.cpp and
fingerprint.cpp. CPU only: they run where graphs are written and read, never inside a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC

BITS_PER_WORD = 64


def empty_bits(num_ids: int) -> Tensor:
    """The empty set of ids in [0, num_ids): one bit each, in int64 words."""
    return torch.zeros(-(-num_ids // BITS_PER_WORD), dtype=torch.int64, device="cpu")


def mark_ids(bits: Tensor, ids: Tensor) -> int:
    """Adds `ids` to the set `bits`; how many of them are new, a repeated one counting once."""
    return native.mark_ids(bits, ids.contiguous())


class Halo(NamedTuple):
    """One hop of a part's halo: its global ids ascending, and the set that finds an id's place among them."""

    ids: Tensor
    bits: Tensor
    ranks: Tensor


def mark_halo(csc: CSC, columns: Tensor, global_ids: Tensor, own: range, bits: Tensor) -> None:
    """Adds to `bits` the global ids of all sources of `columns` that are not `own`.

    `global_ids` relabels sources of the CSC; `own` is the range of global ids that the part has.
    """
    native.mark_halo(csc.indptr, csc.indices, columns, global_ids, own.start, own.stop, bits)


def collect_halo(bits: Tensor, earlier: Sequence[Halo], *, wide: bool) -> Halo:
    """What is in `bits` and in no earlier hop; ids as int64 if `wide`, else int32. Changes `bits`."""
    ids, ranks = native.collect_halo(bits, [hop.bits for hop in earlier], wide)
    return Halo(ids, bits, ranks)


def local_columns(
    csc: CSC, columns: Tensor, global_ids: Tensor, own: range, halo: Sequence[Halo], *, positions: bool = False
) -> CSC:
    """The given columns with sources as int32 local ids: own nodes first, then each hop of the halo.

    A column's edges keep their order. With `positions`, `edge_ids` of the result are positions in `csc`.
    """
    indptr, local, where = native.local_columns(
        csc.indptr, csc.indices, columns, global_ids, own.start, own.stop,
        [hop.bits for hop in halo], [hop.ranks for hop in halo], positions,
    )  # fmt: skip
    return CSC(indptr, local, len(own) + sum(hop.ids.numel() for hop in halo), where if positions else None)


def fingerprint_edges(indptr: Tensor, indices: Tensor, dst: Tensor | None = None, src: Tensor | None = None) -> int:
    """128-bit hash of the multiset of (dst, rank in dst's column, src); columns may come in any order and number.

    `dst[i]` names column i, `src[j]` names source j; without them the numbers are the names. Fingerprints of two
    disjoint sets of columns add up (`add_fingerprints`).
    """
    return _as_int(native.fingerprint_edges(indptr, indices, dst, src))


def fingerprint_rows(rows: Tensor, ids: Tensor | None = None, *, first: int = 0) -> int:
    """128-bit hash of the multiset of (id, bytes of the row): row i has id `first + ids[i]`, or `first + i`."""
    return _as_int(native.fingerprint_rows(rows, ids, first))


def fingerprint_edge_rows(indptr: Tensor, rows: Tensor, dst: Tensor | None = None, order: Tensor | None = None) -> int:
    """128-bit hash of the multiset of (dst, rank in dst's column, bytes of the edge's row).

    The edge at position p has row `order[p]`, or p.
    """
    return _as_int(native.fingerprint_edge_rows(indptr, rows, dst, order))


def add_fingerprints(*parts: int) -> int:
    """The fingerprint of a union of disjoint sets: its two lanes add up, each modulo 2^64."""
    mask = (1 << 64) - 1
    return sum(part >> 64 for part in parts) % (1 << 64) << 64 | sum(part & mask for part in parts) % (1 << 64)


def _as_int(lanes: Tensor) -> int:
    first, second = lanes.tolist()
    return (first % (1 << 64)) << 64 | second % (1 << 64)
