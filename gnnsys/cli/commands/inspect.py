"""Show what is in a directory of parts, and prove that it is the graph it was made of.

One table: nodes, edges, halo, cut, traffic, bytes, balance of each constraint, remote share of a sampled batch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gnnsys.cli.early_refusals import check_are_parts

if TYPE_CHECKING:
    from gnnsys.partition import VerifyReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", metavar="DIR", type=Path, help="what `gnnsys partition` wrote")
    parser.add_argument(
        "--verify", action="store_true", help="prove that no node, edge or row was lost, duplicated or changed"
    )
    parser.add_argument(
        "--against", metavar="SOURCE", help="verify bit for bit against this graph: a name, a saved graph or a file"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw traffic matrix and balance bars to FILE.svg (or .png)")
    parser.add_argument(
        "--fanouts", metavar="N,N,...", help="of the batch whose remote share is expected (default: 15,10,5)"
    )
    parser.add_argument("--batch-size", type=int, default=1024, help="seeds of that batch (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every number to FILE")


def run(args: argparse.Namespace) -> int:
    fanouts = None if args.fanouts is None else _fanouts(args.fanouts)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: the folder {args.json.parent} does not exist")
    check_are_parts(args.parts)
    from gnnsys.cli.progress import Progress
    from gnnsys.graph import MANIFEST
    from gnnsys.partition import check_plot_file, inspect_parts, open_parts, write_plot

    if args.plot is not None:
        check_plot_file(args.plot)
    if not (args.parts / MANIFEST).is_file():
        open_parts(args.parts)  # says what it is not, and how to make one
    verified = ""
    if args.verify or args.against is not None:
        report = _verify(args.parts, args.against)
        if not report.ok:
            print("\n".join(f"problem: {' '.join(problem.split())}" for problem in report.problems), file=sys.stderr)
            return 1
        verified = f"\nverified   {report}"
    with Progress.reported("inspect") as progress:
        inspection = inspect_parts(args.parts, fanouts=fanouts, batch_size=args.batch_size, progress=progress)
    print(f"{inspection}{verified}")
    if args.plot is not None:
        write_plot(inspection, args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(inspection.to_json(), indent=1) + "\n", encoding="utf-8")
    return 0


def _verify(parts: Path, against: str | None) -> VerifyReport:
    from gnnsys.cli.progress import Progress
    from gnnsys.graph import dataset, load
    from gnnsys.partition import verify_parts

    source = None
    if against is not None:
        source = load(against) if Path(against).exists() else dataset(against)
    with Progress.reported("verify") as progress:
        return verify_parts(parts, source, progress)


def _fanouts(text: str) -> list[int]:
    try:
        return [int(fanout) for fanout in text.split(",")]
    except ValueError:
        raise ValueError(f"--fanouts must be whole numbers with commas, such as 15,10,5, got {text!r}") from None
