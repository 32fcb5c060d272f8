"""Time gnnsys beside what you would otherwise run.

Sides take turns on the same machine and the same input; the ratio says how many times better ours is.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnnsys.bench import SuiteOptions

OPTIONS: dict[str, tuple[str, ...]] = {  # what each use of the command reads; "" is a suite that times gnnsys
    "suite": ("out", "only", "retry", "check", "cache", "hosts", "slurm", "ssh"),
    "compare": ("tolerance", "json"),
    "plot": ("kind", "out"),
    "": ("only", "quick", "scale", "cache", "set", "json", "check", "against", "lab"),
    "--against": ("against", "rounds", "only", "quick", "scale", "cache", "set", "json", "lab"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suite",
        metavar="SUITE",
        help="ops (the native core), loader (whole epochs), partition, store (tables over a network), pipeline "
        "(epochs with rows from another process), dist (training across hosts of the lab; needs root), fullgraph "
        "(training on the whole graph across hosts of the lab; needs root), samplers (what each costs and what a model "
        "learns by it; lab/ needs root), links (ranks among all nodes, negatives; lab/ needs root), typed (layers of "
        "typed graphs; embeddings/ and lab/ need root), execution (loaders that plan), plan (jobs that are simulated "
        "before they run; lab/ needs root), jobs (memory and queues of training jobs) or gpu (kernels, sampling and "
        "epochs on a GPU); or, with files, suite FILE (a matrix of training jobs), compare BEFORE AFTER (results, with "
        "a verdict each) or plot RESULTS (pictures of a suite)",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="*", type=Path, help="of suite, compare and plot; written before options"
    )
    parser.add_argument("--only", metavar="NAME", help="only cases whose name contains NAME (A|B: A or B)")
    parser.add_argument(
        "--lab",
        action="store_true",
        help="of plan, samplers, links and typed: only what runs on the lab (needs root)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; targets not judged")
    parser.add_argument("--scale", choices=("small", "full"), help="small: the same as --quick")
    parser.add_argument(
        "--cache", metavar="DIR", type=Path, help="keep generated graphs and parts here, for other runs"
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting of `bench dist`, `bench fullgraph`, `bench jobs` or the jobs of `samplers`, `links` and "
        "`typed`, such as num_features=256, hosts=2 or epochs=50; may be repeated",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write rows, samples, hardware and versions to FILE")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 when a row misses its target or a required row did not run; with suite: when a cell failed",
    )
    parser.add_argument(
        "--against",
        metavar="CHECKOUT",
        type=Path,
        help="another checkout of gnnsys, built in place: run the suite here and there in turns, and say which rows "
        "are worse here; exit 1 when one is by more than 3%%, or did not run in both",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="with --against: how often each runs (default 3)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="with suite: the result folder; with plot: pictures")
    parser.add_argument("--retry", action="store_true", help="with suite: run cells again that failed")
    parser.add_argument(
        "--hosts", metavar="FILE", type=Path, help="with suite: on these hosts, as gnnsys launch has it"
    )
    parser.add_argument("--slurm", action="store_true", help="with suite: on the nodes of this Slurm allocation")
    parser.add_argument("--ssh", metavar="COMMAND", help="with suite and hosts: such as 'ssh -F my_config' (ssh)")
    parser.add_argument(
        "--kind", metavar="NAME", help="with plot: scaling, ablation, accuracy or traffic (default: all)"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="SHARE", help="with compare: what is no difference (default 0.02)"
    )


def run(args: argparse.Namespace) -> int:
    if threading.current_thread() is not threading.main_thread():  # whose signals are
        return _run(args)
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's: temporary files go, too
    try:
        return _run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    from gnnsys.bench import SUITES, SuiteOptions, check_machine, load_suite, run_suite, shipped_suites
    from gnnsys.cli.bench_files import WITH_FILES
    from gnnsys.lab import available as lab_available

    if args.suite in (*WITH_FILES, *SUITES):
        check_options(args)
    if args.suite in WITH_FILES:
        return WITH_FILES[args.suite](args)
    if args.suite in shipped_suites():
        raise ValueError(f"{args.suite} is a matrix of training jobs: write `gnnsys bench suite {args.suite}`")
    if args.files:
        raise ValueError(f"bench {args.suite} takes no files, got {args.files[0]}; {', '.join(WITH_FILES)} do")
    benchmarks = load_suite(args.suite)
    check_machine(args.suite)
    if args.lab and (reason := lab_available()):
        raise ValueError(f"--lab: {reason}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: the folder {args.json.parent} does not exist")
    options = SuiteOptions(
        only=args.only,
        lab=args.lab,
        quick=args.quick or args.scale == "small",
        cache=args.cache,
        settings=_settings(args.suite, args.set),
    )
    if args.against is not None:
        return _run_against(args, options)
    keep = (lambda report: None) if args.json is None else (lambda report: report.write(args.json))
    report = run_suite(args.suite, benchmarks, options, partial(print, flush=True), keep)  # seen while it runs
    if report.interrupted is not None:
        raise KeyboardInterrupt
    failures = report.failures()
    for failure in failures if args.check else []:
        print(f"check: {failure}", file=sys.stderr)
    return 1 if args.check and failures else 0


def check_options(args: argparse.Namespace) -> None:
    """ValueError where an option is given that this use of the command does not read."""
    use = args.suite if args.suite in OPTIONS else "" if args.against is None else "--against"
    taken = OPTIONS[use]
    others = {name for names in OPTIONS.values() for name in names} - set(taken)
    for name in sorted(others):
        given = getattr(args, name)
        if given is not None and given is not False and given != []:
            what = f"bench {args.suite}" + (f" {use}" if use.startswith("-") else "")
            flags = ", ".join(f"--{each}" for each in taken)
            raise ValueError(f"{what} does not take --{name}; it takes: {flags}")


def _run_against(args: argparse.Namespace, options: SuiteOptions) -> int:
    from gnnsys.bench import Change, compare, environment, load_suite, units_of

    told = [args.suite]
    told += [] if args.only is None else ["--only", args.only]
    told += ["--lab"] if options.lab else []
    told += ["--quick"] if options.quick else []
    told += [] if args.cache is None else ["--cache", str(args.cache.absolute())]
    told += [word for text in args.set for word in ("--set", text)]
    units = units_of(load_suite(args.suite), options)
    changes = compare(
        told, units, args.against, 3 if args.rounds is None else args.rounds, show=partial(print, flush=True)
    )
    print(Change.header())
    for change in changes:
        print(change.line())
    if args.json is not None:
        rows = [
            {"name": c.name, "unit": c.unit.name, "here": c.here, "there": c.there, "ratio": c.ratio} for c in changes
        ]
        args.json.write_text(
            json.dumps({"suite": args.suite, "environment": environment(), "rows": rows}, indent=1) + "\n"
        )
    return 1 if len(changes) < len(units) or any(change.is_worse for change in changes) else 0


def _settings(suite: str, texts: list[str]) -> dict[str, str]:
    with_settings = ("dist", "fullgraph", "samplers", "links", "typed", "jobs", "flows")
    if texts and suite not in with_settings:
        *most, last = (f"`bench {name}`" for name in with_settings)
        raise ValueError(f"--set is for {', '.join(most)} and {last}: {suite} has no settings")
    pairs = [text.partition("=") for text in texts]
    for text, (name, equals, value) in zip(texts, pairs, strict=True):
        if not (name and equals and value):
            raise ValueError(f"--set {text}: write NAME=VALUE")
    return {name: value for name, _, value in pairs}
