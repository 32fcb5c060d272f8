"""Of `gnnsys bench jobs`, what estimating costs: processor seconds of twenty estimates for an H200, of each CoGNN queue
with PyG's layers on whole graphs. No GPU is needed. Making the graphs is part of it, importing torch is not.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import torch

from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, value
from gnnsys.bench.jobs.cognn_queues import PUBLISHED_ORDERS, published
from gnnsys.bench.jobs.queue_jobs import queue_job
from gnnsys.bench.jobs.queues import calls_of
from gnnsys.bench.workload import FULL, Workload
from gnnsys.planning import estimate_memory

DEVICE = "h200"
_QUICK = 3  # jobs, on small graphs


def estimate_times(work: Workload) -> Iterator[Case]:
    """A row for each queue."""
    is_full = work.sizes is FULL
    for queue in PUBLISHED_ORDERS if is_full else ("Mix",):

        def sides(queue: str = queue) -> dict[str, Side]:
            return {OURS: Side(lambda: work.once(f"jobs/tracing/{queue}", lambda: seconds_of(queue, is_full)))}

        name = f"jobs/tracing/{queue}, estimates of 20 jobs"
        yield Case(name, value("processor s"), sides, (Versus((), required=False, label="-"),), repeats=1)


def seconds_of(queue: str, is_full: bool) -> float:
    """On one thread, one job after the other."""
    if importlib.util.find_spec("torch_geometric") is None:
        raise NotHere("the queue's jobs have PyG's layers, and torch_geometric is not installed")
    threads = torch.get_num_threads()
    calls = calls_of(published(queue), "pyg", 1, is_full)
    torch.set_num_threads(1)
    try:
        begun = time.process_time()
        for call in calls if is_full else calls[:_QUICK]:
            estimate_memory(queue_job, call.arguments, DEVICE)
        return time.process_time() - begun
    finally:
        torch.set_num_threads(threads)


BENCHMARKS: list[Benchmark] = [estimate_times]
