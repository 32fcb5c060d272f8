"""Say how much memory a training job takes at its peak, before it runs.

A job is a function that returns model, optimizer, loss and data (docs/estimate.md). Steps of it are traced on this
machine until they are alike: nothing is trained, and the device need not be here.

`--calibrate` measures this machine's GPU, so that jobs can be estimated for it. `--measure` runs the job there too, and
says what the estimate missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.planning import JobMemory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", metavar="MODULE:FUNCTION", help="such as train:job, of a module here or on PYTHONPATH"
    )
    parser.add_argument("--args", metavar="JSON", default="{}", help="its arguments, such as '{\"hidden\": 256}'")
    parser.add_argument(
        "--device", default="cpu", help="cpu, h200, what was calibrated, or cuda: the GPU here (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps to trace (default: until they repeat, 6 to 20)")
    parser.add_argument("--fit", metavar="NAME", help="the largest value of this argument that fits, as batch_size")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="16g: what --fit may take (default: the device's); without --fit, what the job takes",
    )
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE; - is standard output")
    parser.add_argument(
        "--measure", action="store_true", help="run the job on this machine's GPU too: what did the estimate miss?"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure what this machine's GPU takes beside tensors, and keep it (in --json FILE, else in the cache)",
    )
    parser.add_argument("--quick", action="store_true", help="with --calibrate: two sizes, to see that it works")


def run(args: argparse.Namespace) -> int:
    from gnnsys.planning import find_job

    if args.calibrate:
        return _calibrate(args)
    if args.quick:
        raise ValueError("--quick is of --calibrate: add it, or leave --quick away")
    if args.job is None:
        raise ValueError("name a job, MODULE:FUNCTION, such as train:job; or measure this GPU with --calibrate")
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: the folder {Path(args.json).parent} does not exist")
    job, arguments = find_job(args.job), _arguments(args.args)
    if args.measure:
        return _measure(args, job, arguments)
    found = _estimate(args, job, arguments)
    if args.json == "-":
        print(json.dumps(found.as_json(), indent=1))
        return 0
    print(found.table())
    if found.how == "traced":
        replayed = f"; {found.replayed_steps:,} steps replayed" if found.replayed_steps else ""
        print(f"traced {found.num_storages:,} tensors in {found.seconds:.2f} s{replayed}", file=sys.stderr)
    if args.json is not None:
        _write(args.json, found.as_json())
    return 0


def _estimate(args: argparse.Namespace, job: Callable[..., Any], arguments: dict[str, Any]) -> JobMemory:
    from gnnsys.observe import parse_size
    from gnnsys.planning import (
        TraceEnds,
        estimate_memory,
        fit_argument,
        format_bytes,
        probe_memory,
        stated_memory,
    )

    if args.fit is None:
        if args.memory is not None:
            return stated_memory(parse_size(args.memory), args.device)
        try:
            return estimate_memory(job, arguments, args.device, args.steps)
        except TraceEnds as error:
            print(f"not traced: {error}", file=sys.stderr)
            return probe_memory(job, arguments, args.device, *([] if args.steps is None else [args.steps]))
    capacity = None if args.memory is None else parse_size(args.memory)
    fitted = fit_argument(job, args.fit, arguments, args.device, capacity, args.steps)
    over = "; larger values take no more" if fitted.too_large is None else f"; {fitted.too_large} does not"
    print(
        f"{args.fit}={fitted.value} fits {format_bytes(fitted.capacity)}{over}",
        file=sys.stderr if args.json == "-" else sys.stdout,
    )
    return fitted.memory


def _measure(args: argparse.Namespace, job: Callable[..., Any], arguments: dict[str, Any]) -> int:
    from gnnsys.planning import compare_on_device

    if args.fit is not None or args.memory is not None:
        raise ValueError("--measure runs one job: leave --fit and --memory away")
    compared = compare_on_device(job, arguments, args.device, args.steps or 2)
    print(compared.table(), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json is not None:
        _write(args.json, compared.as_json())
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from gnnsys.planning import calibrate_device, save_device_profile

    if args.job is not None or args.fit is not None or args.measure:
        raise ValueError("--calibrate measures the GPU alone: leave the job and its options away")
    profile = calibrate_device(show=lambda line: print(line, file=sys.stderr, flush=True), is_quick=args.quick)
    path = save_device_profile(profile, None if args.json is None else Path(args.json))
    print(f"{profile.name} with torch {profile.torch} is --device {profile.kind} from now on: {path}")
    return 0


def _write(path: str, given: dict[str, Any]) -> None:
    if path == "-":
        print(json.dumps(given, indent=1))
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump(given, file, indent=1)


def _arguments(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--args must be JSON, such as '{{\"hidden\": 256}}', got {text!r}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--args must be a JSON object, such as '{{\"hidden\": 256}}', got {text!r}")
    return given
