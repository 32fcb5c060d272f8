"""`make chaos`: thirty jobs, each with something killed at a moment of its own. Exits with 1 if one of them minds.

python -m tests.chaos [--seeds 0-29] [--keep FOLDER]    a single seed replays a run, and its output is shown if it fails
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.job import place
from tests.chaos.runs import NUM_RUNS, draw, perform

OUTPUT = 8000  # characters of a failed job's that are shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=f"0-{NUM_RUNS - 1}", help="one, or a range such as 0-29")
    parser.add_argument("--keep", type=Path, help="a new folder for what the jobs leave")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    runs = [draw(seed) for seed in range(int(first), int(last or first) + 1)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        failed, began = 0, time.monotonic()
        with place(folder) as hosts:
            print(
                "two hosts of a lab" if hosts.lab else "two agents on this host: a lab cannot be made here", flush=True
            )
            print(f"{'seed':>4} {'verdict':8} {'seconds':>7} {'restarts':>8}  run", flush=True)
            for run in runs:
                ended, problems = perform(hosts, run)
                verdict = "FAILED" if problems else "ok"
                print(f"{run.seed:4} {verdict:8} {ended.seconds:7.1f} {ended.restarts:8}  {run}", flush=True)
                for problem in problems:
                    print(f"     {problem}", flush=True)
                if problems:
                    failed += 1
                    print(ended.output[-OUTPUT:], file=sys.stderr, flush=True)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{len(runs) - failed} of {len(runs)} runs ended in time, with every batch once and every bit the same "
        f"({minutes:.0f} min)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
