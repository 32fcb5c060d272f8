"""What the control groups of this process give it: time of processors, memory. Versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 60  # version 1 says "no limit" by a number about this large


@dataclass(frozen=True)
class GroupLimits:
    """`cores`: whose time may be used, `memory`: bytes; None where there is no limit. The tightest group counts."""

    cores: float | None = None
    memory: int | None = None
    memory_used: int = 0


def read_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> GroupLimits:
    """The tightest limits among this process's groups and those around them."""
    cores: list[float] = []
    memory: list[tuple[int, int, int]] = []  # left, limit, used
    for folder in _folders(root, own):
        quota, period = (_words(folder / "cpu.max") + [""] * 2)[:2]
        if not quota:
            quota, period = (" ".join(_words(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():  # "max" and -1 are no limit
            cores.append(int(quota) / int(period))
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = " ".join(_words(folder / limit_name))
            if limit.isdecimal() and int(limit) < NO_LIMIT:
                used = max(0, _number(folder / used_name) - _page_cache(folder))
                memory.append((int(limit) - used, int(limit), used))
    _, limit_bytes, used_bytes = min(memory, default=(0, None, 0))
    return GroupLimits(min(cores, default=None), limit_bytes, used_bytes)


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """The folder of each of this process's groups, and those around it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        top = root / controllers.removeprefix("name=")  # version 2 has no controllers here, and no folder for them
        folder = top / inside.lstrip("/")
        if not folder.is_dir():  # a container that sees the host's name of its group has it at the top
            folder = top
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _page_cache(folder: Path) -> int:
    """Bytes of files that the kernel gives back when programs need memory."""
    found = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def _number(file: Path) -> int:
    words = _words(file)
    return int(words[0]) if words and words[0].isdecimal() else 0


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
