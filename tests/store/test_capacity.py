"""How much memory there is: of the machine, and of every cgroup around this process."""

from __future__ import annotations

import os

import pytest

from gnnsys.store import capacity

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def make(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 900 MiB free, whose /proc and cgroups are files of the test."""
    monkeypatch.setattr(capacity, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path / "cgroup")
    make(tmp_path / "proc", {"meminfo": f"MemTotal: 1 kB\nMemAvailable:  {900 << 10} kB"})
    return tmp_path


@pytest.mark.parametrize(
    ("own", "files", "limit", "free"),
    [
        ("0::/", {}, None, 900),
        ("0::/", {"memory.max": "max", "memory.current": 5}, None, 900),
        ("0::/", {"memory.max": 500 * MIB, "memory.current": 100 * MIB}, 500, 400),
        (  # the limit of a user's slice, above a service without one
            "0::/user.slice/job",
            {
                "user.slice/memory.max": 300 * MIB,
                "user.slice/memory.current": 250 * MIB,
                "user.slice/memory.stat": f"anon 7\ninactive_file {20 * MIB}\nactive_file {5 * MIB}\nshmem 9",
                "user.slice/job/memory.max": "max",
                "user.slice/job/memory.current": 200 * MIB,
            },
            300,
            75,
        ),
        ("0::/job", {"job/memory.max": "max", "job/memory.high": 200 * MIB, "job/memory.current": 1}, 200, 199),
        ("0::/../../outside", {"memory.max": 64 * MIB, "memory.current": 80 * MIB}, 64, 0),  # a container's own root
        (
            "4:memory:/job\n0::/",
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/memory.usage_in_bytes": 1,
                "memory/job/memory.limit_in_bytes": 100 * MIB,
                "memory/job/memory.usage_in_bytes": 90 * MIB,
                "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}",
            },
            100,
            40,
        ),
    ],
)
def test_limits_of_all_cgroups_around_a_process_count(machine, own, files, limit, free):
    make(machine / "proc", {"self/cgroup": own})
    make(machine / "cgroup", files)
    assert capacity.free_memory() // MIB == free
    assert capacity.memory_for_tables() == int(0.8 * (MACHINE if limit is None else limit * MIB))


def test_here_and_now_there_is_some():
    assert 0 < capacity.free_memory() <= MACHINE
