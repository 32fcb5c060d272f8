"""One account of memory per process and device, that everything large draws from.

A bin that will be computed, a cache that is being filled and buffers that a loader keeps do not know each other. Each
asks here how much is left, and says what it takes. Memory that is allocated already shows in what the device has free;
memory that is only *promised* (bins, before the first pass) does not, so promises are subtracted:

    left = min(limit - promised - used, free - promised)

where `limit` is what the user allows this process (None: no limit but the device's) and `used` what clients hold.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

from gnnsys.store.capacity import free_device_memory


class MemoryUse(NamedTuple):
    """A line of `MemoryBudget.uses`: who has how many bytes, and whether they are allocated or only promised."""

    what: str
    bytes: int
    is_promised: bool


class MemoryBudget:
    """What this process may take of one device. `MemoryBudget.of(device)` is the one that gnnsys uses.

    >>> budget = MemoryBudget("cpu", limit=100)
    >>> with budget.promise(60, "bins"):
    ...     budget.left()
    40
    """

    def __init__(self, device: torch.device | str, limit: int | None = None) -> None:
        self.device = torch.device(device)
        self._limit = _check_limit(limit)
        self._lock = threading.RLock()
        self._promises: set[MemoryPromise] = set()
        self._meters: dict[int, tuple[str, weakref.ref[Any], Callable[[Any], int]]] = {}

    @classmethod
    def of(cls, device: torch.device | str) -> MemoryBudget:
        """The budget of this process for `device`; the same object every time."""
        key = _with_index(torch.device(device))
        with _budgets_lock:
            if key not in _budgets:
                _budgets[key] = cls(key)
            return _budgets[key]

    @property
    def limit(self) -> int | None:
        """Bytes that all clients together may take; None for what the device has. Set it before they are made."""
        return self._limit

    @limit.setter
    def limit(self, bytes: int | None) -> None:
        self._limit = _check_limit(bytes)

    def left(self) -> int:
        """Bytes that could still be taken, now."""
        uses = self.uses()
        promised = sum(use.bytes for use in uses if use.is_promised)
        left = free_device_memory(self.device) - promised
        if self._limit is not None:
            left = min(left, self._limit - sum(use.bytes for use in uses))
        return max(0, left)

    def promise(self, bytes: int, what: str) -> MemoryPromise:
        """Sets memory aside for somebody who will allocate it. It ends by `close`, by `with`, or with its owner.

        MemoryError where more is asked for than is left.
        """
        if bytes < 0:
            raise ValueError(f"bytes must not be negative, got {bytes}")
        with self._lock:
            left = self.left()
            if bytes > left:
                raise MemoryError(
                    f"{what} needs {bytes:,} bytes of {self.device}, where {left:,} are left: {self.describe()}"
                )
            return self._add(bytes, what)

    def promise_share(self, share: float, what: str) -> MemoryPromise:
        """A promise of `share`, between 0 and 1, of what is left."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        with self._lock:
            return self._add(int(self.left() * share), what)

    def watch(self, owner: Any, what: str, used: Callable[[Any], int]) -> None:
        """Counts `used(owner)` bytes, which are allocated, for as long as `owner` lives."""
        key = id(owner)

        def forget(_: object) -> None:
            self._meters.pop(key, None)

        self._meters[key] = (what, weakref.ref(owner, forget), used)

    def uses(self) -> list[MemoryUse]:
        """Who has what, the largest first."""
        with self._lock:
            found = [MemoryUse(promise.what, promise.bytes, True) for promise in tuple(self._promises)]
        for what, reference, used in list(self._meters.values()):
            owner = reference()
            if owner is not None:
                found.append(MemoryUse(what, used(owner), False))
        return sorted(found, key=lambda use: (-use.bytes, use.what))

    def describe(self) -> str:
        """One line for people: what was promised or taken, by whom."""
        uses = [f"{use.what} {use.bytes:,}{' (promised)' if use.is_promised else ''}" for use in self.uses()]
        return ", ".join(uses) if uses else "nothing was taken through this budget"

    def _add(self, bytes: int, what: str) -> MemoryPromise:
        promise = MemoryPromise(bytes, what, self)
        self._promises.add(promise)
        return promise

    def _remove(self, promise: MemoryPromise) -> None:
        with self._lock:
            self._promises.discard(promise)


class MemoryPromise:
    """Bytes that are set aside. `keep_for(owner)` ties it to an object: when that dies the promise ends."""

    def __init__(self, bytes: int, what: str, budget: MemoryBudget) -> None:
        self.bytes, self.what, self._budget = bytes, what, budget

    def shrink(self, bytes: int) -> None:
        """Gives back what is not needed after all."""
        self.bytes = max(0, min(self.bytes, bytes))

    def keep_for(self, owner: object) -> MemoryPromise:
        weakref.finalize(owner, self.close).atexit = False
        return self

    def close(self) -> None:
        """Ends the promise. Idempotent."""
        self._budget._remove(self)

    def __enter__(self) -> MemoryPromise:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def limited(device: torch.device | str, limit: int | None) -> Iterator[MemoryBudget]:
    """This process's budget for `device` with another limit, for as long as the block runs."""
    budget = MemoryBudget.of(device)
    before = budget.limit
    budget.limit = limit
    try:
        yield budget
    finally:
        budget.limit = before


def _check_limit(limit: int | None) -> int | None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be a positive number of bytes or None, got {limit}")
    return limit


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


# Memory belongs to the process, whatever sessions it has: this is what "one per process and device" means.
_budgets: dict[torch.device, MemoryBudget] = {}
_budgets_lock = threading.Lock()
