"""Slurm: inside an allocation its nodes are the hosts, and `srun` takes the place of ssh; outside, a batch file.

The batch file runs the same `gnnsys launch --slurm` inside the allocation, so preflight, prefixed lines, restarts and
the end of everything are those of any other launch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnnsys.launch.hosts import Host

# One task that has all of the allocation's share of a node, beside other steps of the same job.
SRUN = (
    "srun",
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--cpu-bind=none",
    "--unbuffered",
    "--quiet",
    "--kill-on-bad-exit=0",
)
# srun reads these as its own options. What an allocation has for each of its tasks, or in all, is not for our one task
# on a node: with --cpus-per-task=8 or --gpus-per-task=1 it would have that little of its node. A label would be read
# as part of a message.
OF_OTHER_TASKS = (
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_LABELIO",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SLURM_STEP_GRES",
    "SLURM_TRES_PER_TASK",
)


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a batch job asks for. `arguments` are further options of sbatch, such as --time=1:00:00."""

    num_nodes: int = 1
    arguments: tuple[str, ...] = ()
    job_name: str = "gnnsys"

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"--nodes must be at least 1, got {self.num_nodes}")
        if wrong := [argument for argument in self.arguments if not argument.startswith("-")]:
            raise ValueError(f"--sbatch takes options such as --time=1:00:00, got {wrong[0]!r}")
        if wrong := [text for text in (self.job_name, *self.arguments) if len(text.splitlines()) != 1]:
            raise ValueError(f"a name or an option of a batch job is one line, got {wrong[0]!r}")


def in_allocation(env: Mapping[str, str] = os.environ) -> bool:
    return "SLURM_JOB_ID" in env


def slurm_hosts(num_ranks: int = 0, env: Mapping[str, str] = os.environ) -> list[Host]:
    """The nodes of this allocation, in Slurm's order, with so many ranks each (0: one per GPU)."""
    nodes = env.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ValueError("there is no Slurm allocation here: use salloc or sbatch, or leave --nodes to gnnsys launch")
    gpus = gpus_by_node(env)
    return [Host(name=name, slots=num_ranks, gpus=gpus.get(name)) for name in expand_nodes(nodes)]


def gpus_by_node(env: Mapping[str, str]) -> dict[str, int]:
    """GPUs of each node of an allocation that asked for GPUs of tasks, or in all: our task must ask for a node's own.

    Empty where it asked for GPUs of nodes, which srun gives us by itself, and where scontrol does not say.
    """
    if not any(name in env for name in ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")):
        return {}
    try:
        shown = subprocess.run(["scontrol", "show", "job", "--details", env["SLURM_JOB_ID"]], capture_output=True)
    except OSError:
        return {}
    return gpus_of_nodes(shown.stdout.decode(errors="replace"))


def gpus_of_nodes(details: str) -> dict[str, int]:
    """
    >>> gpus_of_nodes("   Nodes=a[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1),gpu:b:1(IDX:3),disk:5")
    {'a1': 3, 'a2': 3}
    """
    found = {}
    for nodes, resources in re.findall(r"^\s+Nodes=(\S+) .*\bGRES=(\S*)", details, re.MULTILINE):
        count = sum(map(int, re.findall(r"(?:^|[,)])gpu(?::[^:,()]+)?:(\d+)", resources)))
        found.update({name: count for name in expand_nodes(nodes)})
    return found


def srun_command(srun: Sequence[str], host: Host, program: str, env: Mapping[str, str] = os.environ) -> list[str]:
    """What runs a line of shell on a node of this allocation, with the variables of this process."""
    hidden = [name for name in OF_OTHER_TASKS if name in env]
    without = ["env", *(f"--unset={name}" for name in hidden)] if hidden else []
    again = "".join(f"export {name}={shlex.quote(env[name])}; " for name in hidden)  # scripts may read them
    gpus = [f"--gpus={host.gpus}"] if host.gpus else []
    return [*without, *srun, *gpus, f"--nodelist={host.name}", "sh", "-c", again + program]


def expand_nodes(text: str) -> list[str]:
    """The names that a list such as `gpu[01-03,7],login` stands for.

    >>> expand_nodes("gpu[08-10,3]-ib,login")
    ['gpu08-ib', 'gpu09-ib', 'gpu10-ib', 'gpu3-ib', 'login']
    """
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", word):
            pieces = [plain] if plain else [number for each in ranges.split(",") for number in _numbers(each)]
            names = [name + piece for name in names for piece in pieces]
        found += names
    return found


def _numbers(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def batch_file(command: Sequence[str], options: SlurmOptions, workdir: str) -> str:
    """Text of a batch file that runs `command` once, on the first node of an allocation."""
    asked = [f"--job-name={options.job_name}", f"--nodes={options.num_nodes}", "--ntasks-per-node=1"]
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(argument)}" for argument in [*asked, *options.arguments])]
    lines += [f"cd {shlex.quote(workdir)} || exit", f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def submit(text: str) -> str:
    """Gives a batch file to sbatch; the job's number. ValueError with sbatch's own words where it is refused."""
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch here: run this on a login node of the cluster, or use --hosts FILE")
    done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]
