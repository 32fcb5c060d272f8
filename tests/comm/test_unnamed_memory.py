"""Memory between processes: others read what its owner writes, nobody changes its size, and nothing else is opened."""

import gc
import os
import resource
import subprocess
import sys
import warnings

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
    assert UnnamedMemory.open("another", address) is None, "of another kind"
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


def test_nothing_is_made_where_the_system_has_no_such_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="for test cannot be had"):
        UnnamedMemory.create("test", 8)


def test_nothing_is_made_without_a_free_descriptor():
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(ValueError, match="for test cannot be had"):
            UnnamedMemory.create("test", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert UnnamedMemory.create("test", 8).num_bytes == 8


def test_who_reads_it_neither_warns_nor_changes_what_warnings_are_shown():
    memory = UnnamedMemory.create("test", 64)
    torch.set_warn_always(True)  # torch's own, of which it shows most once
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            for _ in range(3):
                warnings.warn("shown once", stacklevel=1)
                opened = UnnamedMemory.open("test", memory.address())
                assert torch.equal(opened.view(torch.float32, 0, 16), torch.zeros(16))
    finally:
        torch.set_warn_always(False)
    assert [str(one.message) for one in shown] == ["shown once"]


def test_a_view_outlives_the_memory_that_gave_it():
    view = UnnamedMemory.create("test", 1 << 20).view(torch.int64, 0, 1 << 17)
    gc.collect()
    assert int(view.fill_(3).sum()) == 3 << 17


def test_a_forked_child_owns_nothing_of_its_parents():
    memory = UnnamedMemory.create("test", 8)
    child = os.fork()
    if child == 0:
        os._exit(int(memory.is_owned))
    assert os.waitpid(child, 0)[1] == 0
    assert memory.is_owned
