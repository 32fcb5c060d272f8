"""Threads that help to seal and open large frames, on machines that have cores to spare.

Who gathers or places rows seals and opens them itself. One core encrypts more slowly than it copies, so a large frame
is sealed in pieces, and these threads take some of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_MOST = 3  # besides the thread that wants the frame
_CORES_FOR_ONE = 4  # a quarter of the cores: the others gather, place and train


def default_sealing_threads(num_cores: int) -> int:
    return min(_MOST, num_cores // _CORES_FOR_ONE)


class SealingThreads:
    """Runs calls side by side, in the caller's thread and in its own. Without any it is the caller that does all."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = default_sealing_threads(len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(num_threads, "gnnsys-seal") if num_threads else None  # starts them when needed

    def run(self, call: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        """Calls it with each of `arguments`. Where calls raise, the first error is raised once all have ended."""
        given: list[Future[None]] = []
        first, *others = arguments
        pool = self._pool
        for each in others if pool is not None else ():
            try:
                given.append(pool.submit(call, *each))  # type: ignore[union-attr]
            except RuntimeError:  # closed
                break
        try:
            for each in (first, *others[len(given) :]):
                call(*each)
        finally:
            wait(given)
        for future in given:
            future.result()

    def close(self) -> None:
        """Ends the threads, without waiting for them. What is run later is run by its caller."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
