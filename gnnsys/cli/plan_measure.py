"""`gnnsys plan --measure --cluster FILE --out FILE`: fills in what a cluster file does not say of its hosts."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.launch import Host, MeasuredCluster
    from gnnsys.planning import Cluster, ClusterSketch

# Options that need --measure, with what they are where they are not given.
_OF_MEASURING: dict[str, Any] = {
    "again": False, "seconds": 2.0, "cost_seconds": 20.0, "reference": None, "ssh": "ssh", "connect_timeout": 20.0,
}  # fmt: skip
_OF_A_PLAN = ("source", "profile", "trainers", "sizes", "memory", "machine", "fanouts", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "measuring", "rates, speeds and costs of the hosts of --cluster, over ssh; --out is the filled-in file"
    )
    group.add_argument("--measure", action="store_true", help="fill in what the cluster file does not say")
    group.add_argument("--again", action="store_true", help="rates and speeds that are written, too")
    group.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of each transfer (2)")
    group.add_argument(
        "--cost-seconds", type=float, default=20.0, metavar="S",
        help="for the cost profile of a machine that has none; 0 for no costs (20)",
    )  # fmt: skip
    group.add_argument("--reference", metavar="HOST", help="whose cores have speed 1 (default: this machine's)")
    group.add_argument("--ssh", metavar="COMMAND", default="ssh", help="such as 'ssh -F my_config' (ssh)")
    group.add_argument("--connect-timeout", type=float, default=20.0, metavar="S", help="for ssh (20)")


def check_without_measure(args: argparse.Namespace) -> None:
    """ValueError for an option of a measurement where there is none."""
    for name, default in _OF_MEASURING.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} needs --measure")


def run_measure(args: argparse.Namespace) -> int:
    from gnnsys.launch import LaunchOptions, MeasureOptions, bounded_by_others, measure_cluster
    from gnnsys.planning import Cluster, ClusterSketch

    for name in _OF_A_PLAN:
        if getattr(args, name) is not None:
            what = name.upper() if name == "source" else f"--{name}"
            raise ValueError(f"{what} has no meaning with --measure: measure first, then plan with the file of --out")
    if args.cluster is None or args.out is None:
        raise ValueError("--measure needs --cluster FILE, the hosts, and --out FILE, where the filled-in file goes")
    if not Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: the folder {Path(args.out).parent} does not exist")
    if Path(args.out).suffix in (".yaml", ".yml") and importlib.util.find_spec("yaml") is None:
        raise ValueError(f"--out {args.out} needs PyYAML: pip install pyyaml, or write a .json")
    sketch = ClusterSketch.from_file(args.cluster, again=args.again)
    missing = {name: sketch.missing(name) for name in sketch.names}
    found = measure_cluster(
        [_host(sketch, name) for name in sketch.names],
        missing,
        LaunchOptions(ssh=tuple(shlex.split(args.ssh)), connect_timeout=args.connect_timeout),
        MeasureOptions(seconds=args.seconds, cost_seconds=args.cost_seconds, reference=args.reference),
        lambda line: print(f"gnnsys plan: {line}", file=sys.stderr, flush=True),
    )
    filled = Cluster.from_json(sketch.filled(found.values))
    rates = {host.name: {"rate_in": host.rate_in, "rate_out": host.rate_out} for host in filled}
    found.notes += bounded_by_others(rates, missing)
    sketch.save(args.out, found.values)
    for line in report(filled, missing, found):
        print(line)
    print(f"written: {args.out}; gnnsys plan PARTS --cluster {args.out} ... uses it")
    return 0


def _host(sketch: ClusterSketch, name: str) -> Host:
    from gnnsys.launch import Host

    told = {key: value for key, value in sketch.launch(name).items() if key != "slots"}
    try:
        return Host(name=name, slots=1, **told)
    except (TypeError, ValueError) as error:
        raise ValueError(f"host {name}: {error}") from None


def report(cluster: Cluster, missing: Mapping[str, Sequence[str]], found: MeasuredCluster) -> Iterator[str]:
    """For people. What was measured has a star; core-milliseconds are those of a fixed amount of work."""
    width = max(4, *(len(name) for name in cluster.names))
    yield f"{'host':<{width}}  {'cores':>6} {'speed':>7} {'Mbit/s in':>11} {'Mbit/s out':>11}  core-ms of work"
    for host in cluster:
        keys = missing[host.name]

        def told(key: str, text: str, keys: Sequence[str] = keys) -> str:
            return f"{text}{'*' if key in keys else ' '}"

        work = ", ".join(f"{kind} {1e3 * seconds:.3g}" for kind, seconds in found.work.get(host.name, {}).items())
        yield (
            f"{host.name:<{width}}  {told('cores', f'{host.cores:g}'):>6} {told('speed', f'{host.speed:.3g}'):>7} "
            f"{told('rate_in', _mbit(host.rate_in)):>11} {told('rate_out', _mbit(host.rate_out)):>11}  {work}"
        ).rstrip()
    for note in found.notes:
        yield f"note: {note}"


def _mbit(rate: float) -> str:
    return f"{8e-6 * rate:,.0f}" if rate < 1e15 else "unlimited"
