"""How much of the processors an explaining process takes: all it can use of a core to spare, else a small share.

A processor is to spare where the machine had one idle and no control group of the process was near its limit. Both are
looked at over the last moments, in files of the kernel; where these cannot be read, nothing is to spare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_WINDOW_SECONDS = 0.5  # over which it is seen who uses the processors: the kernel counts in steps of 10 ms
_MOST_SECONDS = 5.0  # of one pause: a share that has become free meanwhile is noticed
_SPARE = 0.9  # of a core; a whole one is never quite idle


class ProcessorTimes(NamedTuple):
    """What the kernel has counted by some moment, in seconds."""

    at: float
    idle: float  # of all cores that this process may run on
    own: float  # this process's
    used: tuple[float | None, ...]  # by each limited control group
    throttled: int  # times that one of them was stopped at its limit


class Processors:
    """The cores that this process may use, as the kernel tells."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cores = sorted(os.sched_getaffinity(0))
        self._groups = [group for folder in _folders(proc, cgroups) if (group := _limited(folder)) is not None]
        self.count = min([float(len(self._cores)), *(limit for _, limit in self._groups)])

    def usage(self) -> ProcessorTimes | None:
        """None where the kernel does not tell."""
        try:
            told = (self._proc / "stat").read_text().splitlines()
            ticks = [line.split() for line in told if line.startswith("cpu") and line[3:4].isdigit()]
            idle = sum(int(each[4]) + int(each[5]) for each in ticks if int(each[0][3:]) in self._cores)
        except (OSError, ValueError, IndexError):
            return None
        counts = [_counts(folder / "cpu.stat") for folder, _ in self._groups]
        used = tuple(count["usage_usec"] / 1e6 if "usage_usec" in count else None for count in counts)
        throttled = sum(count.get("nr_throttled", 0) for count in counts)
        return ProcessorTimes(time.monotonic(), idle / os.sysconf("SC_CLK_TCK"), time.process_time(), used, throttled)

    def is_spare(self, before: ProcessorTimes, now: ProcessorTimes) -> bool:
        """Whether this process could have had a core to itself in between, and taken it from nobody."""
        seconds, own = max(1e-6, now.at - before.at), now.own - before.own
        if now.throttled != before.throttled or now.idle - before.idle + own < _SPARE * seconds:
            return False
        for (_, limit), (begin, end) in zip(self._groups, zip(before.used, now.used, strict=True), strict=True):
            used = limit * seconds if begin is None or end is None else end - begin - own
            if limit * seconds - used < _SPARE * seconds:
                return False
        return True


class Pace:
    """`pause` between pieces of work keeps this process to `share` of the cores' time while no core is to spare.

    Work is paid for after it was done: `pause` sleeps as long as the work since the last one is worth.
    """

    def __init__(
        self, share: float, processors: Processors | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._share, self._processors, self._sleep = share, processors or Processors(), sleep
        self._seen = self._processors.usage()
        self._is_spare = False
        self._worked = self._cpu_seconds()
        self._paid_until = time.monotonic()  # the moment from which on the share is free for more work
        self.slept = 0.0

    def skip(self) -> None:
        """What was done until now is not paid for."""
        self._worked, self._paid_until = self._cpu_seconds(), time.monotonic()

    def pause(self) -> None:
        """Sleeps where the work since the last pause was more than the share allows."""
        worked, now = self._cpu_seconds(), time.monotonic()
        cost = (worked - self._worked) / (self._share * self._processors.count)
        self._worked, self._paid_until = worked, max(now, self._paid_until) + cost
        while (left := self._paid_until - time.monotonic()) > 0:
            if self._look():
                self._paid_until = time.monotonic()
                return
            left = min(left, _MOST_SECONDS)
            self._sleep(left)
            self.slept += left

    def _look(self) -> bool:
        """Whether there is a core to spare: what the last look of some age saw."""
        usage, seen = self._processors.usage(), self._seen
        if usage is None or seen is None:
            self._seen = usage
            return False
        if usage.at - seen.at >= _WINDOW_SECONDS:
            self._seen, self._is_spare = usage, self._processors.is_spare(seen, usage)
        return self._is_spare

    @staticmethod
    def _cpu_seconds() -> float:
        return time.process_time()


def _folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The control groups that account this process's time, from its own up to the root of each hierarchy.

    In a container the path that /proc tells may lie outside of what is mounted: what is there of it is looked at.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            roots = [cgroups, cgroups / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [cgroups / "cpu", cgroups / controllers]
        else:
            continue
        steps = [step for step in path.split("/") if step not in ("", ".", "..")]
        root = next((each for each in roots if (each / "cgroup.procs").exists()), roots[0])
        for depth in range(len(steps), -1, -1):
            yield root.joinpath(*steps[:depth])


def _limited(folder: Path) -> tuple[Path, float] | None:
    """The group and its cores, where it may not use as many as there are."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return (folder, int(quota) / int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _counts(file: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
        return {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return {}
