"""Take part in a job as a host without ranks: serve its parts, make batches for trainers elsewhere.

`gnnsys launch --plan` runs it on such hosts by itself. What to do is in two variables: GNNSYS_PLAN, the plan, and
GNNSYS_ASSISTANTS, where such hosts listen and the job's key, which --make prints. It answers until it is interrupted.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--make", nargs="+", metavar="HOST=tcp://ADDRESS:PORT", help="print GNNSYS_ASSISTANTS, with a new key, and end"
    )


def run(args: argparse.Namespace) -> int:
    from gnnsys.session import Assistants, run_assistant

    if args.make:
        if wrong := [word for word in args.make if "=" not in word]:
            raise ValueError(f"--make must be HOST=tcp://ADDRESS:PORT, got {wrong[0]!r}")
        print(Assistants.with_new_key(dict(word.split("=", 1) for word in args.make)).text())
        return 0
    return run_assistant()
