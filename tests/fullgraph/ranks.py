"""Ranks as threads of this process, joined by real gloo connections: what they send each other is what processes do."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from gnnsys.comm import rank_exchange
from gnnsys.comm.device_link import DeviceLink, DeviceRoute

T = TypeVar("T")
DEADLINE = 180.0  # seconds; what every wait of these tests ends after


def run_ranks(
    world_size: int, work: Callable[[int, Any], T], timeout: float = DEADLINE, *, linked: bool = False
) -> list[T]:
    """What `work(rank, group)` returns on each rank; the first error of any, with its traceback.

    `linked`: rows go as between GPUs, with announcements and go-aheads, though they are on the host and go over gloo.
    """
    store = dist.HashStore()
    if linked:
        with patch.object(rank_exchange, "DeviceRoute", partial(_host_route, store)):
            return run_ranks(world_size, work, timeout)
    limit = timedelta(seconds=timeout)
    return run_threads(world_size, work, lambda rank: dist.ProcessGroupGloo(store, rank, world_size, limit), timeout)


def run_threads(
    world_size: int,
    work: Callable[[int, Any], T],
    join: Callable[[int], Any],
    timeout: float,
    failed: Callable[[int], None] = lambda rank: None,
) -> list[T]:
    """As `run_ranks`, by threads whose group is what `join(rank)` returns; `failed` is told of ranks with an error.

    All are on one processor: Python runs one of them at a time, and on several they lose half of their time handing its
    lock over. Nobody looks for garbage meanwhile: torch holds the lock of its generator while it hands out the state of
    it, and garbage that is found there may run Python code, which lets another thread wait for that lock with Python's.
    """
    results: list[Any] = [None] * world_size
    groups: list[Any] = [None] * world_size  # until all have ended: one may still be connecting to another that has
    errors: list[tuple[int, BaseException]] = []
    processor = this_processor()

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {processor})  # of this thread and those that it starts
        try:
            groups[rank] = join(rank)
            results[rank] = work(rank, groups[rank])
        except BaseException as error:
            errors.append((rank, error))
            failed(rank)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
    with without_garbage_collection():
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


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def this_processor() -> int:
    """The one that this thread runs on."""
    fields = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
    return int(fields[36])


def _host_route(store: dist.Store, group: Any) -> DeviceRoute:
    """A route whose link is made of gloo's groups, which are each link's own: ranks make links in the same order."""

    def make(device: torch.device, limit: timedelta) -> DeviceLink:
        rank, size = group.rank(), group.size()
        number = store.add(f"links of {rank}", 1)
        up, down = (
            dist.ProcessGroupGloo(dist.PrefixStore(f"link {number} {way}", store), rank, size, limit)
            for way in ("up", "down")
        )
        return DeviceLink(up, down, rank, device, limit)

    return DeviceRoute(group, make, device_type="cpu")
