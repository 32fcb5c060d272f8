"""A training job on hosts of the lab: starts without limits, then runs its phases under the quota and at their rates.

    figures = run_job(folder, parts, [Phase(name="slow", rate="100mbit")], task, cpu=0.45)

What a link carried is read from the kernel's counters when rank 0 says that a phase begins and ends.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from gnnsys.bench.dist.phase import BEGIN, END, FIGURES, READY, Phase, go_file, save
from gnnsys.lab import Lab, HostTraffic, parse_rate
from gnnsys.bench.lab_jobs import trainer_environment

PROGRAM = "gnnsys.bench.dist.train"


class JobTask(Protocol):
    """What trainers are told, which they load from the job's folder."""

    @property
    def num_hosts(self) -> int: ...

    @property
    def trainers_per_host(self) -> int: ...

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class PhaseFigures:
    """What a phase came to, per epoch. `traffic` is that of each host, `ranks` what every trainer says of itself."""

    phase: Phase
    traffic: dict[int, HostTraffic]
    cpu_seconds: dict[int, float]
    ranks: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Of an epoch."""
        return max(rank["seconds"] for rank in self.ranks) / self.phase.epochs

    @property
    def seeds(self) -> float:
        return sum(rank["seeds"] for rank in self.ranks) / self.phase.epochs

    @property
    def samples_per_s(self) -> float:
        return self.seeds / self.seconds

    @property
    def waited_share(self) -> float:
        """The part of an epoch that trainers wait for batches."""
        return sum(rank["waited"] / rank["seconds"] for rank in self.ranks) / len(self.ranks)

    @property
    def busiest_bytes(self) -> float:
        """Of an epoch, on the link and in the direction that carried most."""
        return max(max(t.bytes_in, t.bytes_out) for t in self.traffic.values()) / self.phase.epochs

    def link_seconds(self, rate: str) -> float:
        """The least time that the busiest link needs for an epoch at `rate`."""
        return self.busiest_bytes * 8 / parse_rate(rate)

    def describe(self) -> str:
        """Lines for those who watch."""
        counts = [rank["counts"] for rank in self.ranks]
        asked, shared = (sum(c.get(name, 0) for c in counts) for name in ("rows_asked", "rows_shared"))
        inputs = sum(rank["input_nodes"] for rank in self.ranks) / sum(rank["steps"] for rank in self.ranks)
        scale = 1e-6 / self.phase.epochs
        links = [f"{t.bytes_in * scale:.0f}/{t.bytes_out * scale:.0f}" for t in self.traffic.values()]
        return (
            f"{self.phase.name}: {self.seconds:.1f} s per epoch, {self.samples_per_s:.0f} samples/s, waiting "
            f"{self.waited_share:.0%}, {inputs:,.0f} inputs per batch\n"
            f"    MB in/out per host {' '.join(links)}, rows asked {asked:,}, shared in flight {shared:,}, "
            f"CPU s per host {' '.join(f'{s:.1f}' for s in self.cpu_seconds.values())}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": asdict(self.phase),
            "seconds": self.seconds,
            "samples_per_s": self.samples_per_s,
            "traffic": {host: asdict(traffic) for host, traffic in self.traffic.items()},
            "cpu_seconds": self.cpu_seconds,
            "ranks": self.ranks,
        }


def run_job(
    folder: Path,
    parts: Path,
    phases: Sequence[Phase],
    task: JobTask,
    *,
    cpu: float | None,
    num_seed_parts: int | None = None,
    timeout: float = 1800.0,
    module: str = PROGRAM,
) -> dict[str, PhaseFigures]:
    """Trains through `phases` on a lab of `task.num_hosts` hosts; figures by the phases' names, also in figures.json.

    `module` is what every trainer runs.
    """
    prepare_phases(folder, phases)
    task.save(folder)
    with Lab(task.num_hosts, weight=2 * task.num_hosts) as lab:  # a job starts without quotas, beside what else runs
        conductor = Conductor(lab, folder, phases, cpu)
        program = ["--nproc-per-node", str(task.trainers_per_host), "-m", module, str(folder), str(parts)]
        if num_seed_parts is not None:
            program.append(str(num_seed_parts))
        try:
            lab.run(program, timeout=timeout, env=trainer_environment(), heard=lambda host, line: conductor.hear(line))
        finally:
            conductor.close()
    found = conductor.figures()
    (folder / "figures.json").write_text(json.dumps({name: of.to_json() for name, of in found.items()}, indent=1))
    return found


def prepare_phases(folder: Path, phases: Sequence[Phase]) -> None:
    """Writes the phases where trainers look for them; nobody has said yet that they may go on."""
    folder.mkdir(parents=True, exist_ok=True)
    save(phases, folder)
    for phase in phases:
        for word in (READY, BEGIN):
            go_file(folder, word, phase.name).unlink(missing_ok=True)


class Conductor:
    """Hears what rank 0 says and acts on it: sets the rates of phases, and reads the counters.

    In one thread, as hosts' lines come from as many as there are hosts.
    """

    def __init__(self, lab: Lab, folder: Path, phases: Sequence[Phase], cpu: float | None) -> None:
        self._lab, self._folder, self._cpu = lab, folder, cpu
        self._phases = {phase.name: phase for phase in phases}
        self._before = self._after = self._read()
        self._found: dict[str, PhaseFigures] = {}
        self._error: Exception | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._act, name="lab-conductor", daemon=True)
        self._thread.start()

    def hear(self, line: str) -> None:
        if line.startswith((READY, BEGIN, END, FIGURES)):
            self._lines.put(line)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(60.0)

    def figures(self) -> dict[str, PhaseFigures]:
        if self._error is not None:
            raise RuntimeError(f"a phase could not be set up: {self._error}") from self._error
        missing = [name for name in self._phases if name not in self._found]
        if missing:
            raise RuntimeError(f"the job ended without figures for {', '.join(missing)}")
        return self._found

    def _act(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                word, name, *rest = line.split(maxsplit=2)
                self._follow(word, self._phases[name], rest)
            except Exception as error:  # told by figures(); the job runs into its own deadline
                self._error = error

    def _follow(self, word: str, phase: Phase, rest: list[str]) -> None:
        if word == READY:
            self._lab.set_rate(phase.rate)
            self._lab.set_cpu(self._cpu)  # the start was without: importing torch is not what is measured
        elif word == BEGIN:
            self._before = self._read()
        elif word == END:
            self._after = self._read()
        else:
            (traffic, cpu), (traffic_before, cpu_before) = self._after, self._before
            self._found[phase.name] = PhaseFigures(
                phase,
                {host: traffic[host] - traffic_before[host] for host in traffic},
                {host: (cpu[host] - cpu_before[host]) / phase.epochs for host in cpu},
                json.loads(rest[0]),
            )
        if word in (READY, BEGIN):
            go_file(self._folder, word, phase.name).touch()

    def _read(self) -> tuple[dict[int, HostTraffic], dict[int, float]]:
        return self._lab.bytes(), {host: self._lab.usage(host).cpu_seconds for host in self._lab.hosts}
