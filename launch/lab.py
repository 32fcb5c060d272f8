#!/usr/bin/env python3
"""A cluster in a box, from the command line. Needs root; docs/lab.md explains it.

python launch/lab.py up --hosts 4 --rate 1gbit --cpu 0.45 --memory 3g
python launch/lab.py run -- --nproc-per-node 2 train.py parts/
python launch/lab.py down
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gnnsys.lab import Lab, Result, state
from gnnsys.observe import format_size


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["ssh"] and "--" not in words:
        words.insert(1, "--")  # what follows are options of ssh
    options = parser().parse_args(words)
    try:
        return options.do(options)
    except (ValueError, RuntimeError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; everything the command had started is gone", file=sys.stderr)
        return 130


def up(options: argparse.Namespace) -> int:
    names = ("memory", "shm", "family")
    rates = None if options.rate is None else [_none_or(str, rate) for rate in options.rate.split(",")]
    cpus = None if options.cpu is None else [_none_or(float, cpu) for cpu in options.cpu.split(",")]
    limits = {
        "rate": rates[0] if rates is not None and len(rates) == 1 else rates,
        "cpu": cpus[0] if cpus is not None and len(cpus) == 1 else cpus,
    }
    lab = Lab(options.hosts, **limits, **{name: getattr(options, name) for name in names}).up(tied=False)
    print(f"lab {lab.id}: hosts {', '.join(lab.names)}")
    return 0


def _none_or(kind: type, text: str) -> Any:
    try:
        return None if text == "none" else kind(text)
    except ValueError:
        raise ValueError(f"--cpu is cores, such as 0.45, or one for each host: 0.45,0.3; got {text!r}") from None


def describe(options: argparse.Namespace) -> int:
    told = json.dumps(Lab.attach(chosen(options.lab)).describe(), indent=1)
    print(told) if options.out is None else options.out.write_text(told + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> int:
    lab = Lab.attach(chosen(options.lab))
    results = lab.run(rest(options.args), timeout=options.timeout, check=False, heard=say, plan=options.plan)
    return summary(results)


def execute(options: argparse.Namespace) -> int:
    lab = Lab.attach(chosen(options.lab))
    command = rest(options.args)
    result = lab.exec(options.host, command, timeout=options.timeout, check=False, heard=lambda line: say(None, line))
    return summary([result])


def ssh(options: argparse.Namespace) -> int:
    """In the place of ssh, for `gnnsys launch --ssh`: the last two words are host and command."""
    words = [word for word in options.args if word != "--"]
    lab = Lab.attach(chosen(options.lab))
    if len(words) < 2 or words[-2].split("@")[-1] not in lab.names:
        raise ValueError(f"give a host of the lab and a command; hosts: {', '.join(lab.names)}")
    lab.become(1 + lab.names.index(words[-2].split("@")[-1]), words[-1])


def change_rate(options: argparse.Namespace) -> int:
    rate = None if options.rate == "none" else options.rate
    Lab.attach(chosen(options.lab)).set_rate(rate, host=options.host)
    return 0


def cut(options: argparse.Namespace) -> int:
    Lab.attach(chosen(options.lab)).cut(options.host)
    return 0


def heal(options: argparse.Namespace) -> int:
    Lab.attach(chosen(options.lab)).heal(options.host)
    return 0


def status(options: argparse.Namespace) -> int:
    for name in state.all_labs():
        try:
            _show(name)
        except (OSError, RuntimeError, ValueError):
            if name in state.all_labs() and state.is_alive(state.read(name)):
                raise
            print(f"lab {name}: ended while it was looked at")
    return 0


def _show(name: str) -> None:
    found = state.read(name)
    if not state.is_alive(found):
        print(f"lab {name}: dead; `down --all` removes what it left")
        return
    limits = ", ".join(f"{key} {found[key]}" for key in ("rate", "cpu", "memory") if found[key] is not None)
    print(f"lab {name}: {found['num_hosts']} hosts, {limits or 'no limits'}")
    if "host_pids" not in found:
        return
    lab = Lab.attach(name)
    for host, traffic in lab.bytes().items():
        used = lab.usage(host)
        wire = f"in {format_size(traffic.bytes_in)}, out {format_size(traffic.bytes_out)}"
        print(
            f"  h{host} {lab.address(host)}: {wire}, CPU {used.cpu_seconds:.1f} s, "
            f"memory at most {format_size(used.memory_peak)}"
        )


def down(options: argparse.Namespace) -> int:
    names = state.all_labs() if options.all else [chosen(options.lab)]
    for name in names:
        state.remove(name)
        print(f"lab {name} is down")
    return 0


def chosen(name: str | None) -> str:
    """The lab that was named, or the only one there is."""
    there = state.all_labs()
    if name is None and len(there) != 1:
        raise ValueError(
            f"there are several labs, choose one with --lab: {', '.join(there)}"
            if there
            else "there is no lab: make one with `lab.py up`"
        )
    return name or there[0]


def rest(args: list[str]) -> list[str]:
    command = args[1:] if args[:1] == ["--"] else args
    if not command:
        raise ValueError("give what to run after --")
    return command


def say(host: int | None, line: str) -> None:
    prefix = "" if host is None else f"[h{host}] "
    print(prefix + line, end="" if line.endswith("\n") else "\n", flush=True)


def summary(results: Sequence[Result]) -> int:
    for result in results:
        if not result.ok:
            print("lab: " + result.describe(lines=0), file=sys.stderr)
    return 0 if all(result.ok for result in results) else 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="lab.py", description="a cluster in a box")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do: object, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(do=do)
        if name not in ("up", "status"):
            made.add_argument("--lab", metavar="ID", help="which one, where there are several")
        return made

    made = command("up", up, "make hosts and a switch")
    made.add_argument("--hosts", type=int, default=2)
    made.add_argument("--rate", help="of links, in and out: 1gbit, or one for each host: 250mbit,50mbit,none")
    made.add_argument("--cpu", help="cores each host may use: 0.45, or one for each: 0.45,0.3,none; default: no limit")
    made.add_argument("--memory", help="each host may use: 3g; default: no limit")
    made.add_argument("--shm", default="1g", help="size of each host's /dev/shm")
    made.add_argument("--family", type=int, choices=(4, 6), default=4, help="which addresses the host names mean")
    for name, do, text in (
        ("run", run, "run torchrun with these arguments on every host"),
        ("exec", execute, "run a command on one host"),
    ):
        made = command(name, do, text)
        if name == "exec":
            made.add_argument("host", type=int)
        else:
            made.add_argument("--plan", metavar="FILE", help="hosts, ranks and parts of a plan (docs/launch.md)")
        made.add_argument("--timeout", type=float, default=3600.0, help="seconds until everything is killed")
        made.add_argument("args", nargs=argparse.REMAINDER, metavar="-- ARGS")
    made = command("ssh", ssh, "what `gnnsys launch --ssh 'python launch/lab.py ssh'` calls")
    made.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    made = command("rate", change_rate, "change the rate of every link or one host's")
    made.add_argument("rate", help="1gbit, 100mbit, or none")
    made.add_argument("--host", type=int)
    for name, do, text in (("cut", cut, "pull a host's cable"), ("heal", heal, "plug it in again")):
        command(name, do, text).add_argument("host", type=int)
    made = command("describe", describe, "say what the hosts are, as a cluster file for `gnnsys plan --cluster`")
    made.add_argument("--out", metavar="FILE", type=Path, help="write it there; default: print it")
    command("status", status, "what labs there are and what they have used")
    command("down", down, "end everything in a lab and remove it").add_argument(
        "--all", action="store_true", help="every lab on this machine, and what dead ones left"
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
