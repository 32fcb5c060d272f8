"""What jobs leave behind in a worker, in random orders: the next job's bits are those of a fresh process.

    python -m tests.fuzz.jobs --seconds 600 --seed 1
    python -m tests.fuzz.jobs --seed 17 --one

A case is a random sequence of one to six jobs in one worker, which follows from its seed. Each leaves behind one of the
`POLLUTERS` of tests/jobs/polluters.py. Then either the worker is replaced, or every one of the `IDIOMS` there gives the
bits of a fresh process. Cases have the seeds SEED, SEED + 1, ...; those that fail are named.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

import torch

from gnnsys.jobs.fresh_state import FreshState
from tests.jobs.polluters import POLLUTERS, prepare, try_polluters


def names_of(seed: int) -> list[str]:
    """Mostly what a worker puts back: after anything else the sequence is over."""
    chance = random.Random(seed)
    usual = [name for name, (_, is_kept) in POLLUTERS.items() if is_kept]
    names = [chance.choice(usual) for _ in range(chance.randint(1, 6))]
    return [*names[:-1], chance.choice(list(POLLUTERS))] if chance.random() < 0.3 else names


def run_case(seed: int, state: FreshState, wanted: dict[str, str]) -> str | None:
    """What went wrong, if anything did."""
    names = names_of(seed)
    told = try_polluters(state, names, wanted)
    if not told.get("error") and not told["other"]:
        return None
    return f"{names}: {json.dumps(told)}\nrepeat it: python -m tests.fuzz.jobs --seed {seed} --one"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="this seed alone")
    options = parser.parse_args(arguments)
    if torch.version.cuda is not None:
        parser.error("cases are forked from a process that has trained: run it with a torch without CUDA")
    out = sys.stdout
    state, wanted = prepare()
    until, seed, failed = time.monotonic() + options.seconds, options.seed, 0
    while True:
        told = run_case(seed, state, wanted)
        if told is not None:
            failed += 1
            print(f"seed {seed} fails:\n{told}", file=out, flush=True)
        seed += 1
        if options.one or failed >= 3 or time.monotonic() > until:
            break
    print(f"{seed - options.seed} cases from seed {options.seed} on, {failed} failed", file=out, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
