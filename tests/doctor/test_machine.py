"""Cores, memory, limits and clocks of other machines, told as facts; and what this one really has."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.doctor import ADVICE, FAILS, OK, Diagnosis
from gnnsys.doctor.control_groups import GroupLimits, read_limits
from gnnsys.doctor.machine import PROBED, MachineFacts, huge_bytes_at, judge_machine, read_machine
from gnnsys.launch import host_facts

GIB = 1 << 30
WELL = MachineFacts(
    cores=16,
    threads=16,
    memory_free=60 * GIB,
    shared_total=32 * GIB,
    shared_free=32 * GIB,
    open_files=(65536, 65536),
    locked=(None, None),
    huge_pages="madvise",
    huge_bytes=PROBED,
    clock="tsc",
    clocks=("tsc", "hpet"),
)


def wrong(facts: MachineFacts) -> list[Diagnosis]:
    return [each for each in judge_machine(facts) if each.state != OK]


def test_a_machine_that_lacks_nothing_has_a_line_for_each_thing():
    assert wrong(WELL) == []
    assert [each.subject for each in judge_machine(WELL)] == [
        *("threads", "memory", "/dev/shm", "open files", "locked memory", "huge pages", "clock"),
    ]


@pytest.mark.parametrize(
    ("changed", "state", "said"),
    [
        ({"core_quota": 4.5}, ADVICE, "16 threads, 16 cores, the time of 4.5 by control group: threads without"),
        ({"core_quota": 4.5}, ADVICE, "Remedy: export OMP_NUM_THREADS=4 (divided by the ranks"),
        ({"threads": 1, "threads_wanted": "1"}, ADVICE, "OMP_NUM_THREADS is 1, and one process leaves cores idle"),
        ({"memory_free": 300 << 20}, FAILS, "300.0 MiB can be had: a rank takes 512.0 MiB at the least"),
        ({"memory_limit": 2 * GIB, "memory_used": 2 * GIB - 1}, FAILS, "1 B can be had, of a limit of 2.0 GiB"),
        ({"shared_total": None, "shared_free": 0}, ADVICE, "/dev/shm       not there: NCCL"),
        ({"shared_total": 64 << 20, "shared_free": 64 << 20}, ADVICE, "Remedy: docker run --shm-size=8g"),
        ({"shared_free": 1 << 20, "gpus": 2}, FAILS, "1.0 MiB free of 32.0 GiB"),
        ({"open_files": (1024, 1 << 20)}, ADVICE, "1,024, may be raised to 1,048,576: part files"),
        ({"open_files": (1024, None)}, ADVICE, "Remedy: ulimit -n 4096"),
        ({"open_files": (128, 256)}, FAILS, "Remedy: set nofile in /etc/security/limits.conf"),
        ({"gpus": 1, "locked": (8 << 20, 8 << 20)}, ADVICE, "8.0 MiB at most: GPUs cannot read part files"),
        ({"gpus": 1, "locked": (8 << 20, None)}, ADVICE, "Remedy: ulimit -l unlimited"),
        ({"huge_bytes": 0}, ADVICE, "Remedy: export THP_MEM_ALLOC_ENABLE=1"),
        (
            {"huge_bytes": 0, "huge_pages": "never"},
            ADVICE,
            "Remedy: echo madvise > /sys/kernel/mm/transparent_hugepage",
        ),
        ({"clock": "hpet"}, ADVICE, "Remedy: echo tsc > /sys/devices/system/clocksource"),
        ({"clock": "acpi_pm", "clocks": ("acpi_pm",)}, ADVICE, "Remedy: boot with tsc=reliable"),
    ],
)
def test_each_thing_that_is_wrong_is_one_line_with_its_remedy(changed, state: str, said: str):
    (found,) = wrong(replace(WELL, **changed))
    assert found.state == state and said in str(found) and found.why


@pytest.mark.parametrize(
    "changed",
    [
        {"core_quota": 32.0},
        {"threads": 8, "threads_wanted": None},  # torch counts cores that are not threads of others
        {"threads": None},
        {"locked": (1 << 16, 1 << 16)},  # there is no GPU
        {"huge_pages": "always", "huge_bytes": 0},  # the kernel gives them when it has some
        {"huge_pages": "madvise", "huge_bytes": 0, "asks_for_huge_pages": True},
        {"huge_pages": None, "huge_bytes": None},
        {"clock": "arch_sys_counter", "clocks": ("arch_sys_counter",), "machine": "aarch64"},
        {"memory_free": None},
        {"memory_free": 60 * GIB, "memory_limit": 8 * GIB, "memory_used": GIB},
    ],
)
def test_what_needs_no_remedy_gets_none(changed):
    assert wrong(replace(WELL, **changed)) == []


def test_the_tightest_of_memory_and_its_limits_counts():
    assert replace(WELL, memory_limit=8 * GIB, memory_used=GIB).usable_memory == 7 * GIB
    assert replace(WELL, memory_limit=100 * GIB).usable_memory == 60 * GIB
    assert replace(WELL, memory_free=None).usable_memory is None
    assert replace(WELL, core_quota=0.5).usable_cores == 1


def make_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_control_group_of_version_2_counts(tmp_path: Path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/pod/box\n")
    make_group(root / "pod", cpu__max="250000 100000\n", memory__max="4000\n", memory__current="3000\n")
    make_group(root / "pod", memory__stat="anon 1500\ninactive_file 1000\n")
    make_group(root / "pod" / "box", cpu__max="max 100000\n", memory__max="max\n")
    assert read_limits(root, own) == GroupLimits(2.5, 4000, 2000)


def test_control_groups_of_version_1_count_too(tmp_path: Path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n")
    make_group(root / "cpu,cpuacct", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    none = {"memory__limit_in_bytes": f"{(1 << 63) - 4096}\n", "memory__usage_in_bytes": "5\n"}
    make_group(root / "memory", **none)
    make_group(root / "memory/docker/abc", memory__limit_in_bytes="9000\n", memory__usage_in_bytes="100\n")
    assert read_limits(root, own) == GroupLimits(1.5, 9000, 100)


def test_where_there_are_no_control_groups_there_are_no_limits(tmp_path: Path):
    assert read_limits(tmp_path, tmp_path / "own") == GroupLimits()
    (tmp_path / "own").write_text("0::/\n")
    make_group(tmp_path, cpu__max="max 100000\n")
    assert read_limits(tmp_path, tmp_path / "own") == GroupLimits()


def test_huge_pages_are_those_of_the_mapping_around_the_address():
    smaps = (
        "1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nAnonHugePages:      0 kB\n"
        "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 [anon]\nAnonHugePages:   65536 kB\n"
    )
    assert huge_bytes_at(0x7F0000001000, smaps) == 64 << 20
    assert huge_bytes_at(0x1000, smaps) == 0 == huge_bytes_at(0x9000, smaps)


def test_this_machine_is_read():
    facts = read_machine(host_facts())
    assert facts.cores == len(os.sched_getaffinity(0)) and facts.threads is not None
    assert facts.usable_memory is not None and facts.usable_memory > 0
    assert facts.huge_bytes is None or 0 <= facts.huge_bytes <= 2 * PROBED
    assert facts.clock is None or facts.clock in facts.clocks
