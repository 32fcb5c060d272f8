import pytest
import torch

from gnnsys.ops import bucket_ids
from tests.support.grid import grid


@grid(dtype=[torch.int32, torch.int64], threads=[1, 2], num_ids=[0, 1, 1000, 70_000], many=[False, True])
def test_ids_are_grouped_by_owner_in_their_own_order(dtype, threads, num_ids, many):
    bounds = torch.tensor([0, 0, 40, 40, 100, 1000, 1000])  # with empty buckets first, in the middle and last
    if many:  # found by another way
        bounds = torch.cat([bounds[:5], torch.arange(110, 1001, 10), bounds[-1:]])
    ids = torch.randint(1000, (num_ids,), dtype=dtype, generator=torch.Generator().manual_seed(num_ids))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        counts, order, local = bucket_ids(ids, bounds)
    finally:
        torch.set_num_threads(before)
    owner = torch.searchsorted(bounds, ids.long(), right=True) - 1
    assert torch.equal(counts, torch.bincount(owner, minlength=bounds.numel() - 1))
    assert torch.equal(order, torch.sort(owner, stable=True).indices)
    assert torch.equal(local, (ids - bounds[owner].to(dtype))[order]) and local.dtype == dtype


def test_bounds_beyond_what_ids_of_32_bits_reach_are_no_owners_of_theirs():
    counts, _, local = bucket_ids(torch.tensor([5, 2**31 - 1], dtype=torch.int32), torch.tensor([0, 7, 2**32, 2**33]))
    assert counts.tolist() == [1, 1, 0] and local.tolist() == [5, 2**31 - 8]


def test_ids_outside_the_bounds_are_refused():
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"ids must be in \[0, 10\), got {bad} at position 1"):
            bucket_ids(torch.tensor([3, bad]), torch.tensor([0, 10]))


def test_bounds_must_ascend_from_zero():
    for bounds in ([0], [1, 5], [0, 5, 3]):
        with pytest.raises(ValueError, match="bounds must"):
            bucket_ids(torch.tensor([0]), torch.tensor(bounds))
