"""One account of memory per process and device, that everything large draws from.

A bin that will be computed, a cache that is being filled and buffers that a loader keeps do not know each other. Each
asks here how much is left, and says what it takes. Memory that is allocated already shows in what the device has free;
memory that is only *promised* (bins, before the first pass) does not, so promises are subtracted:

    left = min(free, limit - held) - promised          `limit`: of what clients take together (`held` is what they have)

A job that shares a device with others is told what it may take, and then takes the same whoever else is there. What is
free is not looked at any more:

    left = min(cap - allocated, limit - held) - promised    `cap`: of all that this process takes, its model included

Ranks of one job that draw from the same memory each take their `share` of what is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

from gnnsys.observe import num_local_ranks, parse_size
from gnnsys.store.capacity import free_device_memory

CAPS = "GNNSYS_MEMORY_CAP"  # in the environment: "6G", or "cuda:0=6G,cpu=2G"


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

    def __init__(self, device: torch.device | str, limit: int | None = None, cap: int | None = None) -> None:
        self.device = torch.device(device)
        self._limit, self._cap = _checked("limit", limit), _checked("cap", cap)
        self._lock = threading.RLock()
        self._shared: list[int] = []  # among how many ranks, as sessions have counted them
        self._promises: set[MemoryPromise] = set()
        self._meters: dict[int, tuple[str, weakref.ref[Any], Callable[[Any], int]]] = {}

    @classmethod
    def of(cls, device: torch.device | str) -> MemoryBudget:
        """The budget of this process for `device`; the same object every time.

        Its cap is what `GNNSYS_MEMORY_CAP` says when it is first asked for: bytes for every device ("6G"), or for each
        that is named ("cuda:0=6G,cpu=2G").
        """
        key = _with_index(torch.device(device))
        with _budgets_lock:
            if key not in _budgets:
                _budgets[key] = cls(key, cap=_cap_in(os.environ.get(CAPS, ""), key))
            return _budgets[key]

    @property
    def limit(self) -> int | None:
        """Bytes that all clients together may take; None for what the device has. Set it before they are made."""
        return self._limit

    @limit.setter
    def limit(self, bytes: int | None) -> None:
        self._limit = _checked("limit", bytes)

    @property
    def cap(self) -> int | None:
        """Bytes that this process may take of the device, model, gradients and clients together; None for no cap.

        For a job beside others. Torch's allocator is not told: `torch.cuda.set_per_process_memory_fraction` does that.
        """
        return self._cap

    @cap.setter
    def cap(self, bytes: int | None) -> None:
        self._cap = _checked("cap", bytes)

    def left(self) -> int:
        """Bytes that could still be taken, now."""
        uses = self.uses()
        promised = sum(use.bytes for use in uses if use.is_promised)
        held = sum(use.bytes for use in uses if not use.is_promised)
        allowed = [self._limit - held] if self._limit is not None else []
        if self._cap is None:  # who has a cap takes the same whoever else is there
            allowed.append(free_device_memory(self.device))
        if self._cap is not None:
            allowed.append(self._cap - max(held, _allocated(self.device)))
        return max(0, min(allowed) - promised)

    @property
    def num_ranks(self) -> int:
        """Ranks of the job that draw from this memory, this process among them.

        The session knows which ranks share its GPU. Without a session, or for another GPU, this is an estimate from
        torchrun's variables: it assumes that all ranks of the machine see the same GPUs.
        """
        if self._shared:
            return self._shared[-1]
        here = num_local_ranks(os.environ)
        return here if self.device.type != "cuda" else math.ceil(here / max(1, torch.cuda.device_count()))

    def share(self) -> int:
        """Bytes of what is left that are for this rank."""
        return self.left() // self.num_ranks

    def room(self) -> int:
        """Bytes that could be allocated at this moment, by whoever they were promised to: what is free, or what the cap
        leaves beside what is allocated."""
        if self._cap is None:
            return free_device_memory(self.device)
        held = sum(use.bytes for use in self.uses() if not use.is_promised)
        return max(0, self._cap - max(held, _allocated(self.device)))

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


@contextlib.contextmanager
def capped(device: torch.device | str, cap: int | None) -> Iterator[MemoryBudget]:
    """This process's budget for `device` with another cap, for as long as the block runs."""
    budget = MemoryBudget.of(device)
    before = budget.cap
    budget.cap = cap
    try:
        yield budget
    finally:
        budget.cap = before


@contextlib.contextmanager
def shared_by_ranks(device: torch.device | str, num_ranks: int) -> Iterator[MemoryBudget]:
    """Has `num_ranks` of the job draw from a device, for as long as the block runs. Blocks may end in any order."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, this process itself, got {num_ranks}")
    budget = MemoryBudget.of(device)
    budget._shared.append(num_ranks)
    try:
        yield budget
    finally:
        budget._shared.remove(num_ranks)


def _checked(name: str, bytes: int | None) -> int | None:
    if bytes is not None and bytes < 1:
        raise ValueError(f"{name} must be a positive number of bytes or None, got {bytes}")
    return bytes


def _cap_in(text: str, device: torch.device) -> int | None:
    """What `CAPS` says of a device. A device that is not named has no cap."""
    caps: dict[str, int] = {}
    for entry in filter(None, (each.strip() for each in text.split(","))):
        name, _, size = entry.rpartition("=")
        try:
            caps[str(torch.device(name)) if name else ""] = parse_size(size)
        except (ValueError, RuntimeError) as error:
            allowed = 'a size or device=size, such as "cuda:0=6G,cpu=2G"'
            raise ValueError(f"{CAPS} must be {allowed}, got {text!r}") from error
    found = caps.get(str(device), caps.get(device.type, caps.get("")))
    return _checked(CAPS, found)


def _allocated(device: torch.device) -> int:
    """What torch's allocator has given to this process. On the host nobody counts: what clients hold is all."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


# Memory belongs to the process, whatever sessions it has: this is what "one per process and device" means.
_budgets: dict[torch.device, MemoryBudget] = {}
_budgets_lock = threading.Lock()
