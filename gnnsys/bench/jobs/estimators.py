"""Processes that estimate: each on one thread, where no other estimate disturbs it. None of them touches a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

MOST_ESTIMATORS = 14


def num_estimators(num_jobs: int) -> int:
    """As many as there are cores and jobs, but for two cores that keep the GPU busy."""
    return max(1, min(MOST_ESTIMATORS, len(os.sched_getaffinity(0)) - 2, num_jobs))


@contextmanager
def estimators(count: int, warm: Callable[[], Any] = int) -> Iterator[ProcessPoolExecutor]:
    """Each process calls `warm` first. What has not ended when the block does is not done."""
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (warm,))
    try:
        yield pool
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
            process.join()


def _begin(warm: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    warm()
