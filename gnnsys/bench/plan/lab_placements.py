"""Training jobs on a lab whose hosts differ: which host serves which parts and runs how many trainers, at which rates.

A placement is carried out as `gnnsys launch` does: each host is told its parts, and has ranks of its own number. What
links carried is read from the kernel's counters.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gnnsys.bench.dist.phase import READY, Phase, go_file
from gnnsys.bench.dist.run_job import Conductor, PhaseFigures, prepare_phases
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.lab import Command, Lab, wait_all

PROGRAM = "gnnsys.bench.dist.train"
SERVE_PARTS = "GNNSYS_SERVE_PARTS"
_TO_MEET = ("--rdzv-backend=c10d", "--rdzv-conf=join_timeout=300")


@dataclass(frozen=True, kw_only=True)
class LabPlacement:
    """`parts[h]` are those that host h serves, `ranks[h]` its trainers; hosts are counted from 0."""

    name: str
    parts: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.ranks) or min(self.ranks) < 1:
            raise ValueError("every host of the lab has parts, which may be none, and a trainer at least")

    @property
    def machine_of_part(self) -> list[int]:
        found = {part: host for host, parts in enumerate(self.parts) for part in parts}
        return [found[part] for part in range(len(found))]


@dataclass(frozen=True, kw_only=True)
class LabRates:
    """Rates of each host's link, None for no limit."""

    name: str
    rates: tuple[str | None, ...]


class RatesConductor(Conductor):
    """Sets the rates of every host before a phase, and the quotas of all."""

    def __init__(
        self, lab: Lab, folder: Path, phases: Sequence[Phase], rates: Sequence[LabRates], cpus: Sequence[float]
    ) -> None:
        self._rates, self._cpus = {each.name: each.rates for each in rates}, cpus
        super().__init__(lab, folder, phases, None)

    def _follow(self, word: str, phase: Phase, rest: list[str]) -> None:
        if word != READY:
            return super()._follow(word, phase, rest)
        for host, rate in zip(self._lab.hosts, self._rates[phase.name], strict=True):
            self._lab.set_rate(rate, host=host)
            self._lab.set_cpu(self._cpus[host - 1], host=host)
        go_file(self._folder, word, phase.name).touch()


def run_placement(
    folder: Path,
    parts: Path,
    placement: LabPlacement,
    rates: Sequence[LabRates],
    task: Task,
    *,
    cpus: Sequence[float],
    warm: int,
    epochs: int = 1,
    timeout: float = 900.0,
) -> dict[str, PhaseFigures]:
    """Trains on a lab with so many hosts, a phase for each set of rates; figures by their names."""
    phases = [Phase(name=each.name, warm=warm, epochs=epochs) for each in rates]
    prepare_phases(folder, phases)
    task.save(folder)
    with Lab(len(placement.ranks), weight=2 * len(placement.ranks)) as lab:
        conductor = RatesConductor(lab, folder, phases, rates, cpus)
        meeting = f"{lab.names[0]}:{29400 + secrets.randbelow(2000)}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(placement.ranks)}", *_TO_MEET]
        torchrun += [f"--rdzv-endpoint={meeting}", f"--rdzv-id={lab.id}"]
        started: list[Command] = []
        try:
            for host, own, ranks in zip(lab.hosts, placement.parts, placement.ranks, strict=True):
                served = ",".join(map(str, own))
                env = trainer_environment(PYTHONUNBUFFERED="1", **{SERVE_PARTS: served})
                words = [*torchrun, f"--nproc-per-node={ranks}", "-m", PROGRAM, str(folder), str(parts)]
                lab.start(host, words, env=env, heard=partial(_hear, conductor), known=started)
            wait_all(started, timeout)
        finally:
            for command in started:
                command.kill()
            conductor.close()
    found = conductor.figures()
    (folder / "figures.json").write_text(json.dumps({name: of.to_json() for name, of in found.items()}, indent=1))
    return found


def _hear(conductor: Conductor, line: str) -> None:
    conductor.hear(line)
