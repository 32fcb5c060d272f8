"""Training jobs on a lab whose hosts differ: which host serves which parts and runs how many trainers, at which rates.

A placement is carried out as `gnnsys launch --plan` does. What links carried is read from the kernel's counters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnnsys.bench.dist.phase import READY, Phase, go_file
from gnnsys.bench.dist.run_job import Conductor, PhaseFigures, prepare_phases
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.lab import Lab, queue_seconds
from gnnsys.observe import UNLIMITED
from gnnsys.planning import Cluster, LaunchPlan, PlacedHost, PlannedHost

PROGRAM = "gnnsys.bench.dist.train"
_TO_MEET = "--rdzv-conf=join_timeout=300"


@dataclass(frozen=True, kw_only=True)
class LabPlacement:
    """What each host of a lab does, by their names: h1, h2, ..."""

    name: str
    hosts: tuple[PlacedHost, ...]

    @classmethod
    def of(cls, name: str, parts: Sequence[Sequence[int]], ranks: Sequence[int] | np.ndarray) -> LabPlacement:
        """`parts[h]` are those that host h serves, `ranks[h]` its trainers; hosts are counted from 0."""
        hosts = [
            PlacedHost(name=f"h{number + 1}", parts=tuple(map(int, own)), num_trainers=int(count))
            for number, (own, count) in enumerate(zip(parts, ranks, strict=True))
        ]
        return cls(name=name, hosts=tuple(host for host in hosts if host.parts or host.num_trainers))

    @classmethod
    def even(cls, name: str, num_parts: int, trainers: int, order: Sequence[int]) -> LabPlacement:
        """What torchrun and `place_parts` do where machines are numbered in this order: as many trainers on each as can
        be, and parts in blocks."""
        num_hosts = len(order)
        ranks = np.bincount(np.arange(trainers) * num_hosts // trainers, minlength=num_hosts)
        blocks = np.array_split(np.arange(num_parts), num_hosts)
        place = np.argsort(order)  # of each host among the machines
        return cls.of(name, [blocks[at].tolist() for at in place], [ranks[at] for at in place])

    @classmethod
    def drawn(cls, name: str, num_parts: int, trainers: int, num_hosts: int, seed: int) -> LabPlacement:
        """Every part on a host that is drawn; a trainer on each host, and the others on hosts that are drawn, two on a
        host at most."""
        generator = np.random.default_rng(seed)
        ranks = np.ones(num_hosts, dtype=np.int64)
        ranks[generator.permutation(num_hosts)[: trainers - num_hosts]] += 1
        host_of_part = generator.integers(num_hosts, size=num_parts)
        return cls.of(name, [np.flatnonzero(host_of_part == host).tolist() for host in range(num_hosts)], ranks)

    @property
    def num_trainers(self) -> int:
        return sum(host.num_trainers for host in self.hosts)

    def launch_plan(self) -> LaunchPlan:
        hosts = [
            PlannedHost(name=host.name, num_ranks=host.num_trainers, parts=host.parts, samplers=host.samplers)
            for host in self.hosts
        ]
        return LaunchPlan(hosts=tuple(hosts))


@dataclass(frozen=True, kw_only=True)
class LabRates:
    """Rates of each host's link, None for no limit."""

    name: str
    rates: tuple[str | None, ...]

    def cluster(self, cpus: Sequence[float], slots: Sequence[int], queues: float = 1.0) -> Cluster:
        """The lab with these rates, as a planner knows it. `slots`: the most trainers of each host. `queues`: how many
        times as long as full buckets say."""
        told = [
            {"name": f"h{number}", "cores": cpu, "rate": rate or UNLIMITED, "slots": most}
            | ({"queue": queues * queue_seconds(rate)} if rate else {})
            for number, (cpu, rate, most) in enumerate(zip(cpus, self.rates, slots, strict=True), start=1)
        ]
        return Cluster.from_json(told)


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
    with Lab(len(cpus), weight=2 * len(cpus)) as lab:  # a job starts without quotas, beside whatever else runs
        conductor = RatesConductor(lab, folder, phases, rates, cpus)
        program = [_TO_MEET, "-m", PROGRAM, str(folder), str(parts)]
        try:
            lab.run(
                program,
                plan=placement.launch_plan(),
                timeout=timeout,
                env=trainer_environment(),
                heard=lambda host, line: conductor.hear(line),
            )
        finally:
            conductor.close()
    found = conductor.figures()
    (folder / "figures.json").write_text(json.dumps({name: of.to_json() for name, of in found.items()}, indent=1))
    return found
