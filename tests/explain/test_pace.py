"""How an explaining process shares the processors: by files as the kernel writes them and a made-up clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gnnsys.explain.pace import Pace, Processors, ProcessorTimes

TICKS = os.sysconf("SC_CLK_TCK")


def kernel(folder: Path, limits: dict[str, str], *, version: int = 2) -> Processors:
    """A machine whose cores have all been idle for ten seconds; the process is in /a/b, and groups have limits."""
    (folder / "proc" / "self").mkdir(parents=True)
    cores = range(max(os.sched_getaffinity(0)) + 1)
    lines = ["cpu  0 0 0 0 0", *(f"cpu{core} 5 0 5 {10 * TICKS} 0 0 0" for core in cores), "intr 1"]
    (folder / "proc" / "stat").write_text("\n".join(lines))
    root = folder / "cgroup" if version == 2 else folder / "cgroup" / "cpu"
    (folder / "proc" / "self" / "cgroup").write_text("0::/a/b\n" if version == 2 else "3:cpuset:/\n1:cpu:/a/b\n0::/\n")
    for name in ("", "a", "a/b"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cgroup.procs").write_text("")
        quota, period = limits.get(name, "max 100000" if version == 2 else "-1 100000").split()
        if version == 2:
            (root / name / "cpu.max").write_text(f"{quota} {period}")
            (root / name / "cpu.stat").write_text("usage_usec 3000000\nnr_periods 7\nnr_throttled 2\n")
        else:
            (root / name / "cpu.cfs_quota_us").write_text(quota)
            (root / name / "cpu.cfs_period_us").write_text(period)
            (root / name / "cpu.stat").write_text("nr_periods 7\nnr_throttled 2\nthrottled_time 9\n")
    return Processors(folder / "proc", folder / "cgroup")


@pytest.mark.parametrize("version", [1, 2])
def test_the_cores_are_those_of_the_tightest_group(tmp_path, version: int):
    processors = kernel(tmp_path, {"a": "45000 100000", "": "150000 100000"}, version=version)
    assert processors.count == pytest.approx(0.45)
    usage = processors.usage()
    assert usage is not None and usage.idle == pytest.approx(10.0 * len(os.sched_getaffinity(0)))
    assert usage.used == ((3.0, 3.0) if version == 2 else (None, None)) and usage.throttled == 4


def usage(at: float, idle: float, own: float = 0.0, used: float | None = None, throttled: int = 0) -> ProcessorTimes:
    return ProcessorTimes(at, idle, own, () if used is None else (used,), throttled)


def test_a_core_is_to_spare_where_one_was_idle_or_this_process_had_it(tmp_path):
    free = kernel(tmp_path / "free", {})
    assert free.is_spare(usage(0, 0), usage(1, 1.5))
    assert free.is_spare(usage(0, 0), usage(1, 0.2, own=0.8))
    assert not free.is_spare(usage(0, 0), usage(1, 0.2, own=0.1))


def test_no_core_is_to_spare_in_a_group_near_its_limit(tmp_path):
    limited = kernel(tmp_path, {"a": "200000 100000"})
    assert limited.is_spare(usage(0, 0, used=0.0), usage(1, 9, used=1.0))
    assert limited.is_spare(usage(0, 0, used=0.0), usage(1, 9, own=1.0, used=2.0))
    assert not limited.is_spare(usage(0, 0, used=0.0), usage(1, 9, used=1.5))
    assert not limited.is_spare(usage(0, 0, used=0.0), usage(1, 9, used=0.5, throttled=1))


def test_what_the_kernel_does_not_tell_is_not_to_spare(tmp_path):
    processors = Processors(tmp_path, tmp_path)
    assert processors.usage() is None and processors.count == len(os.sched_getaffinity(0))
    old = kernel(tmp_path / "old", {"a": "400000 100000"}, version=1)  # which does not count what groups use
    first, second = old.usage(), old.usage()
    assert first is not None and second is not None
    assert not old.is_spare(first._replace(at=0.0), second._replace(at=1.0, idle=first.idle + 9))


class MadeUpTime:
    """A clock that goes on by sleeping and working alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.worked = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.worked)

    def work(self, seconds: float) -> None:
        self.now, self.worked = self.now + seconds, self.worked + seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_it_takes_its_share_where_cores_are_short_and_all_of_one_that_is_idle(monkeypatch, tmp_path):
    clock, processors = MadeUpTime(monkeypatch), kernel(tmp_path, {"a": "50000 100000"})
    idle = {"per second": 0.0}
    monkeypatch.setattr(
        processors,
        "usage",
        lambda: ProcessorTimes(clock.now, clock.now * idle["per second"], clock.worked, (clock.worked,), 0),
    )
    pace = Pace(0.1, processors, clock.sleep)
    clock.work(3.0)
    pace.skip()  # what it took to start
    begin = clock.now
    for _ in range(100):
        clock.work(0.02)
        pace.pause()
    assert clock.worked - 3.0 == pytest.approx(0.1 * 0.5 * (clock.now - begin), rel=0.05)
    free = kernel(tmp_path / "free", {})
    idle["per second"] = 2.0
    monkeypatch.setattr(
        free, "usage", lambda: ProcessorTimes(clock.now, clock.now * idle["per second"], clock.worked, (), 0)
    )
    pace = Pace(0.1, free, clock.sleep)
    for _ in range(100):
        clock.work(0.02)
        pace.pause()
    slept = pace.slept
    assert slept < 1.5  # until it had looked once
    for _ in range(100):
        clock.work(0.02)
        pace.pause()
    assert pace.slept == slept
