"""Ranks as threads of this process, joined by real gloo connections: what they send each other is what processes do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
DEADLINE = 60.0  # seconds; what every wait of these tests ends after


def run_ranks(world_size: int, work: Callable[[int, Any], T], timeout: float = DEADLINE) -> list[T]:
    """What `work(rank, group)` returns on each rank; the first error of any, with its traceback."""
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))
            results[rank] = work(rank, group)
        except BaseException as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(timeout)
        if errors:
            break
        assert not thread.is_alive(), f"rank {rank} did not end within {timeout:g} s"
    for rank, error in errors:
        raise AssertionError(f"rank {rank} failed") from error
    return results
