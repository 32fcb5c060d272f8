"""A `DistEmbedding` beside prefetched features on slow links of the lab: a step beside what the busiest link needs.

Parts are cut at random, so half of a batch's rows cross a link. If look-ups and steps do not wait for features that are
sent ahead, the network never idles, and a step takes as long as the busiest link needs for its bytes. Two minutes.
Needs root: where there is no lab, its rows are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from gnnsys.bench.case import OURS, Case, Versus, value
from gnnsys.bench.communities import CommunitySettings
from gnnsys.bench.dist.phase import NON_STOP, Phase
from gnnsys.bench.dist.run_job import PhaseFigures, run_job
from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import NOTHING, LabJobs, check_lab, job_case, say
from gnnsys.bench.typed.beside_features_train import LOOK_UPS, STEPS
from gnnsys.bench.workload import Workload
from gnnsys.graph import MANIFEST, sbm
from gnnsys.lab import parse_rate
from gnnsys.partition import partition_graph

MODULE = "gnnsys.bench.typed.beside_features_train"
LINK = "busiest link"
WAYS = {"with a key": True, "in the clear": False}
MOST = 1.15  # times the seconds of the busiest link that a step may take


@dataclass(frozen=True, kw_only=True)
class BesideFeaturesSettings(CommunitySettings):
    """A phase is `steps` steps of every host's trainer; each job has `phases` of them, and medians count."""

    suite = "typed"

    num_nodes: int = 20_000
    num_classes: int = 16
    avg_degree: float = 15.0
    homophily: float = 0.9
    num_features: int = 288
    hosts: int = 2
    cpu: float = 0.9
    batch_size: int = 512
    fanouts: tuple[int, ...] = (10, 5)
    hidden: int = 16
    steps: int = 15
    phases: int = 3
    rate: str = "100mbit"

    def __post_init__(self) -> None:
        parse_rate(self.rate)

    @property
    def task(self) -> Task:
        return Task(
            num_hosts=self.hosts,
            trainers_per_host=1,
            batch_size=self.batch_size,
            fanouts=self.fanouts,
            hidden=self.hidden,
            max_steps=self.steps,
        )


QUICK = {"num_nodes": 2_000, "num_features": 16, "batch_size": 32, "fanouts": (3, 2), "steps": 3, "phases": 1}


class BesideFeaturesJobs(LabJobs[BesideFeaturesSettings]):
    """A job with a key and one in the clear, each run when a row first needs it. Settings of a command line are those
    of the other rows of the lab."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, BesideFeaturesSettings, QUICK, texts={})

    def step(self, way: str) -> float:
        """Milliseconds of a step, features, look-up and update."""
        return median(1e3 * phase.seconds / self.settings.steps for phase in self._phases(way))

    def link(self, way: str) -> float:
        """Milliseconds that the busiest link needs for the bytes of a step."""
        rate, steps = self.settings.rate, self.settings.steps
        return median(1e3 * phase.link_seconds(rate) / steps for phase in self._phases(way))

    def waiting(self, way: str, what: str) -> float:
        """Milliseconds of a step that a rank spends in look-ups, or in the optimizer's step."""
        per_rank = [rank["counts"][what] / rank["steps"] for phase in self._phases(way) for rank in phase.ranks]
        return 1e-3 * median(per_rank)

    def _phases(self, way: str) -> list[PhaseFigures]:
        found: dict[str, PhaseFigures] = self._once(f"beside features, {way}", lambda: self._run(way))
        return list(found.values())

    def _run(self, way: str) -> dict[str, PhaseFigures]:
        check_lab()
        settings, folder = self.settings, self._folder
        task = replace(settings.task, encrypt=WAYS[way])
        parts, named = make_parts(folder, settings), folder / f"beside-features-{way.replace(' ', '-')}"
        found = run_job(named, parts, phases(settings), task, cpu=settings.cpu, module=MODULE, timeout=600.0)
        for figures in found.values():
            say(f"  {way}, {figures.describe()}")
        return found


def phases(settings: BesideFeaturesSettings) -> list[Phase]:
    return [Phase(name=f"turn-{turn}", mode=NON_STOP, rate=settings.rate) for turn in range(settings.phases)]


def make_parts(folder: Path, settings: BesideFeaturesSettings) -> Path:
    out = folder / f"random-parts-{settings.hosts}"
    if not (out / MANIFEST).exists():
        graph = sbm(**settings.graph, train=0.9)
        partition_graph(graph, settings.hosts, out, method="random", balance=["nodes"], edge_ids=False)
    return out


def beside_features(work: Workload) -> Iterator[Case]:
    """A step beside what the network needs for it, and how long ranks wait in it for the embedding's rows."""
    jobs = work.once("typed/beside features", lambda: BesideFeaturesJobs(work))
    for way in WAYS:
        of = f"lab/embedding beside features at {jobs.settings.rate}, {way}"
        sides: dict[str, Callable[[], float]] = {OURS: partial(jobs.step, way), LINK: partial(jobs.link, way)}
        yield job_case(f"{of}/step", value("ms"), sides, Versus((LINK,), 1 / MOST, required=False), limit=LINK)
        for name, what in (("look-up", LOOK_UPS), ("optimizer.step()", STEPS)):
            yield job_case(f"{of}/{name}", value("ms"), {OURS: partial(jobs.waiting, way, what)}, NOTHING)
