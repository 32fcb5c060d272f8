"""What `gnnsys bench` does with files: `suite` runs a matrix of jobs, `compare` judges two results, `plot` draws."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

BUSY = 1.5  # load average per core from which times are told to be in doubt


def run_file(args: argparse.Namespace) -> int:
    """Prints a line per cell; 1 where --check is given and a cell has failed."""
    from gnnsys.bench import RunOptions, read_description, run_matrix

    (file,) = _files(args, 1, "FILE")
    description = read_description(file, _cluster_keys(args))
    out = args.out or Path(f"{description.name}-results")
    options = RunOptions(only=args.only, retry=args.retry, cache=args.cache)
    rows = run_matrix(description, out, options, show=partial(print, flush=True))
    failed = sum(row.status != "done" for row in rows)
    print(f"{len(rows) - failed} cells done, {failed} failed; results in {out}")
    return 1 if args.check and failed else 0


def compare_files(args: argparse.Namespace) -> int:
    """Prints a line per case; 1 where something is slower or did not run."""
    from gnnsys.bench import CaseChange, compare_results, read_results

    before, after = (read_results(path) for path in _files(args, 2, "BEFORE AFTER"))
    options = {} if args.tolerance is None else {"tolerance": args.tolerance}
    changes = compare_results(before, after, **options)
    print(CaseChange.header())
    for change in changes:
        print(change.line())
    for name, value in before.hardware.items():
        if value != after.hardware.get(name):
            print(f"note: another {name}: {value} before, {after.hardware.get(name)} after")
    for name in sorted(set(before.versions) | set(after.versions)):
        old, new = before.versions.get(name), after.versions.get(name)
        if old != new:
            print(f"note: another version of {name}: {old} before, {new} after")
    for when, result in (("before", before), ("after", after)):
        if result.loads and max(result.loads) > BUSY:
            load = f"{max(result.loads):.1f} programs wanted each core"
            print(f"note: the machine was busy {when}: {load}; times may differ")
    counts = {
        verdict: sum(c.verdict == verdict for c in changes) for verdict in dict.fromkeys(c.verdict for c in changes)
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if args.json is not None:
        args.json.write_text(json.dumps([change.to_json() for change in changes], indent=1) + "\n")
    return 1 if any(change.is_worse for change in changes) else 0


def plot_files(args: argparse.Namespace) -> int:
    """Prints the names of the pictures."""
    from gnnsys.bench import plot_results

    (results,) = _files(args, 1, "RESULTS")
    for path in plot_results(results, args.out, args.kind):
        print(path)
    return 0


def _cluster_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a cluster, by the keys of a suite's file."""
    if args.hosts is not None and args.slurm:
        raise ValueError("give --hosts FILE or --slurm, not both")
    keys = {"hosts_file": args.hosts and args.hosts.absolute(), "slurm": args.slurm or None, "ssh": args.ssh}
    return {key: value for key, value in keys.items() if value is not None}


def _files(args: argparse.Namespace, count: int, words: str) -> list[Path]:
    if len(args.files) != count:
        raise ValueError(f"write `gnnsys bench {args.suite} {words}`; got {len(args.files)} files")
    return args.files


WITH_FILES: dict[str, Callable[[argparse.Namespace], int]] = {
    "suite": run_file,
    "compare": compare_files,
    "plot": plot_files,
}
