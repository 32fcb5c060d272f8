"""The threads that run a server's handlers, in the order of a `FairQueue`.

A handler's native work releases the GIL; each thread has a count of native threads of its own. Nothing that a call
raises ends a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Set
from queue import Empty, SimpleQueue
from typing import Any

import torch

from gnnsys.comm.fair_queue import FairQueue

_log = logging.getLogger(__name__)

_START_SECONDS = 10.0

Entry = tuple[int, Hashable, Any, bool]


class WorkerThreads:
    """Calls `run(item)` in one of its threads for every item. `put` may be called by any thread or finalizer."""

    def __init__(self, num_threads: int, native_threads: int, run: Callable[[Any], None], name: str) -> None:
        self.num_raised = 0  # calls that raised
        self._run = run
        self._incoming: SimpleQueue[Entry] = SimpleQueue()  # its put is re-entrant, a lock is not
        self._turns = FairQueue()
        self._lock = threading.Lock()  # of the turns
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

    def put(self, priority: int, client: Hashable, item: Any, *, first: bool = False) -> None:
        """Queues an item of a client, behind its others; with `first`, before them."""
        self._incoming.put((priority, client, item, first))
        self._tokens.put(True)

    def move(self, items: Set[Any], client: Hashable, old: int, new: int) -> None:
        """See `FairQueue.move`."""
        with self._lock:
            self._sort_in()
            self._turns.move(items, client, old, new)

    def _work(self, native_threads: int) -> None:
        torch.get_num_threads()  # takes the process's count once, so that setting it changes this thread's alone
        torch.set_num_threads(native_threads)
        self._started.release()
        while self._tokens.get():
            item = self._take()
            try:
                if item is not None:
                    self._run(item)
            except BaseException:
                self.num_raised += 1
                _log.exception("%s goes on after an error", threading.current_thread().name)
            del item  # its frames must not live on while this thread waits for the next one

    def _take(self) -> Any:
        """The item whose turn it is; None where they were dropped."""
        with self._lock:
            self._sort_in()
            return self._turns.take()

    def _sort_in(self) -> None:
        try:
            while True:
                priority, client, item, first = self._incoming.get_nowait()
                self._turns.put(priority, client, item, first=first)
        except Empty:
            return

    def close(self, timeout: float) -> bool:
        """Ends every thread once its current call returns; drops what waits. False where a call is still running."""
        with self._lock:
            self._sort_in()
            self._turns = FairQueue()
        for _ in self._threads:
            self._tokens.put(False)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def __len__(self) -> int:
        return len(self._turns) + self._incoming.qsize()
