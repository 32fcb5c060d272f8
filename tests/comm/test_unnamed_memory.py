"""Memory between processes: others read what its owner writes, nobody changes its size, and nothing else is opened."""

import os
import subprocess
import sys

import pytest
import torch

from gnnsys.comm import UnnamedMemory

READ = """
import json, sys
from gnnsys.comm import UnnamedMemory
import torch
memory = UnnamedMemory.open("test", json.loads(sys.argv[1]))
print(memory.view(torch.int32, 8, 3).tolist(), memory.header[2].item(), memory.is_orphaned, flush=True)
"""


def test_another_process_reads_what_the_owner_has_written():
    memory = UnnamedMemory.create("test", 64)
    memory.view(torch.int32, 8, 3).copy_(torch.tensor([3, 1, 4]))
    memory.header[2] = 7
    address = repr(memory.address()).replace("'", '"')
    told = subprocess.run([sys.executable, "-c", READ, address], capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == "[3, 1, 4] 7 False", told.stderr


def test_who_holds_memory_is_told_that_its_owner_has_ended():
    owner = subprocess.Popen(
        [sys.executable, "-c", "from gnnsys.comm import UnnamedMemory\nm = UnnamedMemory.create('test', 8)\n"
         "print(*m.address().values(), flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pid, fd, token = map(int, owner.stdout.readline().split())
    memory = UnnamedMemory.open("test", {"pid": pid, "fd": fd, "token": token})
    assert not memory.is_orphaned
    owner.communicate("\n", timeout=60)
    assert memory.is_orphaned
    assert UnnamedMemory.open("test", {"pid": pid, "fd": fd, "token": token}) is None


def test_its_size_never_changes():
    memory = UnnamedMemory.create("test", 100)
    for size in (0, 1000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.address()["fd"], size)


def test_what_is_no_such_memory_is_not_opened():
    memory = UnnamedMemory.create("test", 8)
    address = memory.address()
    assert UnnamedMemory.open("test", address) is not None
    assert UnnamedMemory.open("test", {**address, "token": address["token"] ^ 1}) is None
    resizable = os.memfd_create("gnnsys-test")
    reading, writing = os.pipe()
    try:
        os.write(resizable, bytes(memory.header) + bytes(8))  # the same, but for the seals
        for fd in (resizable, reading, writing, 987654):
            assert UnnamedMemory.open("test", {**address, "fd": fd}) is None
    finally:
        for fd in (resizable, reading, writing):
            os.close(fd)
    memory.close()
    memory.close()
    assert not memory.is_owned and UnnamedMemory.open("test", address) is None


@pytest.mark.parametrize(("offset", "count"), [(-8, 1), (0, 9), (8, 8), (64, 1), (0, -1), (4, 1), (0, 1 << 61)])
def test_nothing_beyond_it_is_shown(offset, count):
    with pytest.raises(ValueError, match="are not in a memory of 64 bytes"):
        UnnamedMemory.create("test", 64).view(torch.int64, offset, count)


def test_memory_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="for test cannot be had"):
        UnnamedMemory.create("test", 1 << 60)
