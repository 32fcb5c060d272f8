"""Services for tests: their workers, and what keeps graphs, are forked from a nursery. None of them imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gnnsys.jobs import JobService, Queue, graph_holder, worker_process
from gnnsys.jobs.job_spec import make_spec
from gnnsys.jobs.train_job import train
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.support.forked_popen import forking

DEADLINE = 120.0


@contextmanager
def service(folder: Path, **options: Any) -> Iterator[JobService]:
    with forking(worker_process, graph_holder), JobService(folder, **{"threads": 1, **options}) as made:
        yield made


def serve_nothing(queue: Queue, **options: Any) -> None:
    """A service begins and ends, and leaves what who submits goes by: which device there is, and how much memory."""
    made = JobService(queue.folder.path, shares_graphs=False, is_warm=False, **options)
    made.start()
    made.close()


def submit(queue: Queue, function: str, arguments: dict[str, Any] | None = None, **options: Any) -> int:
    return queue.submit(f"{NAME}:{function}", arguments, folder=FOLDER, **options)


def expected(arguments: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """What `job` gives in this process, with nothing before it."""
    import sys

    sys.modules.pop(NAME, None)
    return train(make_spec(f"{NAME}:job", arguments, seed=seed, folder=FOLDER))


def run_until(service: JobService, is_done: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + DEADLINE
    while not is_done():
        service.turn()
        assert time.monotonic() < deadline


def left_in(folder: Path) -> list[str]:
    """Files of a queue that no job and no table of jobs needs."""
    kept = ("queue.db", "queue.db-wal", "queue.db-shm", "workers.log", "logs", "results")
    found = [path.name for path in folder.iterdir() if path.name not in (*kept, "checkpoints", "scripts")]
    found += [str(path) for name in ("checkpoints", "scripts") for path in (folder / name).glob("*")]
    return [*found, *(str(path) for path in folder.rglob("*.half"))]


def kill(pid: int) -> None:
    os.kill(pid, 9)
