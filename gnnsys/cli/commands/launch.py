"""Run a training script by torchrun on this machine, or on every host of a file.

Hosts are looked at before anything starts: versions, connections both ways, parts, memory, GPUs, clocks, limits. What
ranks print comes with host and rank before it. The exit code is that of the first rank that failed; 2 where the job
was not started, 75 where a host was lost. Nothing of the job is left on any host, however this command ends.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.launch import LaunchPlan


MODES = ("local", "hosts", "slurm", "k8s")
_LAUNCHED = ("local", "hosts", "slurm")  # by a launcher, not by Kubernetes
# Options that not every mode has, with these modes and what they are where they are not given.
_SOME_MODES: dict[str, tuple[tuple[str, ...], Any]] = {
    "plan": (_LAUNCHED, None),
    "parts": (_LAUNCHED, None),
    "no_verify": (_LAUNCHED, False),
    "resume": (_LAUNCHED, None),
    "port": (_LAUNCHED, 0),
    "lost_after": (_LAUNCHED, 30.0),
    "grace": (_LAUNCHED, 15.0),
    "connect_timeout": (_LAUNCHED, 20.0),
    "wait_for_hosts": (_LAUNCHED, 120.0),
    "ssh": (("hosts",), "ssh"),
    "nodes": (("slurm", "k8s"), None),
    "ranks": (("slurm", "k8s"), 0),
    "sbatch": (("slurm",), ""),
    "kind": (("k8s",), "pytorchjob"),
    "runtime": (("k8s",), "torch-distributed"),
    "image": (("k8s",), ""),
    "name": (("k8s",), None),
    "gpus": (("k8s",), 0),
    "memory": (("k8s",), None),
    "shm": (("k8s",), "8Gi"),
    "claim": (("k8s",), None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", type=int, metavar="N", help="N ranks on this machine")
    where.add_argument("--hosts", metavar="FILE", help="on every host of FILE, over ssh (one name per line, or YAML)")
    where.add_argument("--slurm", action="store_true", help="on the nodes of this Slurm allocation, or of a new one")
    where.add_argument("--k8s", action="store_true", help="print a manifest for Kubeflow")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--plan", metavar="FILE", help="hosts, ranks and parts of a plan (docs/launch.md)")
    parser.add_argument("--print", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--parts", metavar="DIR", help="parts to look for on every host (else: DIRs in ARGS)")
    parser.add_argument(
        "--no-verify", action="store_true", default=None, help="do not compare parts with their checksums"
    )
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="start the group again, N times at most")
    parser.add_argument("--resume", metavar="DIR", help="start only if DIR has a checkpoint to go on from")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for every rank; repeatable")
    parser.add_argument("--port", type=int, help="where ranks meet on the first host (default: any free)")
    parser.add_argument("--ssh", metavar="COMMAND", help="with --hosts: such as 'ssh -F my_config' (ssh)")
    parser.add_argument("--lost-after", type=float, metavar="S", help="silence of a dead host (30)")
    parser.add_argument("--grace", type=float, metavar="S", help="between SIGTERM and SIGKILL (15)")
    parser.add_argument("--connect-timeout", type=float, metavar="S", help="for ssh (20)")
    parser.add_argument("--wait-for-hosts", type=float, metavar="S", help="before a restart (120)")
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument("--nodes", type=int, metavar="N", help="of a new allocation; with --k8s: pods")
    slurm.add_argument("--ranks", type=int, metavar="N", help="per node, or per pod (default: one per GPU)")
    slurm.add_argument("--sbatch", metavar="OPTIONS", help="for a new allocation: --sbatch='--time=1:00:00'")
    pods = parser.add_argument_group("with --k8s")
    pods.add_argument("--kind", choices=["pytorchjob", "trainjob"], help="of manifest (pytorchjob)")
    pods.add_argument("--runtime", metavar="NAME", help="of a trainjob, in the cluster (torch-distributed)")
    pods.add_argument("--image", help="that has your script, torch and gnnsys")
    pods.add_argument("--name", help="of the job (default: that of the script)")
    pods.add_argument("--gpus", type=int, metavar="N", help="for each pod")
    pods.add_argument("--memory", metavar="SIZE", help="for each pod: 64Gi")
    pods.add_argument("--shm", metavar="SIZE", help="of each pod's /dev/shm (8Gi)")
    pods.add_argument("--claim", metavar="NAME:/PATH", help="a volume claim with parts and checkpoints")
    parser.add_argument("script", metavar="SCRIPT", help="your training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="of your script")


def run(args: argparse.Namespace) -> int:
    from gnnsys.launch import in_allocation

    _keep_to_the_mode(args)
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must be below 65536, or 0 for any free one, got {args.port}")
    if args.k8s:
        return _print_manifest(args)
    if args.slurm and (args.nodes is not None or not in_allocation()):
        return _submit(args)
    if args.sbatch:
        raise ValueError("--sbatch is for a new allocation: say --nodes N, or leave it away inside this one")
    return _launch(args)


def _keep_to_the_mode(args: argparse.Namespace) -> None:
    """Refuses options that the mode has no use for, and fills in what was not given."""
    given = [name for name in MODES if (value := getattr(args, name)) is not None and value is not False]
    if not given and args.plan is None:
        raise ValueError("nobody says where: give --local N, --hosts FILE, --slurm or --k8s, or --plan FILE with hosts")
    mode = given[0] if given else "hosts"  # those of the plan
    for name, (modes, default) in _SOME_MODES.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif mode not in modes:
            whose = " or ".join(f"--{each}" for each in modes)
            raise ValueError(f"--{name.replace('_', '-')} is for {whose}, not for --{mode}: leave it away")


def _launch(args: argparse.Namespace) -> int:
    from gnnsys.launch import (
        SRUN,
        Checks,
        Host,
        Launcher,
        LaunchOptions,
        job_text,
        local_hosts,
        read_hosts,
        slurm_hosts,
    )

    ssh: tuple[str, ...] | None = None
    plan = _read_plan(args)
    if args.slurm:
        hosts, ssh = slurm_hosts(args.ranks), SRUN
    elif args.hosts is not None:
        hosts, ssh = read_hosts(args.hosts), tuple(shlex.split(args.ssh))
    elif args.local is not None:
        hosts = local_hosts(args.local)
    else:
        assert plan is not None
        hosts, ssh = [Host(name=host.name) for host in plan.hosts], tuple(shlex.split(args.ssh))
    if plan is not None and args.local is not None:
        hosts = plan.choose_here(hosts[0])
    elif plan is not None:
        hosts = plan.choose(hosts, "this allocation" if args.slurm else args.hosts or args.plan)
    digest = None if plan is None else plan.parts_digest
    words = [*(plan.arguments if plan is not None else ()), *args.args]
    options = LaunchOptions(
        ssh=ssh,
        restarts=args.restarts,
        lost_after=args.lost_after,
        grace=args.grace,
        connect_timeout=args.connect_timeout,
        wait_for_hosts=args.wait_for_hosts,
        env={**(plan.env if plan is not None else {}), **dict(_pair(text) for text in args.env)},
        is_module=args.module,
        parts_digest=digest,
        plan=None if plan is None else plan.line_for_ranks(() if args.local is None else [hosts[0].name]),
    )
    checks = Checks(
        script=None if args.module else args.script,
        arguments=words,
        parts=args.parts,
        parts_digest=digest,
        verify=not args.no_verify,
        port=args.port,
        checkpoints=args.resume,
    )
    command = [args.script, *words]
    if args.print:
        if digest is not None:
            _check_parts_here([*([args.parts] if args.parts else []), *words], digest)
        print(job_text(hosts, command, options, args.port), end="")
        return 0
    return Launcher(hosts, command, checks, options).run()


def _check_parts_here(paths: list[str], digest: int) -> None:
    """Parts may be on the hosts alone. Those that are here too must be those of the plan."""
    from gnnsys.launch import find_parts

    there = {path: found["digest"] for path, found in find_parts(paths).items()}
    if there and digest not in there.values():
        path, other = next(iter(there.items()))
        raise ValueError(
            f"the plan is for parts with the digest {digest:08x}, {path} has {other:08x}: plan again for these parts"
        )


def _read_plan(args: argparse.Namespace) -> LaunchPlan | None:
    from gnnsys.launch import read_plan

    if args.plan is None:
        return None
    if args.ranks:
        raise ValueError("--ranks is what the plan says: leave it away, or change the plan")
    return read_plan(args.plan)


def _submit(args: argparse.Namespace) -> int:
    """A batch job that runs this command again, inside its allocation."""
    from pathlib import Path

    from gnnsys.launch import SlurmOptions, batch_file, submit

    if args.nodes is None:
        raise ValueError("there is no Slurm allocation here: say --nodes N for a new one, or use salloc")
    _read_plan(args)  # what is wrong with it is told now, not when the job has waited for its nodes
    name = Path(args.script).stem
    options = SlurmOptions(num_nodes=args.nodes, arguments=tuple(shlex.split(args.sbatch)), job_name=f"gnnsys-{name}")
    command = [sys.executable, "-m", "gnnsys.cli", "launch", *_again(args)]
    text = batch_file(command, options, str(Path.cwd()))
    if args.print:
        print(text, end="")
    else:
        print(f"submitted batch job {submit(text)}; what it prints is in the file that --output names (slurm-%j.out)")
    return 0


def _again(args: argparse.Namespace) -> list[str]:
    """The options of this command that count inside an allocation."""
    words = ["--slurm", *([f"--ranks={args.ranks}"] if args.ranks else [])]
    words += [f"--restarts={args.restarts}", f"--port={args.port}"]
    for name in ("lost_after", "grace", "connect_timeout", "wait_for_hosts"):
        words.append(f"--{name.replace('_', '-')}={getattr(args, name):g}")
    words += [f"--{name}={value}" for name in ("plan", "parts", "resume") if (value := getattr(args, name)) is not None]
    words += [f"--env={pair}" for pair in args.env]
    words += (["--no-verify"] if args.no_verify else []) + (["-m"] if args.module else [])
    return [*words, args.script, *args.args]


def _print_manifest(args: argparse.Namespace) -> int:
    from pathlib import Path

    from gnnsys.launch import PodOptions, manifest_text, pytorch_job, train_job

    if args.kind != "trainjob" and args.runtime != _SOME_MODES["runtime"][1]:
        raise ValueError("--runtime is for --kind trainjob: a pytorchjob has none")
    options = PodOptions(
        name=args.name or Path(args.script).stem.lower().replace("_", "-"),
        image=args.image,
        num_pods=1 if args.nodes is None else args.nodes,
        num_ranks=args.ranks or args.gpus or 1,
        gpus=args.gpus,
        memory=args.memory,
        shm=args.shm,
        claim=args.claim,
        restarts=args.restarts,
        runtime=args.runtime,
        env=dict(_pair(text) for text in args.env),
    )
    command = [*(["-m"] if args.module else []), args.script, *args.args]
    made = train_job(command, options) if args.kind == "trainjob" else pytorch_job(command, options)
    print(manifest_text(made), end="")
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--env must be NAME=VALUE, got {text!r}")
    return name, value
