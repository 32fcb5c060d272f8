"""torch's threads, while plans say how many: what they were comes back when the last plan lets go."""

from __future__ import annotations

import threading
import weakref

import torch

_lock = threading.Lock()
_users: dict[int, int] = {}  # of all plans of this process, who has set how many
_given: list[int] = []  # what they were before the first of them


class ComputeThreads:
    """One plan's say. It is released when it is collected, too."""

    def __init__(self) -> None:
        self._key = id(self)
        weakref.finalize(self, _release, self._key).atexit = False

    def use(self, count: int | None) -> None:
        """Has torch use so many threads; None says nothing."""
        if count is None or (_users.get(self._key) == count and torch.get_num_threads() == count):
            return
        with _lock:
            if not _users:
                _given[:] = [torch.get_num_threads()]
            _users[self._key] = count
        torch.set_num_threads(count)

    def release(self) -> None:
        """Idempotent; nothing where nothing was said."""
        _release(self._key)


def _release(key: int) -> None:
    with _lock:
        if _users.pop(key, None) is None or _users:
            return
        before = _given.pop()
    torch.set_num_threads(before)
