"""Look for what keeps this machine or cluster from working well, with a remedy for each finding.

Each line says what is; where it is not well also why that matters, and what to type. Exit code 0 where nothing will
fail, 1 where something will.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parts", metavar="DIR", nargs="?", help="also look at these parts: files, disk, memory for them"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="FILE", help="look at every host of FILE, and at the links between them")
    where.add_argument("--listen", type=int, metavar="PORT", help="answer one --to from another host (0: any port)")
    where.add_argument("--to", metavar="HOST:PORT", help="measure the link to a host that runs doctor --listen")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="for each link, about (0.5)")
    parser.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="with --hosts: such as 'ssh -F my_config' (ssh)"
    )
    parser.add_argument("--connect-timeout", type=float, default=20.0, metavar="S", help="with --hosts: for ssh (20)")
    parser.add_argument("--json", action="store_true", help="print a list of findings as JSON instead")


def run(args: argparse.Namespace) -> int:
    from gnnsys.doctor import exit_code, listen_once, look_at_hosts, look_here, measure_to, report_text
    from gnnsys.launch import LaunchOptions, read_hosts

    if args.parts is not None and (args.listen is not None or args.to is not None):
        raise ValueError("--listen and --to measure a link alone: leave DIR away")
    if not 0 < args.seconds <= 60:
        raise ValueError(f"--seconds must be more than 0, and 60 at most, got {args.seconds:g}")
    if args.listen is not None:
        if not 0 <= args.listen < 65536:
            raise ValueError(f"--listen must be below 65536, or 0 for any free port, got {args.listen}")
        print(f"{listen_once(args.listen, _say)} has measured the link to this host")
        return 0
    if args.to is not None:
        found = measure_to(args.to, args.seconds)
    elif args.hosts is not None:
        options = LaunchOptions(ssh=tuple(shlex.split(args.ssh)), connect_timeout=args.connect_timeout)
        found = look_at_hosts(read_hosts(args.hosts), options, args.parts, args.seconds)
    else:
        found = look_here(args.parts)
    print(json.dumps([asdict(each) for each in found], indent=1) if args.json else report_text(found))
    return exit_code(found)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
