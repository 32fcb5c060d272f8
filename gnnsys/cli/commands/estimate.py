"""Say how much memory a training job takes at its peak, before it runs.

A job is a function that returns model, optimizer, loss and data (docs/estimate.md). Two steps of it are traced on this
machine: nothing is trained, and the device need not be here.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="MODULE:FUNCTION", help="such as train:job, of a module here or on PYTHONPATH")
    parser.add_argument("--args", metavar="JSON", default="{}", help="its arguments, such as '{\"hidden\": 256}'")
    parser.add_argument("--device", default="cpu", help="cpu or h200 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps to trace (default: %(default)s)")
    parser.add_argument("--fit", metavar="NAME", help="the largest value of this argument that fits, as batch_size")
    parser.add_argument("--memory", metavar="SIZE", help="16g: what may be taken, with --fit (default: the device's)")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE; - is standard output")


def run(args: argparse.Namespace) -> int:
    from gnnsys.observe import parse_size
    from gnnsys.planning import estimate_memory, find_job, fit_argument, format_bytes

    job, arguments = find_job(args.job), _arguments(args.args)
    if args.fit is None:
        if args.memory is not None:
            raise ValueError("--memory is what --fit fits into: add --fit batch_size, or leave it away")
        found = estimate_memory(job, arguments, args.device, args.steps)
    else:
        capacity = None if args.memory is None else parse_size(args.memory)
        fitted = fit_argument(job, args.fit, arguments, args.device, capacity, args.steps)
        found = fitted.memory
        over = "" if fitted.too_large is None else f"; {fitted.too_large} does not"
        print(
            f"{args.fit}={fitted.value} fits {format_bytes(fitted.capacity)}{over}",
            file=sys.stderr if args.json == "-" else sys.stdout,
        )
    if args.json == "-":
        print(json.dumps(found.as_json(), indent=1))
        return 0
    print(found.table())
    print(f"traced {args.steps} steps, {found.num_storages} tensors, in {found.seconds:.2f} s", file=sys.stderr)
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found.as_json(), file, indent=1)
    return 0


def _arguments(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--args must be JSON, such as '{{\"hidden\": 256}}', got {text!r}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--args must be a JSON object, such as '{{\"hidden\": 256}}', got {text!r}")
    return given
