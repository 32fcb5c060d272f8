"""Runs a job on hosts of the lab, and reads its figures."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnsys.bench.fullgraph.lab_control import LabService
from gnnsys.bench.fullgraph.variant import VariantJob
from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.lab import Lab, parse_rate

PROGRAM = "gnnsys.bench.fullgraph.train"


@dataclass(frozen=True)
class VariantFigures:
    """Of one variant at one rate: medians over its epochs. `rate` is what links had, None without a limit."""

    group: str
    variant: str
    rate: str | None
    turns: list[dict[str, Any]]
    first: dict[str, Any]  # the epoch in which features travelled
    facts: list[dict[str, float]]  # by rank

    @property
    def seconds(self) -> float:
        return statistics.median(turn["seconds"] for turn in self.turns)

    @property
    def busiest_bytes(self) -> float:
        """On the link and in the direction that carried most."""
        return statistics.median(max(turn["bytes_in"] + turn["bytes_out"]) for turn in self.turns)

    @property
    def wire_bytes(self) -> float:
        """Out of all hosts, as the kernel counts."""
        return statistics.median(sum(turn["bytes_out"]) for turn in self.turns)

    @property
    def payload(self) -> float:
        """Rows and gradients of rows that all ranks sent."""
        return statistics.median(sum(rank["num_bytes"] for rank in turn["ranks"]) for turn in self.turns)

    @property
    def cores(self) -> float:
        """That the hosts used on average while the epochs ran."""
        used = [sum(turn["cpu_seconds"]) / len(turn["cpu_seconds"]) / turn["seconds"] for turn in self.turns]
        return statistics.median(used)

    def link_seconds(self, rate: str) -> float:
        """The least time that the busiest link needs at `rate`."""
        return self.busiest_bytes * 8 / parse_rate(rate)

    def of_ranks(self, name: str) -> list[float]:
        """Medians by rank of something a rank says of its epochs: compute, wait, send, cpu, own."""
        ranks = range(len(self.turns[0]["ranks"]))
        return [statistics.median(turn["ranks"][rank][name] for turn in self.turns) for rank in ranks]

    def describe(self) -> str:
        """A line for those who watch."""
        parts = {name: self.of_ranks(name) for name in ("compute", "wait", "send")}
        hosts = range(len(self.turns[0]["cpu_seconds"]))
        parts["cpu"] = [statistics.median(turn["cpu_seconds"][host] for turn in self.turns) for host in hosts]
        spent = [f"{name} {'/'.join(f'{s:.2f}' for s in seconds)}" for name, seconds in parts.items()]
        return (
            f"{self.group}, {self.variant}, {self.rate or 'unlimited'}: {self.seconds:.3f} s "
            f"({min(t['seconds'] for t in self.turns):.3f}-{max(t['seconds'] for t in self.turns):.3f}), "
            f"busiest link {self.busiest_bytes / 1e6:.2f} MB, {', '.join(spent)}"
        )


def run_job(folder: Path, job: VariantJob, *, timeout: float = 3600.0) -> dict[tuple[str, str, str], VariantFigures]:
    """Figures by group, variant and rate as the job names it, also in figures.json."""
    job.save(folder)
    (folder / "figures.json").unlink(missing_ok=True)
    with Lab(job.num_hosts) as lab:
        service = LabService(lab, folder)
        try:
            lab.run(
                ["--nproc-per-node", "1", "-m", PROGRAM, str(folder)],
                timeout=timeout,
                env=trainer_environment(GLOO_SOCKET_IFNAME="eth0"),
                heard=lambda host, line: service.hear(line),
            )
        finally:
            service.close()
    return read_figures(folder)


def read_figures(folder: Path) -> dict[tuple[str, str, str], VariantFigures]:
    found = json.loads((folder / "figures.json").read_text())
    return {
        (each["group"], each["variant"], each["rate"]): VariantFigures(
            each["group"], each["variant"], each["rate_bits"], each["turns"], each["first"], each["facts"]
        )
        for each in found
    }
