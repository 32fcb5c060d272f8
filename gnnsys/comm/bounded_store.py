"""torchrun's store with a deadline on every call: its own client waits as long as the kernel keeps a cut connection.

One thread makes the calls. Where one does not return in time the thread is left to itself and the store counts as gone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist


class BoundedStore:
    """The few calls that meetings need, each within `seconds`; OSError where there is no answer. For one thread."""

    def __init__(self, store: dist.Store, seconds: float = 30.0) -> None:
        self.seconds = seconds
        self._store = store
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_gone = False
        threading.Thread(
            target=_make_calls, args=(self._calls, self._answers), name="gnnsys-store", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None).atexit = False  # where nobody closes it

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._call(lambda: self._store.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._call(lambda: self._store.multi_get(list(keys))))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(lambda: self._store.check(list(keys))))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.delete_key(key)))

    def close(self) -> None:
        """Ends the thread, unless it is stuck."""
        self._calls.put(None)

    def _call(self, act: Callable[[], Any]) -> Any:
        with self._lock:
            if self._is_gone:
                raise OSError("it did not answer before")
            self._calls.put(act)
            try:
                answer, error = self._answers.get(timeout=self.seconds)
            except Empty:
                self._is_gone = True
                raise OSError(f"it did not answer within {self.seconds:g} s") from None
            except BaseException:  # Ctrl-C: the answer that is under way is nobody's
                self._is_gone = True
                raise
        if error is not None:
            raise error
        return answer


def _make_calls(calls: SimpleQueue[Any], answers: SimpleQueue[Any]) -> None:
    """The thread: it holds no store while it waits, so that one which nobody refers to ends it."""
    while (act := calls.get()) is not None:
        try:
            answers.put((act(), None))
        except BaseException as error:
            answers.put((None, error))
        del act
