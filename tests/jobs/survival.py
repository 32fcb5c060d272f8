"""Kills workers, services and who submits, at seeded moments, and looks at what is left of a queue.

A service is a process of its own that kills itself, or one of its workers, when it has come to the n-th of its stages.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.jobs import JobService, Queue, graph_holder, worker_process
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.support import forked_popen
from tests.support.forked_popen import forking
from tests.support.nursery import Nursery, forks_ranks, nurseries
from tests.support.processes import run_code

SERVE = "import sys; from tests.jobs.survival import serve; serve(*sys.argv[1:])"
SUBMIT = "import sys; from tests.jobs.survival import submit; submit(*sys.argv[1:])"
KINDS = ("whole", "torch", "whole", "loader")
DEADLINE = 300.0


def arguments_of(number: int) -> tuple[dict[str, Any], int]:
    """Of the job with this number, from 1 on: (arguments, seed)."""
    kind = KINDS[number % len(KINDS)]
    return {"kind": kind, "hidden": 4 + number % 3, "epochs": 1 if kind == "loader" else 12}, number


def submit(folder: str, count: str, kill_at: str) -> None:
    """Submits jobs one by one, by keys; kills itself at the `kill_at`-th stage."""
    stages = 0

    def on_stage(stage: str) -> None:
        nonlocal stages
        stages += 1
        if stages == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    with Queue(folder, on_stage=on_stage) as queue:
        for number in range(1, int(count) + 1):
            arguments, seed = arguments_of(number)
            steps = 4 if number % 2 else None
            queue.submit(
                f"{NAME}:job", arguments, seed=seed, folder=FOLDER, memory="1M", checkpoint_steps=steps,
                key=f"job {number}", estimate=False,
            )  # fmt: skip


def serve(folder: str, seed: str, kill_at: str, nursery: str) -> None:
    """Runs the queue; kills itself at the `kill_at`-th stage, and a worker every ten stages or so before."""
    chance, stages = random.Random(int(seed)), 0

    def on_stage(stage: str) -> None:
        nonlocal stages
        stages += 1
        if stages == int(kill_at):
            print(f"service {stage}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        workers = service.pool.everyone()
        if int(kill_at) and workers and chance.random() < 0.1:
            print(f"worker {stage}", flush=True)
            os.kill(chance.choice(workers).pid, signal.SIGKILL)

    if nursery:  # that of the test: importing torch takes longer than all jobs
        known = Nursery(nursery, {})
        forked_popen.nurseries = lambda: (known,)  # type: ignore[assignment]
    with forking(*([worker_process, graph_holder] if nursery else [])):
        service = JobService(folder, workers=3, threads=1, on_stage=on_stage)
        with service:
            service.run_until_empty(DEADLINE)
    sys.stdout.flush()


@dataclass
class Survived:
    """Which processes were killed, at which stages: ("service", "ordered")."""

    kills: list[tuple[str, str]] = field(default_factory=list)


def survive(folder: Path, count: int, num_kills: int, seed: int, most_stages: int) -> Survived:
    """Submits `count` jobs and runs them, killing `num_kills` processes on the way; then once without kills."""
    chance, survived = random.Random(seed), Survived()
    nursery = nurseries()[0].name if forks_ranks() else ""
    for _ in range(max(1, num_kills // 10)):
        run(SUBMIT, folder, count, chance.randint(1, 2 * count - 1), is_killed=True)
        survived.kills.append(("submit", ""))
    run(SUBMIT, folder, count, 0)
    while len(survived.kills) < num_kills:
        told = run(SERVE, folder, chance.random() * 1e9 // 1, chance.randint(1, most_stages), nursery, is_killed=None)
        survived.kills += [(who, stage) for who, stage in (line.split(" ", 1) for line in told.splitlines())]
    run(SERVE, folder, 0, 0, nursery)
    return survived


def run(code: str, *arguments: object, is_killed: bool | None = False) -> str:
    """Runs one process to its end, which is SIGKILL or success; what it printed."""
    given = [int(each) if isinstance(each, float) else each for each in arguments]
    ended = run_code(code, *given, timeout=DEADLINE)
    assert is_killed is None or (ended.returncode == -signal.SIGKILL) == is_killed, str(ended)
    assert ended.returncode in (0, -signal.SIGKILL), str(ended)
    return ended.stdout
