"""Send parts to the hosts that serve them, each host its own, all at once.

Files that a host has already are not sent again, those that a killed push has begun are gone on with, those that do not
match their checksum are replaced. Exit code 1 where a host could not be served; run it again to go on.
"""

from __future__ import annotations

import argparse
import shlex
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", metavar="DIR", help="what gnnsys partition wrote")
    parser.add_argument("--hosts", metavar="FILE", required=True, help="one name per line, or YAML; see gnnsys launch")
    parser.add_argument("--plan", metavar="FILE", help="send each host the parts of a plan; see gnnsys launch")
    parser.add_argument("--to", metavar="DIR", help="where on the hosts (default: the same path)")
    parser.add_argument("--overwrite", action="store_true", help="replace other parts that are there")
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="such as 'ssh -F my_config' (ssh)")
    parser.add_argument("--connect-timeout", type=float, default=20.0, metavar="S", help="for ssh (20)")


def run(args: argparse.Namespace) -> int:
    from gnnsys.cli.progress import Progress
    from gnnsys.launch import PushOptions, push_parts, read_hosts, read_plan
    from gnnsys.observe import format_size

    options = PushOptions(
        ssh=tuple(shlex.split(args.ssh)), overwrite=args.overwrite, connect_timeout=args.connect_timeout
    )
    hosts = read_hosts(args.hosts)
    if args.plan is not None:
        plan = read_plan(args.plan)
        plan.check_parts(args.parts)
        hosts = plan.choose(hosts, args.hosts)
    with Progress.reported("push") as progress:
        results = push_parts(args.parts, hosts, options, to=args.to, progress=progress)
    for pushed in results:
        for name in pushed.replaced:
            print(f"gnnsys push: {pushed.host}: {name} did not match its checksum, and was replaced", file=sys.stderr)
        if pushed.error is not None:
            print(f"gnnsys push: {pushed.host}: {pushed.error}", file=sys.stderr)
            continue
        parts = ",".join(map(str, pushed.parts)) or "none"
        resumed = f", {format_size(pushed.resumed)} were there of files that had been begun" if pushed.resumed else ""
        sent = f"{format_size(pushed.bytes_sent)} sent in {pushed.files_sent} files, {pushed.files_there} were there"
        print(f"{pushed.host}: parts {parts}: {sent}{resumed}")
    return 1 if any(pushed.error for pushed in results) else 0
