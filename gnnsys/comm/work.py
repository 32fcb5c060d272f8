"""The threads that run a server's handlers, in the order of (priority, arrival).

A handler's native work releases the GIL; each thread has a count of native threads of its own.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

_START_SECONDS = 10.0


class Workers:
    """`put(priority, item)` from one thread; `run(item)` in one of the threads, smallest priority first."""

    def __init__(self, num_threads: int, native_threads: int, run: Callable[[Any], None], name: str) -> None:
        self._run = run
        self._heap: list[tuple[int, int, Any]] = []
        self._lock = threading.Lock()
        self._arrived = 0
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one per item: waits in C, unlike a Condition
        self._threads = [
            threading.Thread(target=self._work, args=(native_threads,), name=f"gnnsys-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._started = threading.Semaphore(0)

    def start(self) -> None:
        native_threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._started.acquire(timeout=_START_SECONDS)
        # set_num_threads in a thread also changes the count that later threads begin with: put that back.
        torch.set_num_threads(native_threads)

    def put(self, priority: int, item: Any) -> None:
        with self._lock:
            self._arrived += 1
            heapq.heappush(self._heap, (priority, self._arrived, item))
        self._tokens.put(True)

    def _work(self, native_threads: int) -> None:
        torch.get_num_threads()  # takes the process's count once, so that setting it changes this thread's alone
        torch.set_num_threads(native_threads)
        self._started.release()
        while self._tokens.get():
            with self._lock:
                if not self._heap:
                    continue
                item = heapq.heappop(self._heap)[2]
            self._run(item)
            del item  # its frames must not live on while this thread waits for the next one

    def close(self, timeout: float) -> bool:
        """Ends every thread once its current call returns; drops what waits. False where a call is still running."""
        with self._lock:
            self._heap.clear()
        for _ in self._threads:
            self._tokens.put(False)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def __len__(self) -> int:
        return len(self._heap)
