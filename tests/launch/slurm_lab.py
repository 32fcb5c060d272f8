"""Slurm of Debian's packages on hosts of a lab: munged and slurmctld on the first, slurmd on each."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnsys.lab import Command, Lab, available
from tests.support.processes import HANGS_AFTER

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo", "munged")
CONFIG = """
ClusterName=lab
SlurmctldHost=h1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes} CPUs=4 Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot run here, or None."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        return f"needs {missing[0]}: apt-get install slurmctld slurmd slurm-client munge"
    return available()


needs_slurm = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@contextlib.contextmanager
def slurm_lab(folder: Path, num_hosts: int = 2) -> Iterator[tuple[Lab, dict[str, str]]]:
    """A lab whose hosts are Slurm's nodes, and the environment that its programs need."""
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool-h{host}" for host in range(1, num_hosts + 1))):
        (folder / name).mkdir()
    for number in range(4):  # GPUs for Slurm: it gives out files, whatever they are
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, nodes=",".join(f"h{host}" for host in range(1, num_hosts + 1))))
    env = {"SLURM_CONF": str(config), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    with Lab(hosts=num_hosts) as lab:
        running = [lab.start(1, [*munged, *files], env=env)]
        await_sign(lambda: (folder / "munge.socket").exists(), running)
        running.append(lab.start(1, ["slurmctld", "-D"], env=env))
        running += [lab.start(host, ["slurmd", "-D", "-N", f"h{host}"], env=env) for host in lab.hosts]
        await_sign(lambda: num_idle(lab, env) == num_hosts, running)
        yield lab, env


def num_idle(lab: Lab, env: dict[str, str]) -> int:
    said = lab.exec(1, ["sinfo", "-h", "-N", "-o", "%N %t"], env=env, check=False).output.splitlines()
    return sum(line.endswith(" idle") for line in said)


def await_sign(condition, running: list[Command]) -> None:
    deadline = time.monotonic() + HANGS_AFTER
    while not condition():
        ended = [command.output for command in running if command.done()]
        assert not ended and time.monotonic() < deadline, "\n".join(ended)
        time.sleep(0.1)
