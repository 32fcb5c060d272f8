"""Cores, memory, limits and clock of this machine, as the kernel and its control groups give them to this process."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnsys.doctor.control_groups import read_limits
from gnnsys.doctor.diagnosis import ADVICE, FAILS, Diagnosis
from gnnsys.observe import format_size

MEMORY_NEEDED = 512 << 20  # bytes that torch and a small model take
SHARED_NEEDED, SHARED_ADVISED = 32 << 20, 1 << 30
FILES_NEEDED, FILES_ADVISED = 256, 4096
LOCKED_ADVISED = 1 << 30
PROBED = 64 << 20  # bytes that torch is asked for, to see which pages it gets
CLOCKS = Path("/sys/devices/system/clocksource/clocksource0")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What this process may use. Sizes in bytes; None where the kernel does not say, or has no limit.

    `cores`: that it may run on; `core_quota`: whose time its control groups give it. `threads`: torch's. `open_files`
    and `locked`: the limit now, and the most that may be asked for. `huge_bytes`: how much of `PROBED` bytes from
    torch's allocator lies in huge pages.
    """

    machine: str = "x86_64"
    cores: int
    core_quota: float | None = None
    threads: int | None = None
    threads_wanted: str | None = None  # OMP_NUM_THREADS
    memory_free: int | None = None
    memory_limit: int | None = None
    memory_used: int = 0  # of that limit
    shared_total: int | None = None
    shared_free: int = 0
    gpus: int = 0
    open_files: tuple[int | None, int | None] = (None, None)
    locked: tuple[int | None, int | None] = (None, None)
    huge_pages: str | None = None  # always, madvise or never
    asks_for_huge_pages: bool = False  # THP_MEM_ALLOC_ENABLE
    huge_bytes: int | None = None
    clock: str | None = None
    clocks: tuple[str, ...] = ()

    @property
    def usable_cores(self) -> int:
        return self.cores if self.core_quota is None else max(1, min(self.cores, int(self.core_quota)))

    @property
    def usable_memory(self) -> int | None:
        """Bytes that can still be had: of the machine, and of the control groups."""
        left = None if self.memory_limit is None else max(0, self.memory_limit - self.memory_used)
        known = [each for each in (self.memory_free, left) if each is not None]
        return min(known, default=None)


def read_machine(host: Mapping[str, Any]) -> MachineFacts:
    """`host`: what `gnnsys.launch.host_facts` says of this machine."""
    limits = read_limits()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    threads, huge_bytes = _asked_of_torch()
    chosen = re.search(r"\[(\w+)\]", _text(HUGE_PAGES))
    return MachineFacts(
        machine=platform.machine(),
        cores=host["cores"],
        core_quota=limits.cores,
        threads=threads,
        threads_wanted=os.environ.get("OMP_NUM_THREADS"),
        memory_free=host["memory_free"],
        memory_limit=limits.memory,
        memory_used=limits.memory_used,
        shared_total=None if shared is None else shared.total,
        shared_free=0 if shared is None else shared.free,
        gpus=host["gpus"],
        open_files=_limits(resource.RLIMIT_NOFILE),
        locked=_limits(resource.RLIMIT_MEMLOCK),
        huge_pages=chosen and chosen[1],
        asks_for_huge_pages=os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
        huge_bytes=huge_bytes,
        clock=_text(CLOCKS / "current_clocksource").strip() or None,
        clocks=tuple(_text(CLOCKS / "available_clocksource").split()),
    )


def judge_machine(facts: MachineFacts) -> list[Diagnosis]:
    return [
        judge_threads(facts),
        judge_memory(facts),
        judge_shared_memory(facts),
        judge_open_files(facts),
        judge_locked_memory(facts),
        judge_huge_pages(facts),
        judge_clock(facts),
    ]


def judge_threads(facts: MachineFacts) -> Diagnosis:
    """torch's threads, which are ours too, against the cores whose time there is."""
    subject, cores = "threads", facts.usable_cores
    said = f"{facts.cores} cores"
    if facts.core_quota is not None and facts.core_quota < facts.cores:
        said += f", the time of {facts.core_quota:g} by control group"
    if facts.threads is None:
        return Diagnosis(subject, said)
    said = f"{facts.threads} threads, {said}"
    remedy = f"export OMP_NUM_THREADS={cores} (divided by the ranks of this machine)"
    if facts.threads > cores:
        return Diagnosis(subject, said, "threads without a core of their own wait for each other", remedy, ADVICE)
    if facts.threads_wanted and facts.threads < cores / 2:
        why = f"OMP_NUM_THREADS is {facts.threads_wanted}, and one process leaves cores idle"
        return Diagnosis(subject, said, why, remedy, ADVICE)
    return Diagnosis(subject, said)


def judge_memory(facts: MachineFacts) -> Diagnosis:
    subject, left = "memory", facts.usable_memory
    if left is None:
        return Diagnosis(subject, "the kernel does not say how much is free")
    said = f"{format_size(left)} can be had"
    if facts.memory_limit is not None:
        said += f", of a limit of {format_size(facts.memory_limit)} by control group"
    if left < MEMORY_NEEDED:
        why = f"a rank takes {format_size(MEMORY_NEEDED)} at the least, and is killed where there is less"
        return Diagnosis(subject, said, why, "end other programs, or raise the container's memory limit", FAILS)
    return Diagnosis(subject, said)


def judge_shared_memory(facts: MachineFacts) -> Diagnosis:
    """/dev/shm. Rows that our ranks share are in memory of no name, which it does not limit."""
    subject, remedy = "/dev/shm", "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    why = "NCCL keeps buffers between GPUs there, and torch's DataLoader its batches"
    state = FAILS if facts.gpus > 1 else ADVICE
    if facts.shared_total is None:
        return Diagnosis(subject, "not there", why, remedy, state)
    said = f"{format_size(facts.shared_free)} free of {format_size(facts.shared_total)}"
    if facts.shared_free < SHARED_NEEDED:
        return Diagnosis(subject, said, why, f"{remedy}; remove old files in it", state)
    if facts.shared_free < SHARED_ADVISED:
        return Diagnosis(subject, said, why, remedy, ADVICE)
    return Diagnosis(subject, said)


def judge_open_files(facts: MachineFacts) -> Diagnosis:
    subject, (now, most) = "open files", facts.open_files
    said = f"{_limit(now)}, may be raised to {_limit(most)}"
    why = "part files and connections take one each, 64 for every rank of a job and more"
    if now is None or now >= FILES_ADVISED:
        return Diagnosis(subject, said)
    can_raise = most is None or most >= FILES_ADVISED
    remedy = (
        f"ulimit -n {FILES_ADVISED}" if can_raise else "set nofile in /etc/security/limits.conf, or --ulimit nofile"
    )
    return Diagnosis(subject, said, why, remedy, FAILS if now < FILES_NEEDED else ADVICE)


def judge_locked_memory(facts: MachineFacts) -> Diagnosis:
    """Only GPUs need it: part files are locked for them to be read in place."""
    subject, (now, most) = "locked memory", facts.locked
    said = "no limit" if now is None else f"{format_size(now)} at most"
    if not facts.gpus or now is None or now >= LOCKED_ADVISED:
        return Diagnosis(subject, said)
    remedy = (
        "ulimit -l unlimited" if most is None else "set memlock in /etc/security/limits.conf, or --ulimit memlock=-1"
    )
    return Diagnosis(subject, said, "GPUs cannot read part files by themselves, rows are copied first", remedy, ADVICE)


def judge_huge_pages(facts: MachineFacts) -> Diagnosis:
    """Whether large tensors lie in huge pages. What torch really got decides, not what is set."""
    subject = "huge pages"
    if facts.huge_pages is None:
        return Diagnosis(subject, "the kernel has none for programs")
    said = f"transparent huge pages are {facts.huge_pages!r}"
    if facts.huge_bytes is None:
        return Diagnosis(subject, said)
    if facts.huge_bytes >= PROBED // 2:
        return Diagnosis(subject, f"{said}, torch's tensors lie in them")
    why = "rows at random places miss the TLB: sums of 512-byte rows took 1.4 times as long on a Xeon"
    said += ", torch's tensors do not lie in them"
    if facts.huge_pages == "madvise" and not facts.asks_for_huge_pages:
        return Diagnosis(subject, said, why, "export THP_MEM_ALLOC_ENABLE=1", ADVICE)
    if facts.huge_pages == "never":
        remedy = f"echo madvise > {HUGE_PAGES} and export THP_MEM_ALLOC_ENABLE=1"
        return Diagnosis(subject, said, why, remedy, ADVICE)
    return Diagnosis(subject, f"{said} at this moment: memory is in pieces")  # the kernel gives them when it can


def judge_clock(facts: MachineFacts) -> Diagnosis:
    subject = "clock"
    if facts.clock not in SLOW_CLOCKS:
        return Diagnosis(subject, facts.clock or "the kernel does not say which")
    best = next((each for each in ("tsc", "kvm-clock") if each in facts.clocks), None)
    why = "to read it costs a microsecond or more, and stages read it for every batch"
    remedy = f"echo {best} > {CLOCKS}/current_clocksource" if best else "boot with tsc=reliable if the processor's is"
    return Diagnosis(subject, f"{facts.clock}", why, remedy, ADVICE)


def huge_bytes_at(address: int, smaps: str) -> int:
    """Bytes in huge pages of the mapping around an address, as /proc/self/smaps says.

    >>> huge_bytes_at(0x1800, "1000-2000 rw-p 0 0:0 0 \\nAnonHugePages:      2 kB\\n")
    2048
    """
    inside = False
    for line in smaps.splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def _asked_of_torch() -> tuple[int | None, int | None]:
    """torch's threads, and how much of a large tensor lies in huge pages; None for each where it cannot be known."""
    try:
        import torch
    except Exception:  # a broken torch is told of in `software.py`
        return None, None
    if not HUGE_PAGES.exists():
        return torch.get_num_threads(), None
    probe = torch.ones(PROBED, dtype=torch.uint8, device="cpu")  # written: pages come with the first write
    try:
        return torch.get_num_threads(), huge_bytes_at(probe.data_ptr() + PROBED // 2, _text(Path("/proc/self/smaps")))
    except OSError:
        return torch.get_num_threads(), None


def _limits(which: int) -> tuple[int | None, int | None]:
    now, most = (None if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(which))
    return now, most


def _limit(value: int | None) -> str:
    return "no limit" if value is None else f"{value:,}"


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
