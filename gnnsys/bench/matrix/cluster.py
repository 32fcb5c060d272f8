"""Cells on a cluster: each runs as `gnnsys launch` on the first hosts of a file, or of a Slurm allocation.

Parts are made here and sent by `gnnsys push`; the cell goes to its ranks as an argument, and rank 0 prints what was
measured. So hosts need no folder in common, and nothing but gnnsys on them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.bench.matrix.cell import FIGURES, PRINTED, SHARE_CORES, Cell
from gnnsys.bench.matrix.processes import Ended, reason_of_output, run_with_deadline
from gnnsys.launch import EXIT_NOT_STARTED, SRUN, Host, in_allocation, read_hosts, slurm_hosts

CLUSTER_KEYS = ("hosts_file", "slurm", "ssh", "push", "parts_on_hosts")
_SAYS = re.compile(r"^gnnsys (?:launch|push): (?!warning: )(.*)$")
_RANK = re.compile(r"\[rank\d+\]: ")  # that torch sets before an error
_FIGURES = re.compile(rf"^\S+:0 \| {FIGURES} (\d+) (.*)$")
_END_SECONDS = 60.0  # for a launcher to end its job on every host
_CONNECT_SECONDS = 60.0  # a host that has just run another cell may be busy
_GRACE = 5.0  # a job that is past its deadline has nothing to save


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Hosts of a file, over ssh, or of this Slurm allocation, over srun.

    `push`: parts are sent to the hosts, where they are not there already; else they must be. `parts_on_hosts`: the
    folder there that they are sent to; None: the same as here.
    """

    hosts_file: Path | None = None
    slurm: bool = False
    ssh: str = "ssh"
    push: bool = True
    parts_on_hosts: str | None = None

    @classmethod
    def from_dict(cls, told: Mapping[str, Any], folder: Path) -> ClusterOptions:
        """`folder`: where the path of a hosts file begins."""
        own = {key: told[key] for key in CLUSTER_KEYS if key in told}
        for key in ("slurm", "push"):
            if type(own.get(key, True)) is not bool:
                raise ValueError(f"{key} must be true or false, got {own[key]!r}")
        for key in ("hosts_file", "ssh", "parts_on_hosts"):
            if key in own and not (isinstance(own[key], str | Path) and str(own[key]).strip()):
                raise ValueError(f"{key} must be a text, got {own[key]!r}")
        if ("hosts_file" in own) == bool(own.get("slurm")):
            raise ValueError("a cluster has either `hosts_file: FILE` (or --hosts FILE) or `slurm: true` (or --slurm)")
        if "hosts_file" in own:
            own["hosts_file"] = folder / own["hosts_file"]
        elif "ssh" in own:
            raise ValueError("with slurm hosts are reached by srun: leave ssh away")
        if not Path(own.get("parts_on_hosts", "/")).is_absolute():
            raise ValueError(f"parts_on_hosts must be an absolute path, got {own['parts_on_hosts']!r}")
        return cls(**own)

    def find_hosts(self) -> list[Host]:
        """All of them; ValueError in one line where the file or the allocation is not as it should be."""
        if self.hosts_file is not None:
            return read_hosts(self.hosts_file)
        if not in_allocation():
            raise ValueError("there is no Slurm allocation here: run this inside salloc or sbatch, or use --hosts FILE")
        return slurm_hosts()


class LaunchedCluster:
    """The hosts, and which parts they have."""

    def __init__(self, options: ClusterOptions, hosts: Sequence[Host]) -> None:
        self._options, self._hosts = options, list(hosts)
        self._checked: set[tuple[str, int]] = set()  # parts, and on how many hosts they were compared with checksums

    @classmethod
    def find(cls, options: ClusterOptions, cells: Sequence[Cell]) -> LaunchedCluster:
        hosts = options.find_hosts()
        most = max(cell.hosts for cell in cells)
        if most > len(hosts):
            where = options.hosts_file or "this Slurm allocation"
            names = ", ".join(host.name for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
            raise ValueError(f"hosts: {most} are asked for, and {where} has {len(hosts)}: {names}")
        return cls(options, hosts)

    def run(self, cell: Cell, module: str, scratch: Path) -> tuple[Ended, dict[str, Any] | None, str | None]:
        """How it ended, what was measured, and why it was not."""
        file = scratch / "hosts.json"
        file.write_text(json.dumps(hosts_for(cell, self._hosts)))
        ssh = shlex.join(SRUN) if self._options.slurm else self._options.ssh
        reach = ["--hosts", str(file), "--ssh", ssh, "--connect-timeout", str(_CONNECT_SECONDS)]
        output, known = "", (cell.parts, cell.hosts)
        if self._options.push and known not in self._checked:
            pushed = self._push(cell, reach)
            if pushed.code != 0:
                return pushed, None, f"its parts: {launch_reason(pushed, cell.deadline)}"
            output = pushed.output
            self._checked.add(known)
        words = [*reach, *(["--no-verify"] if known in self._checked else [])]
        ended = self._launch(replace(cell, parts=self._parts_there(cell)), module, words)
        if ended.code == 0:
            self._checked.add(known)
        figures = read_figures(ended.output)
        lines = [line for line in ended.output.splitlines(keepends=True) if not _FIGURES.match(line)]
        kept = Ended(ended.code, output + "".join(lines))
        if ended.code != 0:
            return kept, None, launch_reason(ended, cell.deadline)
        return kept, figures, None if figures is not None else "its ranks ended without figures"

    def _parts_there(self, cell: Cell) -> str:
        there = self._options.parts_on_hosts
        return cell.parts if there is None or not self._options.push else str(Path(there) / Path(cell.parts).name)

    def _push(self, cell: Cell, reach: list[str]) -> Ended:
        to = ["--to", self._parts_there(cell)]
        return _run(["push", cell.parts, *reach, *to], cell.deadline)

    def _launch(self, cell: Cell, module: str, words: list[str]) -> Ended:
        threads = os.environ.get("OMP_NUM_THREADS")
        env = f"{SHARE_CORES}=1" if threads is None else f"OMP_NUM_THREADS={threads}"
        words = [*words, "--parts", cell.parts, "--grace", str(_GRACE), "--env", env]
        return _run(["launch", *words, "-m", module, cell.to_text(), PRINTED], cell.deadline)


def hosts_for(cell: Cell, hosts: Sequence[Host]) -> dict[str, list[dict[str, Any]]]:
    """The first hosts as a hosts file has them, with a slot for every trainer.

    Which parts a host serves is left out: that is of one graph in one number of parts, and cells have several.
    """
    described = [asdict(replace(host, slots=cell.trainers, parts=None)) for host in hosts[: cell.hosts]]
    return {"hosts": [{key: own[key] for key in own if key != "assists" and own[key] is not None} for own in described]}


def read_figures(output: str) -> dict[str, Any] | None:
    """What rank 0 printed: pieces of one text, each behind its place. None where one is missing."""
    pieces = {int(found[1]): found[2] for line in output.splitlines() if (found := _FIGURES.match(line))}
    try:
        return json.loads("".join(pieces[number] for number in range(len(pieces))))
    except (KeyError, ValueError):
        return None


def _run(words: Sequence[str], deadline: float) -> Ended:
    command = [sys.executable, "-m", "gnnsys.cli", *words]
    return run_with_deadline(command, deadline, trainer_environment(), end_seconds=_END_SECONDS)


def launch_reason(ended: Ended, deadline: float) -> str:
    """The launcher's own words: of a job that was not started what is wrong first, else which rank failed and why."""
    notes = [found[1] for line in ended.output.splitlines() if (found := _SAYS.match(line))]
    if ended.code is None or not notes:
        return reason_of_output(ended, deadline)
    said = notes[0] if ended.code == EXIT_NOT_STARTED else notes[-1]
    return _RANK.sub("", said)  # it names the rank already
