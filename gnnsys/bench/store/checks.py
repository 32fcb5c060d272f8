"""What it costs that nobody is trusted: instructions of all checks of a pull, beside a fiftieth of those of the pull.

Counted, not timed: the figure is the same on a busy machine. Where the machine cannot count, user CPU time stands in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.bench.store.pulls import NUM_ROWS
from gnnsys.bench.workload import Workload

SHARE = 0.02
_SECONDS = 600
_MODULE = "gnnsys.bench.store.count_checks"


def checks(work: Workload) -> Iterator[Case]:
    """In millions of instructions, or in milliseconds of CPU time: both sides in the same."""
    share, num_rows = "a fiftieth of the pull", min(NUM_ROWS, work.sizes.num_nodes)

    def sides() -> dict[str, Side]:
        found = work.once("checks", lambda: count(num_rows))
        return {OURS: Side(lambda: found["checks"]), share: Side(lambda: SHARE * found["pull"])}

    yield Case(f"checks/{num_rows} rows", value("M instr or CPU ms"), sides, (Versus((share,), 1.0),), repeats=1)


def count(num_rows: int) -> dict[str, Any]:
    """`pull` and `checks` in `unit`, per pull."""
    command = [sys.executable, "-m", _MODULE, str(num_rows)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=env)
    if ran.returncode:
        raise RuntimeError(f"the checks of a pull could not be counted: {ran.stderr[-1000:]}")
    return dict(json.loads(ran.stdout))
