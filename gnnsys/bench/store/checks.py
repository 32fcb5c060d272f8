"""What it costs that nobody is trusted: instructions of all checks of a pull, beside a fiftieth of those of the pull.

Counted by callgrind, not timed: the figure is the same on a busy machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.bench.store.pulls import NUM_ROWS
from gnnsys.bench.workload import Workload

SHARE = 0.02
_SECONDS = 1800
_MODULE = "gnnsys.bench.store.count_checks"


def checks(work: Workload) -> Iterator[Case]:
    share = "a fiftieth of the pull"
    count = min(NUM_ROWS, work.sizes.num_nodes)
    missing = None if shutil.which("callgrind_control") else {share: "valgrind is not installed"}

    def sides() -> dict[str, Side]:
        if missing is not None:
            return {}
        found = work.once("checks", lambda: {what: count_instructions(what, count) for what in ("pull", "checks")})
        return {OURS: Side(lambda: found["checks"] / 1e6), share: Side(lambda: SHARE * found["pull"] / 1e6)}

    unit = value("M instructions")
    yield Case(f"checks/{count} rows", unit, sides, (Versus((share,), 1.0),), repeats=1, missing=missing)


def count_instructions(what: str, num_rows: int) -> int:
    """Instructions of a pull, or of its checks, in a process of their own."""
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null"]
    ran = subprocess.run(
        [*valgrind, sys.executable, "-m", _MODULE, what, str(num_rows)],
        capture_output=True, text=True, timeout=_SECONDS, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    counted = re.search(r"Collected : (\d+)", ran.stderr)
    if ran.returncode or counted is None:
        raise RuntimeError(f"callgrind did not count {what}: {ran.stderr[-1000:]}")
    return int(counted[1])
