"""What it costs that nobody is trusted: instructions of all checks of a pull, of heartbeats, of checksums, of a key.

Counted, not timed: the figures are the same on a busy machine. Where the processor does not count, processes are
stepped, which takes minutes (at a hundred thousand instructions per second); where nobody may, CPU time stands in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from gnnsys.bench.case import OURS, Case, Side, Unit, Versus, score, value
from gnnsys.bench.instructions import STEPPED, TIMED, best_unit
from gnnsys.bench.workload import FULL, Workload

SHARE = 0.02
ROWS = (1_000, 10_000, 100_000)  # the last is what a training batch pulls, and has the target
_CURVE_ROWS = 100  # stepped: CURVE takes a hundred times the instructions of a copy
_CHECKSUM_ROWS = 1_000
_IDLE_SECONDS = 15  # two heartbeats, which come every 7.5 s
_SECONDS = 1800
_MODULE = "gnnsys.bench.store.count_checks"
# On x86 a copy may be one instruction that is stepped byte by byte: the C library is told to take others.
_NO_REPEATS = "glibc.cpu.x86_rep_movsb_threshold=0x7fffffffff:glibc.cpu.x86_rep_stosb_threshold=0x7fffffffff"
_PULL, _SHARE = "the pull", "a fiftieth of the pull"


def checks(work: Workload) -> Iterator[Case]:
    """In millions of instructions, or in milliseconds of CPU time where the machine has nothing better."""
    name = best_unit() if work.sizes == FULL else TIMED
    unit = value(name)

    def figure(what: str, num_rows: int, field: str = "counted", times: float = 1.0) -> Side:
        return Side(lambda: times * work.once(f"{what} of {num_rows}", lambda: count(what, num_rows, name))[field])

    def case(label: str, what: Side, beside: str, other: Side, target: float | None = None, unit: Unit = unit) -> Case:
        return Case(label, unit, lambda: {OURS: what, beside: other}, (Versus((beside,), target),), repeats=1)

    rows = [count for count in ROWS if count <= work.sizes.num_nodes]
    for num_rows in rows:
        ours, pull = figure("checks", num_rows), figure("pull", num_rows)
        yield case(f"checks/{num_rows} rows/all", ours, _PULL, pull)
        share = figure("pull", num_rows, times=SHARE)
        yield case(f"checks/{num_rows} rows", ours, _SHARE, share, 1.0 if num_rows == rows[-1] else None)
    yield case(f"checks/checksum of {_CHECKSUM_ROWS} rows", figure("checksum", _CHECKSUM_ROWS), _PULL,
               figure("pull", _CHECKSUM_ROWS))  # fmt: skip
    seconds = _IDLE_SECONDS if work.sizes == FULL else 1
    yield case("checks/a second of idle", figure("idle", seconds), f"a pull of {rows[0]} rows", figure("pull", rows[0]))
    num_rows = _CURVE_ROWS if name == STEPPED else rows[-1]
    yield case(f"checks/{num_rows} rows with a key", figure("key", num_rows), "no key", figure("pull", num_rows))
    for way in ("sealed", "CURVE"):
        speed = figure(f"{way} speed", rows[-1], "GB/s"), figure("pull", rows[-1], "GB/s")
        yield case(f"checks/{way}/{rows[-1]} rows", speed[0], "no key", speed[1], unit=score("GB/s"))


def count(what: str, num_rows: int, unit: str) -> dict[str, Any]:
    """What `count_checks` says of it."""
    command = [sys.executable, "-m", _MODULE, what, str(num_rows), unit]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": _NO_REPEATS}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=env)
    if ran.returncode:
        raise RuntimeError(f"{what} of {num_rows} rows could not be counted: {ran.stderr[-1000:]}")
    return dict(json.loads(ran.stdout))
