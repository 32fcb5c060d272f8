"""Shared memory leaves nothing behind, and tells its readers when it is gone. Other processes: test_processes."""

import gc
import os

import pytest
import torch

from gnnsys.store.shared_rows import SharedRows
from tests.support.processes import await_shared_memory_freed, shared_memory


def test_a_reader_sees_rows_change_and_that_they_were_dropped():
    shared = SharedRows.create((5, 3), torch.float32)
    shared.rows.copy_(torch.arange(15).view(5, 3))
    reader = SharedRows.open(shared.address(), (5, 3), torch.float32)
    assert reader.rows.data_ptr() != shared.rows.data_ptr(), "a map of its own, as in another process"
    assert torch.equal(reader.rows, shared.rows) and not reader.dropped
    shared.rows[4, 2] = 99
    shared.drop()
    del shared
    assert reader.rows[4, 2] == 99 and reader.dropped


def test_memory_that_is_not_ours_is_not_opened():
    shared = SharedRows.create((5, 3), torch.float32)
    address = shared.address()
    assert SharedRows.open(address, (5, 3), torch.float32) is not None
    assert SharedRows.open(address, (5, 300), torch.float32) is None
    assert SharedRows.open({**address, "token": 1}, (5, 3), torch.float32) is None
    assert SharedRows.open({**address, "fd": 987654}, (5, 3), torch.float32) is None
    assert SharedRows.open({**address, "pid": 1 << 30}, (5, 3), torch.float32) is None
    shared.drop()
    assert SharedRows.open(address, (5, 3), torch.float32) is None


def test_dropping_gives_the_descriptor_back_and_names_nothing():
    gc.collect()  # what tests before this one left to it would go in between
    before, names = set(os.listdir("/proc/self/fd")), shared_memory()
    shared = SharedRows.create((1000, 3), torch.float64)
    await_shared_memory_freed(names)  # of others, which have some for a moment
    shared.drop()
    shared.drop()
    del shared
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (1,), (65, 2)])
def test_tables_of_any_size_are_zero_at_first(shape):
    shared = SharedRows.create(shape, torch.bfloat16)
    assert tuple(shared.rows.shape) == shape and not shared.rows.any()
    assert shared.versions.numel() == -(-shape[0] // 64)
    shared.drop()


def test_more_memory_than_there_can_be_is_refused():
    with pytest.raises(ValueError, match="cannot be had"):
        SharedRows.create((1 << 50, 1 << 10), torch.float64)
