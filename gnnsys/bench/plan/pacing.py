"""Paced replies beside plain TCP on the lab: many hosts that pull from one, and one that pulls from many.

Goodput of a pull, the slowest flow's time over the mean, and an epoch's seconds. Both ways run in turns in one job, so
that what else the machine does meets both alike; figures are medians over the turns. The limit is the busiest link.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from gnnsys.bench.case import OURS, Case, Versus, score, value
from gnnsys.bench.communities import CommunitySettings, make_graph, task_folder
from gnnsys.bench.lab_jobs import LabJobs, check_lab, job_case, say, trainer_environment
from gnnsys.bench.plan.pacing_rank import FIGURES, FROM_ALL, FROM_ONE, PACED, PLAIN, PacingTask
from gnnsys.bench.workload import Workload
from gnnsys.graph import MANIFEST, load
from gnnsys.lab import Command, Lab, wait_all
from gnnsys.observe import bytes_per_second
from gnnsys.partition import partition_graph

PROGRAM = "gnnsys.bench.plan.pacing_rank"
PATTERNS = (FROM_ONE, FROM_ALL)
_TO_MEET = ("--rdzv-backend=c10d", "--rdzv-conf=join_timeout=300")
_SECONDS = 420.0


@dataclass(frozen=True, kw_only=True)
class PacingSettings(CommunitySettings):
    """`hosts` pull from one more, or the other way round; every link has `rate`. No quotas: links are to bind."""

    suite = "plan"

    num_nodes: int = 27_000
    num_classes: int = 9
    avg_degree: float = 12.0
    homophily: float = 0.9
    num_features: int = 128
    hosts: int = 8
    cpu: float = 2.0
    rate: str = "100mbit"
    megabytes: float = 4.0
    batches: int = 12
    turns: int = 5

    def task(self) -> PacingTask:
        return PacingTask(rate=self.rate, megabytes=self.megabytes, batches=self.batches, turns=self.turns)


QUICK: dict[str, Any] = {
    "num_nodes": 3000,
    "num_classes": 3,
    "num_features": 32,
    "hosts": 2,
    "megabytes": 0.5,
    "batches": 2,
    "turns": 1,
}


@dataclass(frozen=True)
class WayFigures:
    """Of one pattern and one way: goodput in MB/s, the slowest flow over the mean, seconds of an epoch."""

    goodput: float
    worst_flow: float
    epoch: float


def summarize(everyone: Sequence[Sequence[dict[str, Any]]], flow_bytes: float) -> dict[tuple[str, str], WayFigures]:
    """Medians over turns, by pattern and way, of what every rank says of itself. `flow_bytes`: of each flow of a pull.

    What all ranks do together begins with the first of them and ends with the last.
    """
    turns: dict[tuple[str, str], list[WayFigures]] = {}
    for of_ranks in zip(*everyone, strict=True):
        pulled = [span for told in of_ranks for span in told["pulled"]]
        epochs = [span for told in of_ranks for span in told["epoch"]]
        flows = [end - begin for begin, end in pulled]
        goodput = len(pulled) * flow_bytes / _together(pulled) / 1e6
        figures = WayFigures(goodput, max(flows) / mean(flows), _together(epochs))
        turns.setdefault((of_ranks[0]["pattern"], of_ranks[0]["way"]), []).append(figures)
    return {
        key: WayFigures(*(median(getattr(each, name) for each in found) for name in ("goodput", "worst_flow", "epoch")))
        for key, found in turns.items()
    }


def _together(spans: Sequence[Sequence[float]]) -> float:
    """Seconds from the first begin to the last end."""
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


class PacingJobs(LabJobs[PacingSettings]):
    """The one job, run when a row first needs it. Settings of a command line are those of the placements' rows."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, PacingSettings, QUICK, texts={})

    def figures(self) -> dict[tuple[str, str], WayFigures]:
        found: dict[tuple[str, str], WayFigures] = self._once("pacing", self._run)
        return found

    def _parts(self) -> Path:
        settings = self.settings
        out = task_folder(self._workload.folder, settings) / f"parts-{settings.hosts + 1}"
        if not (out / MANIFEST).exists():
            graph = load(make_graph(self._workload.folder, settings))
            partition_graph(graph, settings.hosts + 1, out, edge_ids=False)
        return out

    def _run(self) -> dict[tuple[str, str], WayFigures]:
        check_lab()
        settings, folder, parts = self.settings, self._folder / "pacing", self._parts()
        settings.task().save(folder)
        heard: list[str] = []
        num_hosts = settings.hosts + 1
        with Lab(num_hosts, rate=settings.rate, weight=2 * num_hosts) as lab:
            meeting = f"{lab.names[0]}:{29400 + secrets.randbelow(2000)}"
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}", *_TO_MEET]
            torchrun += [f"--rdzv-endpoint={meeting}", f"--rdzv-id={lab.id}", "--nproc-per-node=1"]
            started: list[Command] = []
            try:
                for host in lab.hosts:
                    words = [*torchrun, "-m", PROGRAM, str(folder), str(parts)]
                    lab.start(host, words, env=trainer_environment(), heard=heard.append, known=started)
                wait_all(started, _SECONDS)
            finally:
                for command in started:
                    command.kill()
        lines = [line for line in heard if line.startswith(FIGURES)]
        if len(lines) != 1:
            raise RuntimeError("the job ended without figures")
        everyone = json.loads(lines[0].removeprefix(FIGURES))
        (folder / "figures.json").write_text(json.dumps(everyone, indent=1))
        found = summarize(everyone, 1e6 * settings.megabytes)
        for (pattern, way), each in found.items():
            said = f"{each.goodput:.2f} MB/s, worst flow {each.worst_flow:.3f}, epoch {each.epoch:.2f} s"
            say(f"  {pattern}, {way}: {said}")
        return found


def pacing(workload: Workload) -> Iterator[Case]:
    """Paced beside plain. A ratio above one says that pacing wins; nothing is promised, as it is off by default."""
    jobs = PacingJobs(workload)
    settings = jobs.settings
    limit = bytes_per_second(settings.rate) / 1e6
    beside = Versus((PLAIN,), required=False)

    def sides(pattern: str, name: str) -> dict[str, Callable[[], float]]:
        return {
            OURS: lambda: float(getattr(jobs.figures()[pattern, PACED], name)),
            PLAIN: lambda: float(getattr(jobs.figures()[pattern, PLAIN], name)),
        }

    for pattern in PATTERNS:
        of = f"pacing/{pattern}, {settings.hosts} hosts at {settings.rate}"
        goodput = sides(pattern, "goodput") | {"link": lambda: limit}
        yield job_case(f"{of}/goodput", score("MB/s"), goodput, beside, limit="link")
        fair = sides(pattern, "worst_flow") | {"fair": lambda: 1.0}
        yield job_case(f"{of}/worst flow over mean", value("x"), fair, beside, limit="fair")
        yield job_case(f"{of}/epoch", value("s"), sides(pattern, "epoch"), beside)


BENCHMARKS = [pacing]
