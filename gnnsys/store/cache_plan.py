"""Which rows a cache should hold, and what that spares: pure functions on arrays.

`visits` is the probability that a batch reads each row, float64 [num_rows] (`gnnsys.sampling.batch_visits`). A batch
reads a row once, so that sums of visits are rows per batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.store.device_cache import _SLOT_BYTES, highest

OWN_COST = 0.05  # a row over the bus (about 50 GB/s) beside one over the network (about 2.5 GB/s)


class ExpectedReads(NamedTuple):
    """What a batch reads on average, with some rows cached."""

    num_rows: float
    hit_rate: float  # of all rows that are read, those that the cache has
    remote_bytes: float  # of rows that other machines send
    own_bytes: float  # of rows of this machine that the cache has not


def remote_rows(bounds: Tensor, own_parts: Iterable[int]) -> Tensor:
    """Whether each row is another machine's, bool [num_rows]. Part p has the rows bounds[p] to bounds[p + 1].

    >>> remote_rows(torch.tensor([0, 2, 5, 6]), [1])
    tensor([ True,  True, False, False, False,  True])
    """
    ends = bounds.tolist()
    is_remote = torch.ones(ends[-1], dtype=torch.bool, device="cpu")
    for part in own_parts:
        if not 0 <= part < len(ends) - 1:
            raise ValueError(f"own_parts must be in [0, {len(ends) - 1}), got {part}")
        is_remote[ends[part] : ends[part + 1]] = False
    return is_remote


def rows_to_cache(
    visits: Tensor,
    is_remote: Tensor,
    *,
    row_bytes: int,
    bytes: int,
    remote_cost: float = 1.0,
    own_cost: float = OWN_COST,
) -> Tensor:
    """Ids of the rows that spare the most within `bytes` of memory, ascending:

        spared(u) = visits(u) * (remote_cost if u is remote else own_cost)
        count     = (bytes - 4 * num_rows) / row_bytes, rounded down: `DeviceCache` takes 4 bytes to look up any row

    The `count` highest are chosen, of equal ones those with the lowest ids. Rows that spare nothing are left out,
    whatever room there is: those that no batch reads, and all own ones where `own_cost` is 0, which says that they are
    on the device already. Costs are relative to each other, for instance seconds per row.

    >>> rows_to_cache(torch.tensor([0.9, 0.2, 0.0]), torch.tensor([False, True, True]), row_bytes=8, bytes=20)
    tensor([1])
    """
    _check(visits, is_remote, row_bytes)
    if not (0.0 <= own_cost < float("inf") and 0.0 <= remote_cost < float("inf")):
        raise ValueError(f"costs must be numbers of at least 0, got remote_cost={remote_cost} and own_cost={own_cost}")
    spared = torch.where(is_remote, visits * remote_cost, visits * own_cost)
    count = max(bytes - _SLOT_BYTES * visits.numel(), 0) // row_bytes
    return highest(spared, min(count, int((spared > 0).sum())))


def expected_reads(visits: Tensor, is_remote: Tensor, cached: Tensor, *, row_bytes: int) -> ExpectedReads:
    """What a full batch reads on average, where the rows `cached` (distinct ids) are in a cache:

        num_rows     = sum of visits(u)
        hit_rate     = sum over cached u of visits(u) / num_rows
        remote_bytes = row_bytes * sum over remote u that are not cached of visits(u), and own_bytes alike

    Loaders whose batches in flight share rows (`PipelineOptions(share=True)`) ask for fewer of those not cached.

    >>> expected_reads(torch.tensor([0.5, 0.5]), torch.tensor([False, True]), torch.tensor([1]), row_bytes=8)
    ExpectedReads(num_rows=1.0, hit_rate=0.5, remote_bytes=0.0, own_bytes=4.0)
    """
    _check(visits, is_remote, row_bytes)
    missed = visits.double().clone()
    missed[cached.long()] = 0.0
    num_rows, num_missed = float(visits.sum(dtype=torch.float64)), float(missed.sum())
    num_remote = float(missed[is_remote].sum())
    hit_rate = (num_rows - num_missed) / num_rows if num_rows else 0.0
    return ExpectedReads(num_rows, hit_rate, row_bytes * num_remote, row_bytes * (num_missed - num_remote))


def _check(visits: Tensor, is_remote: Tensor, row_bytes: int) -> None:
    if visits.dim() != 1 or not visits.dtype.is_floating_point:
        raise ValueError(f"visits must be floats, [num_rows], got {list(visits.shape)} {visits.dtype}")
    if is_remote.shape != visits.shape or is_remote.dtype != torch.bool:
        raise ValueError(f"is_remote must be bool {list(visits.shape)}, got {list(is_remote.shape)} {is_remote.dtype}")
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be at least 1, got {row_bytes}")
