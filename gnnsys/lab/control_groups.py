"""Control groups of a lab: limits on a host's CPU and memory, what it used, and every process it runs.

A host has one directory per hierarchy: version 1 has one each for cpu, memory and cpuacct, version 2 has a single one.
In it each command has a leaf of its own, so that everything it started, daemons included, can be found and killed.
Uses only the standard library, because the keeper imports this file by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTROLLERS = ("cpu", "memory", "cpuacct")
MOST_WEIGHT = 256.0  # the kernel's limit, in version 2 it is 100


@dataclass(frozen=True)
class Roots:
    """Where groups can be made: one directory per controller (version 1), or the same for all (version 2)."""

    version: int
    cpu: Path
    memory: Path
    cpuacct: Path | None = None

    def to_json(self) -> dict[str, str | int | None]:
        accounting = None if self.cpuacct is None else str(self.cpuacct)
        return {"version": self.version, "cpu": str(self.cpu), "memory": str(self.memory), "cpuacct": accounting}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Roots:
        accounting = value["cpuacct"]
        cpuacct = None if accounting is None else Path(accounting)
        return cls(value["version"], Path(value["cpu"]), Path(value["memory"]), cpuacct)

    def of(self, name: str) -> HostGroups:
        """The directories of one host, not made yet. `name` may be a path below the roots."""
        extra = [self.cpuacct / name] if self.cpuacct else []
        paths = dict.fromkeys([self.cpu / name, self.memory / name, *extra])  # two controllers may share a hierarchy
        return HostGroups(
            self.version, tuple(paths), self.cpu / name, self.memory / name, (self.cpuacct or self.cpu) / name
        )


@dataclass(frozen=True)
class Usage:
    """What a host has used: CPU seconds, peak memory in bytes, and seconds for which its quota throttled it."""

    cpu_seconds: float
    memory_peak: int
    throttled_seconds: float


@dataclass(frozen=True)
class HostGroups:
    """The directories of one host."""

    version: int
    paths: tuple[Path, ...]
    cpu: Path
    memory: Path
    account: Path

    def make(self, cpu: float | None, memory: int | None, period: float) -> None:
        """Makes the directories with limits: `cpu` in cores, `memory` in bytes, the quota's `period` in seconds."""
        for path in self.paths:
            path.mkdir(parents=True)
        if cpu is not None:
            self.set_cpu(cpu, period)
        if memory is not None:
            limit = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            (self.memory / limit).write_text(str(memory))

    def set_cpu(self, cpu: float | None, period: float) -> None:
        """Sets the CPU quota in cores; None is no limit."""
        microseconds = round(period * 1e6)
        quota = None if cpu is None else round(cpu * microseconds)
        if self.version == 1:
            (self.cpu / "cpu.cfs_quota_us").write_text("-1")  # the kernel may refuse a new period with the old quota
            (self.cpu / "cpu.cfs_period_us").write_text(str(microseconds))
            (self.cpu / "cpu.cfs_quota_us").write_text("-1" if quota is None else str(quota))
        else:
            (self.cpu / "cpu.max").write_text(f"{'max' if quota is None else quota} {microseconds}")

    def set_weight(self, weight: float) -> None:
        """Sets how many processes the group counts as beside others; the kernel has limits."""
        if self.version == 1:
            (self.cpu / "cpu.shares").write_text(str(min(262_144, max(2, round(1024 * weight)))))
        else:
            (self.cpu / "cpu.weight").write_text(str(min(10_000, max(1, round(100 * weight)))))

    def leaf(self, name: str) -> list[Path]:
        """Makes a leaf in every hierarchy. A process joins by writing 0 to each `cgroup.procs`."""
        for path in self.paths:
            (path / name).mkdir()
        return [path / name for path in self.paths]

    def usage(self) -> Usage:
        stat = _fields(self.cpu / "cpu.stat")
        if self.version == 1:
            accounted = self.account / "cpuacct.usage"
            cpu = int(accounted.read_text()) / 1e9 if accounted.exists() else float("nan")
            peak = int((self.memory / "memory.max_usage_in_bytes").read_text())
            return Usage(cpu, peak, stat.get("throttled_time", 0) / 1e9)
        peak_file = self.memory / "memory.peak"  # Linux 5.19 and later
        peak = int((peak_file if peak_file.exists() else self.memory / "memory.current").read_text())
        return Usage(stat["usage_usec"] / 1e6, peak, stat.get("throttled_usec", 0) / 1e6)


def processes(paths: Sequence[Path]) -> set[int]:
    """Pids of all processes in these directories and below."""
    found: set[int] = set()
    for path in paths:
        for folder, _, _ in os.walk(path):
            try:
                found.update(int(pid) for pid in (Path(folder) / "cgroup.procs").read_text().split())
            except OSError:
                continue  # removed meanwhile
    return found


def kill(paths: Sequence[Path], deadline: float = 10.0) -> None:
    """Kills all processes in these directories, also new ones, until none is left. TimeoutError at the deadline."""
    end = time.monotonic() + deadline
    while alive := {pid for pid in processes(paths) if not _is_zombie(pid)}:
        if time.monotonic() > end:
            raise TimeoutError(f"processes {sorted(alive)} in {paths[0]} are still there {deadline:g} s after SIGKILL")
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def remove(paths: Sequence[Path], deadline: float = 10.0) -> None:
    """Kills all processes in these directories, then removes the directories. Skips those that are gone already."""
    kill(paths, deadline)
    end = time.monotonic() + deadline
    for path in paths:
        for folder in [*sorted(_folders(path), key=lambda f: -len(f.parts))]:
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:  # a dead process is still being taken apart, or one has joined since
                    if time.monotonic() > end:
                        raise
                    kill([folder], deadline)
                    time.sleep(0.005)
                    continue
                break


def find_roots(proc: Path = Path("/proc/self")) -> Roots | str:
    """Where this process may make groups, below its own group; or a text that says why it cannot."""
    mounts = _mounts((proc / "mountinfo").read_text())
    own = _own((proc / "cgroup").read_text())
    if all(name in mounts and name in own for name in ("cpu", "memory")):
        paths = {name: _below(mounts[name], own[name]) for name in CONTROLLERS if name in mounts and name in own}
        if missing := [str(path) for path in paths.values() if not os.access(path, os.W_OK)]:
            return f"cannot write to {missing[0]}"
        return Roots(1, paths["cpu"], paths["memory"], paths.get("cpuacct"))
    if "" in mounts and "" in own:
        return _unified(mounts[""][0], _below(mounts[""], own[""]))
    return "no control groups (version 1 with cpu and memory, or version 2) are mounted"


def _unified(top: Path, own: Path) -> Roots | str:
    """Version 2: the nearest group, from our own upwards, whose children have or can get cpu and memory limits."""
    above = [own, *own.parents]
    above = above[: above.index(top) + 1]
    wanted = {"cpu", "memory"}
    for path in above:
        if wanted <= set(_words(path / "cgroup.subtree_control")) and os.access(path, os.W_OK):
            return Roots(2, path, path)
    for path in above:
        if not wanted <= set(_words(path / "cgroup.controllers")):
            continue
        try:  # refused if the group itself has processes
            (path / "cgroup.subtree_control").write_text("+cpu +memory")
        except OSError:
            continue
        return Roots(2, path, path)
    return f"no group from {own} up to {top} can give its children cpu and memory limits"


def _mounts(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """Controller ("" for version 2) -> (mount point, group that is mounted there)."""
    found: dict[str, tuple[Path, str]] = {}
    for line in mountinfo.splitlines():
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[fields.index("-") + 3]
        if kind == "cgroup2":
            found.setdefault("", (Path(fields[4]), fields[3]))
        elif kind == "cgroup":
            for name in options.split(","):
                found.setdefault(name, (Path(fields[4]), fields[3]))
    return found


def _own(cgroup: str) -> dict[str, str]:
    """Controller ("" for version 2) -> this process's group."""
    lines = [line.split(":", 2) for line in cgroup.splitlines()]
    return {name: path for _, names, path in lines for name in names.split(",")}


def _below(mount: tuple[Path, str], group: str) -> Path:
    point, root = mount
    relative = os.path.relpath(group, root)
    return point if relative.startswith("..") else point / relative


def _folders(path: Path) -> list[Path]:
    return [Path(folder) for folder, _, _ in os.walk(path)]


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True
