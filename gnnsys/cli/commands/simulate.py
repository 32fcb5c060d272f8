"""Say how long an epoch of a plan would take if hosts, links or trainers were others, without running it.

Reads what `gnnsys plan PARTS --cluster ... --out plan.json` wrote. The timeline opens in Perfetto.
"""

from __future__ import annotations

import argparse

from gnnsys.cli.plan_placement import add_set_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json of gnnsys plan")
    add_set_argument(parser)
    parser.add_argument("--trainers", type=int, metavar="N", help="so many, in the proportions of the plan")
    parser.add_argument("--cluster", metavar="FILE", help="another cluster with the plan's hosts")
    parser.add_argument("--profile", metavar="FILE", help="another profile of the same parts (default: the plan's)")
    parser.add_argument("--policy", help="how flows share links (default: as the plan)")
    parser.add_argument("--trace", metavar="FILE", help="write when every task and flow began and ended")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE; - is standard output")


def run(args: argparse.Namespace) -> int:
    from gnnsys.cli.plan_placement import run_simulate

    return run_simulate(args)
