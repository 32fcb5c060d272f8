"""Shared memory is read by other processes, leaves nothing behind, and tells them when it is gone."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gnnsys.store.memory import SharedRows

READER = """
import json, sys, torch
from gnnsys.store.memory import SharedRows
address = json.loads(sys.argv[1])
shared = SharedRows.open(address, (5, 3), torch.float32)
print(json.dumps(shared.rows.tolist()), flush=True)
sys.stdin.readline()
print(json.dumps([shared.rows[4, 2].item(), shared.dropped]), flush=True)
"""


def test_another_process_sees_rows_and_that_they_were_dropped():
    shared = SharedRows.create((5, 3), torch.float32)
    shared.rows.copy_(torch.arange(15).view(5, 3))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, json.dumps(shared.address())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert json.loads(reader.stdout.readline()) == shared.rows.tolist()
        shared.rows[4, 2] = 99
        shared.drop()
        last, _ = reader.communicate("go\n", timeout=60)
        assert json.loads(last) == [99.0, True]
    finally:
        reader.kill()
        reader.wait()


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
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    shared = SharedRows.create((1000, 3), torch.float64)
    assert set(os.listdir("/dev/shm")) == before[1]
    shared.drop()
    shared.drop()
    del shared
    assert set(os.listdir("/proc/self/fd")) == before[0]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (1,), (65, 2)])
def test_tables_of_any_size_are_zero_at_first(shape):
    shared = SharedRows.create(shape, torch.bfloat16)
    assert tuple(shared.rows.shape) == shape and not shared.rows.any()
    assert shared.versions.numel() == -(-shape[0] // 64)
    shared.drop()


def test_more_memory_than_there_can_be_is_refused():
    with pytest.raises(ValueError, match="cannot be had"):
        SharedRows.create((1 << 50, 1 << 10), torch.float64)
