"""What explaining costs on one machine without the lab: machines as process groups that talk over loopback.

The lab's job with both kinds of masks. Stretches in which newer masks are made and stretches in which none are asked
for take turns, so that what else the machine does meets both. There should be three cores for each of `hosts`: a
trainer, its server, and one to spare. Needs no root; a minute or two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gnnsys.bench.case import Case, Versus, score, value
from gnnsys.bench.communities import task_folder
from gnnsys.bench.dist.phase import BEGIN, FIGURES, READY, Phase, go_file, save
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import NOTHING, LabJobs, say, trainer_environment
from gnnsys.bench.local_ranks import run_local_ranks
from gnnsys.bench.samplers.lab import BOTH, MODULE, QUICK, SamplerLabSettings, make_parts
from gnnsys.bench.samplers.lab_train import IDLE, START, TURN
from gnnsys.bench.samplers.outcome import figure_case
from gnnsys.bench.workload import FULL, Workload

_JOB_SECONDS = 900.0
_NUM_TURNS = 5
_EPOCHS = 6  # of a stretch: 120 steps, which are four rounds
_QUICK_TURNS = 1


class ExplainingJob(LabJobs[SamplerLabSettings]):
    """The one job, run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, SamplerLabSettings, QUICK)

    def stretches(self, name: str) -> list[list[dict[str, Any]]]:
        """What every rank says of itself, of each stretch with this name."""
        found: dict[str, list[dict[str, Any]]] = self._once("explaining job", self._run)
        return [ranks for phase, ranks in found.items() if phase.split(TURN)[0] == name]

    def samples_per_s(self, name: str) -> float:
        """The median of all stretches."""
        return median(map(_samples_per_s, self.stretches(name)))

    def mean(self, figure: str) -> float:
        """Over the ranks, of the last stretch in which masks were made."""
        ranks = self.stretches(BOTH)[-1]
        return sum(rank[figure] for rank in ranks) / len(ranks)

    def _run(self) -> dict[str, list[dict[str, Any]]]:
        settings = self.settings
        folder = task_folder(self._workload.folder, settings)
        parts, job = make_parts(folder, settings), folder / "explaining-job"
        task = Task(
            num_hosts=settings.hosts, trainers_per_host=1, batch_size=settings.batch_size, fanouts=settings.fanouts,
            hidden=settings.hidden, max_steps=settings.steps,
        )  # fmt: skip
        task.save(job)
        num_turns = _NUM_TURNS if self._workload.sizes.num_nodes >= FULL.num_nodes else _QUICK_TURNS
        phases = [Phase(name=BOTH + START, warm=0, epochs=1)]
        for turn in range(num_turns):
            phases += [Phase(name=f"{name}{TURN}{turn}", warm=6, epochs=_EPOCHS) for name in (BOTH, BOTH + IDLE)]
        save(phases, job)
        for phase in phases:
            for word in (READY, BEGIN):
                go_file(job, word, phase.name).touch()  # no harness has anything to do
        say(f"  explaining: {settings.hosts} machines in process groups on {os.cpu_count()} cores")
        found = run_machines(job, parts, settings.hosts)
        for name, ranks in found.items():
            say(f"  {name}: {_samples_per_s(ranks):.0f} samples/s, {_of_a_step(ranks)}")
        return found


def _samples_per_s(ranks: list[dict[str, Any]]) -> float:
    return float(sum(rank["seeds"] for rank in ranks) / max(rank["seconds"] for rank in ranks))


def _of_a_step(ranks: list[dict[str, Any]]) -> str:
    """For those who watch: seconds of a processor, means over ranks."""
    trainer = sum(rank["cpu_seconds"] / rank["steps"] for rank in ranks) / len(ranks)
    explaining = sum(rank["explaining_cpu"] for rank in ranks) / len(ranks)
    waited = sum(rank["waited"] / rank["seconds"] for rank in ranks) / len(ranks)
    asked = sum(rank["counts"].get("rows_asked", 0) for rank in ranks)
    return (
        f"CPU of a step {1e3 * trainer:.1f} ms and {1e3 * explaining:.1f} ms to explain, waiting {waited:.0%}, "
        f"rows asked {asked:,}"
    )


def run_machines(job: Path, parts: Path, num_machines: int) -> dict[str, list[dict[str, Any]]]:
    """Runs a trainer for each machine and returns the figures of all ranks by phase; RuntimeError where one fails."""
    environment = trainer_environment(GNNSYS_BENCH_GROUPS="1")
    said = run_local_ranks(["-m", MODULE, str(job), str(parts)], num_machines, _JOB_SECONDS, environment)
    lines = [line.split(" ", 2) for line in said[0].splitlines() if line.startswith(FIGURES)]
    return {name: json.loads(text) for _, name, text in lines}


def explaining(work: Workload) -> Iterator[Case]:
    """Throughput while masks are made beside that while none are, memory, and how long a round takes."""
    job = work.once("samplers/explaining", lambda: ExplainingJob(work))
    sides = {name: partial(job.samples_per_s, name) for name in (BOTH, BOTH + IDLE)}
    yield figure_case("explaining/throughput", score("samples/s"), BOTH, sides, Versus((BOTH + IDLE,), 0.95))
    memory = {
        BOTH: lambda: job.mean("memory") / 1e6,
        "without": lambda: (job.mean("memory") - job.mean("explaining_memory")) / 1e6,
    }
    yield figure_case("explaining/memory", value("MB"), BOTH, memory, Versus(("without",), 1 / 1.11))
    for label, figure in {"seconds of a round": "round_seconds", "CPU seconds of a step": "explaining_cpu"}.items():
        yield figure_case(f"explaining/{label}", value("s"), BOTH, {BOTH: partial(job.mean, figure)}, NOTHING)
