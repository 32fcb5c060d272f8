"""Learnable embeddings on two hosts of the lab, beside DistDGL's: updated rows per second, and bytes of each.

Both sides do the same work: the same batches of ids, the same width and loss, SparseAdam, as many trainers per host,
half of the rows on either host. Jobs of the sides take turns; figures are medians over the rounds. Each job starts
without limits, then has the links' rate and the hosts' quota. Needs root: where there is no lab, rows are missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Benchmark, Case, Refused, Unit, Versus, score, value
from gnnsys.bench.dist.distdgl import run_processes
from gnnsys.bench.dist.phase import SYNCHRONOUS, Phase
from gnnsys.bench.dist.run_job import Conductor, PhaseFigures, prepare_phases, run_job
from gnnsys.bench.lab_jobs import check_lab, job_case, say
from gnnsys.bench.parse_settings import from_texts
from gnnsys.bench.typed.embedding_task import SKEWED, UNIFORM, EmbeddingTask
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import MANIFEST, sbm
from gnnsys.lab import Lab, parse_rate
from gnnsys.partition import partition_graph

TRAIN, DGL_PROGRAM = "gnnsys.bench.typed.embedding_train", "gnnsys.bench.typed.embedding_distdgl"
CLEAR, DISTDGL, LEAST = "in the clear", "DistDGL", "ids and rows once each way"
KINDS = (UNIFORM, SKEWED)
WARM = 3
UPDATES, BYTES, MICROSECONDS = score("rows/s"), value("B/row"), value("us/row")
Figures = Mapping[str, PhaseFigures]  # of a job, by kind of ids


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """`cpu` is the quota of a host, `rate` that of every link. 10M rows of 64 take 8 GB, with SparseAdam's state."""

    num_rows: int = 2_000_000
    dim: int = 64
    trainers: int = 1
    batch_size: int = 65_536  # rows of a batch of some hundred seeds and two hops of ten neighbours
    steps: int = 10
    rounds: int = 3
    cpu: float = 0.9
    rate: str = "10gbit"

    def __post_init__(self) -> None:
        parse_rate(self.rate)
        for name in ("num_rows", "dim", "trainers", "batch_size", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def task(self) -> EmbeddingTask:
        return EmbeddingTask(
            num_rows=self.num_rows,
            dim=self.dim,
            trainers_per_host=self.trainers,
            batch_size=self.batch_size,
            steps=self.steps,
        )

    @property
    def phases(self) -> list[Phase]:
        return [Phase(name=kind, mode=SYNCHRONOUS, rate=self.rate, warm=WARM) for kind in KINDS]

    @property
    def least_bytes(self) -> float:
        """Of an updated row: half of them are elsewhere, and such a one comes and its gradient goes, with its id."""
        return 2 * (8 + 4 * self.dim) * (1 - 1 / self.task.num_hosts)


QUICK = {"num_rows": 20_000, "dim": 16, "batch_size": 512, "steps": 3, "rounds": 1}


class EmbeddingJobs:
    """The rounds, run when a row first needs them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        is_full = workload.sizes.num_nodes >= FULL.num_nodes
        self.settings = from_texts(EmbeddingSettings, workload.settings, {} if is_full else QUICK)

    def updates(self, side: str, kind: str) -> float:
        """Updated rows per second of both hosts together."""
        return median(job[kind].samples_per_s for job in self._jobs(side))

    def bytes(self, side: str, kind: str) -> float:
        """That links carried for an updated row."""
        return median(bytes_of(job[kind]) for job in self._jobs(side))

    def microseconds(self, side: str, kind: str) -> float:
        """Of processor time, of all processes of both hosts, for an updated row."""
        return median(1e6 * sum(job[kind].cpu_seconds.values()) / job[kind].seeds for job in self._jobs(side))

    def _jobs(self, side: str) -> list[Figures]:
        found: list[Figures] | str = self._workload.once("embeddings/rounds", self._run)[side]
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _run(self) -> dict[str, list[Figures] | str]:
        """All rounds of all sides; of DistDGL the reason, where it cannot do it."""
        check_lab()
        settings, folder = self.settings, self._workload.folder / f"embeddings-{self.settings.num_rows}"
        parts = make_parts(folder)
        found: dict[str, list[Figures] | str] = {side: [] for side in (OURS, CLEAR, DISTDGL)}
        if reason := peers.missing("dgl").get("dgl"):
            found[DISTDGL] = reason
        calls: dict[str, Callable[[], Figures]] = {
            OURS: lambda: run_ours(folder / "ours", parts, settings, encrypt=True),
            CLEAR: lambda: run_ours(folder / "clear", parts, settings, encrypt=False),
            DISTDGL: lambda: run_distdgl(folder / "distdgl", settings),
        }
        for number in range(settings.rounds):
            for side, call in calls.items():
                jobs = found[side]
                if isinstance(jobs, str):
                    continue
                try:
                    jobs.append(call())
                except Exception as error:
                    if side != DISTDGL:
                        raise
                    found[side] = f"{type(error).__name__}: {error}"
                    continue
                say(f"  round {number + 1}, {side}: {described(jobs[-1])}")
        return found


def bytes_of(figures: PhaseFigures) -> float:
    return sum(traffic.bytes_in for traffic in figures.traffic.values()) / figures.seeds


def described(job: Figures) -> str:
    texts = []
    for kind, figures in job.items():
        first, last = (sum(rank["losses"][at] for rank in figures.ranks) / len(figures.ranks) for at in (0, -1))
        seconds = " ".join(f"{used:.1f}" for used in figures.cpu_seconds.values())
        texts.append(
            f"{kind} {figures.samples_per_s:,.0f} rows/s, {bytes_of(figures):.0f} B/row, {figures.seeds:,.0f} rows in "
            f"{figures.seconds:.2f} s, CPU s per host {seconds}, loss {first:.4f} to {last:.4f}"
        )
    return "; ".join(texts)


def make_parts(folder: Path) -> Path:
    """Of a small graph: an even cut of any number of rows needs no other."""
    out = folder / "parts"
    if not (out / MANIFEST).exists():
        partition_graph(sbm(1000, num_classes=4, num_features=4), 2, out, method="random", balance=["nodes"])
    return out


def run_ours(folder: Path, parts: Path, settings: EmbeddingSettings, *, encrypt: bool) -> Figures:
    task = replace(settings.task, encrypt=encrypt)
    return run_job(folder, parts, settings.phases, task, cpu=settings.cpu, module=TRAIN, timeout=900.0)


def run_distdgl(folder: Path, settings: EmbeddingSettings) -> Figures:
    """Parts are made once. A host's rows and states lie in its /dev/shm."""
    task, program = settings.task, [sys.executable, "-m", DGL_PROGRAM]
    task.save(folder)
    if not (folder / "parts" / "graph.json").exists():
        done = subprocess.run([*program, "partition", str(folder)], capture_output=True, text=True, timeout=900.0)
        if done.returncode:
            raise RuntimeError(f"DGL could not make parts: {(done.stderr.strip() or 'no message')[-2000:]}")
    prepare_phases(folder, settings.phases)
    shm = (1 << 30) + 2 * settings.num_rows * (3 * settings.dim + 1) * 4 // task.num_hosts
    with Lab(task.num_hosts, shm=shm) as lab:
        conductor = Conductor(lab, folder, settings.phases, settings.cpu)
        try:
            run_processes(
                lab, folder, program, list(lab.hosts), task.trainers_per_host,
                timeout=900.0, heard=lambda host, line: conductor.hear(line),
            )  # fmt: skip
        finally:
            conductor.close()
    found = conductor.figures()
    (folder / "figures.json").write_text(json.dumps({name: of.to_json() for name, of in found.items()}, indent=1))
    return found


def embeddings(work: Workload) -> Iterator[Case]:
    """Ours as it is by default, with a key, and in the clear, as DistDGL's messages are."""
    jobs = work.once("embeddings/jobs", lambda: EmbeddingJobs(work))
    reason = peers.missing("dgl").get("dgl")
    missing = {} if reason is None else {DISTDGL: reason}
    figures: dict[str, tuple[Unit, Callable[[str, str], float], float | None]] = {
        "updates": (UPDATES, jobs.updates, 3.0),
        "processor time": (MICROSECONDS, jobs.microseconds, None),
        "bytes": (BYTES, jobs.bytes, None),
    }
    for kind in KINDS:
        for side, suffix in ((OURS, ""), (CLEAR, f", {CLEAR}")):
            for name, (unit, of, target) in figures.items():
                sides: dict[str, Callable[[], float]] = {OURS: partial(of, side, kind)}
                if not missing:
                    sides[DISTDGL] = partial(of, DISTDGL, kind)
                if name == "bytes":
                    sides[LEAST] = lambda: jobs.settings.least_bytes
                yield job_case(
                    f"embeddings/{kind}{suffix}/{name}", unit, sides, Versus((DISTDGL,), target, required=False),
                    limit=LEAST if LEAST in sides else None, missing=missing, foreign=[DISTDGL],
                )  # fmt: skip


BENCHMARKS: list[Benchmark] = [embeddings]
