"""A job of two hosts with two trainers each under torchrun's agents, its faults, and the judgement of what it came to.

Hosts are those of the lab where one can be made, else two agents on this host. A job is judged by comparison with the
same job unbroken: it must end in time, have done every batch once (what was rolled back counts as not done), and end
with the same weights, moments, rows and generators to the last bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.lab import Lab, available
from gnnsys.ops import CSC
from gnnsys.partition import Assignment, write_parts
from tests.chaos.program import CLASSES
from tests.support.faults import Fault, has_happened
from tests.support.lab_host import on_host
from tests.support.nursery import forks_ranks
from tests.support.processes import ROOT, processes

AGENT = ROOT / "tests" / "chaos" / "agent.py"
NUM_HOSTS, TRAINERS = 2, 2
NUM_RANKS = NUM_HOSTS * TRAINERS
NUM_NODES, NUM_EDGES, NUM_SEEDS = 400, 2400, 219
MAX_RESTARTS = 3
DEADLINE = 400.0  # seconds for a job that takes ten on a quiet machine


@dataclass(frozen=True)
class Plan:
    """What the program is told. Seven batches an epoch and a checkpoint every five: most are in mid-epoch."""

    parts: str
    folder: str
    faults: tuple[str, ...] = ()
    trains_rows: bool = True  # whether there is an embedding, whose rows a shard takes with it when it dies
    own_disks: bool = False  # whether each machine keeps checkpoints where no other sees them
    batch_size: int = 8
    epochs: int = 4
    every: int = 5
    timeout: float = 120.0


@dataclass
class Ended:
    """What a job left."""

    plan: Plan
    codes: list[int | None]  # of the agents; None where time was over
    seconds: float
    output: str
    logs: list[list[dict[str, Any]]] = field(default_factory=list)  # by rank
    ends: list[dict[str, Any] | None] = field(default_factory=list)

    @property
    def restarts(self) -> int:
        """How often ranks began again."""
        return max((sum("life" in line for line in log) for log in self.logs), default=0) - 1

    @property
    def shard_lives(self) -> list[int]:
        """By machine, how often its shard had been started again within the job's last life."""
        told = [line["shard_lives"] for log in self.logs for line in log if "shard_lives" in line]
        return list(told[-1]) if told else [0] * NUM_HOSTS


class Place:
    """Where jobs run, one after the other: hosts of a lab, or agents on this host."""

    def __init__(self, folder: Path, lab: Lab | None) -> None:
        self.folder, self.lab = folder, lab
        self.parts = folder / "parts"
        write_small_parts(self.parts)
        self._unbroken: dict[tuple[bool, bool, int], Ended] = {}

    def run(self, name: str, faults: Sequence[Fault], deadline: float = DEADLINE, **options: Any) -> Ended:
        """Runs a job to its end, or to the deadline."""
        folder = self.folder / name
        folder.mkdir()
        plan = Plan(str(self.parts), str(folder), tuple(map(str, faults)), **options)
        (folder / "plan.json").write_text(json.dumps(asdict(plan)))
        began = time.monotonic()
        codes, output = self._launch(folder / "plan.json", deadline)
        ended = Ended(plan, codes, time.monotonic() - began, output)
        for rank in range(NUM_RANKS):
            log, end = folder / f"rank-{rank}.log", folder / f"end-{rank}.pt"
            ended.logs.append([json.loads(line) for line in log.read_text().splitlines()] if log.exists() else [])
            ended.ends.append(torch.load(end, weights_only=True) if end.exists() else None)
        return ended

    def unbroken(self, **options: Any) -> Ended:
        """The same job without faults: run once."""
        plan = replace(Plan("", ""), **options)
        key = (plan.trains_rows, plan.own_disks, plan.epochs)
        if key not in self._unbroken:
            name = "unbroken" + "".join("-" + option for option, value in sorted(options.items()) if value)
            ended = self.run(f"{name}-{len(self._unbroken)}", [], **options)
            problems = whole(ended)
            assert not problems, "the unbroken job failed: " + "; ".join(problems) + "\n" + ended.output[-6000:]
            self._unbroken[key] = ended
        return self._unbroken[key]

    def _launch(self, plan: Path, deadline: float) -> tuple[list[int | None], str]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a group that restarts reads the keys of the one before
        run_id = secrets.token_hex(4)
        with processes() as running:
            if self.lab is not None:
                meeting = f"{self.lab.names[0]}:{29400 + secrets.randbelow(2000)}"
                for machine, host in enumerate(self.lab.hosts):
                    there = env | on_host(self.lab, host)
                    running.fork(f"agent {machine}", machine, AGENT, [plan, meeting, run_id], there)
            else:
                place = [f"127.0.0.1:{running.store_port()}", run_id, "127.0.0.1"]
                for machine in range(NUM_HOSTS):
                    running.start(f"agent {machine}", [sys.executable, AGENT, plan, *place], env)
            try:
                ended = running.wait(deadline)
            except AssertionError as error:  # time is over
                return [None] * NUM_HOSTS, str(error)
            return [e.returncode for e in ended], "\n".join(map(str, ended))


@contextlib.contextmanager
def place(folder: Path) -> Iterator[Place]:
    """A place for jobs; everything that ran there is gone at the end of the block."""
    if available() is not None or not forks_ranks():
        yield Place(folder, None)
        return
    with Lab(hosts=NUM_HOSTS) as lab:
        yield Place(folder, lab)


def write_small_parts(folder: Path) -> None:
    """A graph in two parts, drawn from one seed. Neighbours are anywhere, so every batch asks both machines."""
    g = torch.Generator().manual_seed(11)
    csc = CSC.from_edge_index(torch.randint(0, NUM_NODES, (2, NUM_EDGES), generator=g), NUM_NODES)
    mask = torch.zeros(NUM_NODES, dtype=torch.bool)
    mask[torch.randperm(NUM_NODES, generator=g)[:NUM_SEEDS]] = True
    rows = {
        "x": torch.randn(NUM_NODES, 6, generator=g),
        "y": torch.randint(0, CLASSES, (NUM_NODES,), generator=g),
        "train_mask": mask,
    }
    subpart = torch.randint(0, NUM_RANKS, (NUM_NODES,), generator=g, dtype=torch.int32)
    assignment = Assignment(NUM_HOSTS, TRAINERS, {NODE: subpart})
    write_parts(Graph({NODE: NUM_NODES}, {EDGE: csc}, {NODE: rows}), assignment, folder)


# Judgement


def judge(ended: Ended, unbroken: Ended) -> list[str]:
    """What is wrong with a job that was broken; nothing, if all is well."""
    problems = whole(ended)
    late = [line for number, line in enumerate(ended.plan.faults) if not has_happened(Path(ended.plan.folder), number)]
    problems += [f"this fault did not happen: {line}" for line in late]
    if any(code != 0 for code in ended.codes):
        return problems
    for rank in range(NUM_RANKS):
        if history(ended.logs[rank]) != history(unbroken.logs[rank]):
            problems.append(f"rank {rank} did other batches than in the unbroken job")
        different = compare(ended.ends[rank], unbroken.ends[rank])
        if different:
            problems.append(f"rank {rank} ended otherwise than in the unbroken job: {', '.join(different[:4])}")
    return problems


def whole(ended: Ended) -> list[str]:
    """What is wrong with a job by itself: it did not end, or lost or repeated a batch or a seed."""
    if any(code is None for code in ended.codes):
        return [f"it hung: not over after {ended.seconds:.0f} s"]
    if any(ended.codes):
        return [f"agents ended with {ended.codes}"]
    plan, problems = ended.plan, []
    histories = [history(log) for log in ended.logs]
    for rank, done in enumerate(histories):
        steps = [line["step"] for line in done]
        if steps != list(range(1, len(steps) + 1)):
            problems.append(f"rank {rank} lost or repeated steps: {steps}")
    for epoch in range(plan.epochs):
        seeds = [seed for done in histories for line in done if line["epoch"] == epoch for seed in line["seeds"]]
        if len(seeds) != NUM_SEEDS or len(set(seeds)) != NUM_SEEDS:
            problems.append(f"epoch {epoch} had {len(seeds)} seeds, {len(set(seeds))} of them different: {NUM_SEEDS}")
    problems += [f"rank {rank} left no end" for rank, end in enumerate(ended.ends) if end is None]
    return problems


def history(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batches a rank did for good: those before the step that the last of its lives began with, and its own."""
    done: list[dict[str, Any]] = []
    for line in log:
        if "resumed" in line:
            done = [each for each in done if each["step"] <= line["resumed"]]
        elif "step" in line:
            done.append(line)
    return done


def compare(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested values differ in any bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in compare(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [
            found for n, (a, b) in enumerate(zip(one, other, strict=True)) for found in compare(a, b, f"{where}/{n}")
        ]
    return [] if type(one) is type(other) and one == other else [where]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
