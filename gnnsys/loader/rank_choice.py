"""Ranks that train together choose together: a step takes what the slowest of them takes.

Nobody waits for anybody, as ranks may have different numbers of batches, and one may be gone. When its trial is over a
rank writes what it has measured into the store of the process group, and goes on with its own choice. At the beginning
of an epoch it looks whether all have written. All who see that read the same, and decide by the same rule. A rank that
does not see it keeps its own choice: batches are the same whichever way they are made.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import torch.distributed as dist

from gnnsys.comm import BoundedStore

_SECONDS = 2.0  # in which the store answers, or is not asked again
_MOST_LOOKS = 16  # at beginnings of epochs
_labels: Counter[str] = Counter()  # loaders that were made alike are told apart by their number
_lock = threading.Lock()


def numbered(label: str) -> str:
    """A name for a loader: the same on all ranks that make loaders alike in the same order."""
    with _lock:
        _labels[label] += 1
        return f"{label}/{_labels[label]}"


def process_group_store() -> dist.Store | None:
    """The store of this process's group; None where it is alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    find = getattr(dist.distributed_c10d, "_get_default_store", None)  # torch has no public name for it
    return None if find is None else find()


class RankChoice:
    """What all ranks have measured in one trial, `name`. `told` is this rank's, as JSON has it."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, name: str, told: Any) -> None:
        self._store = BoundedStore(store, _SECONDS)
        self._keys = [f"gnnsys/execution/{name}/{rank}" for rank in range(world_size)]
        self._looks = 0
        self.is_over = False
        try:
            self._store.set(self._keys[rank], json.dumps(told))
        except (OSError, RuntimeError):  # the store is gone: so is the job, or there is none
            self.close()

    @classmethod
    def of_process_group(cls, name: str, told: Any) -> RankChoice | None:
        """Of this process's group; None where it is alone."""
        store = process_group_store()
        return None if store is None else cls(store, dist.get_rank(), dist.get_world_size(), name, told)

    def look(self) -> list[Any] | None:
        """What all ranks have told, once; None while one has not, and when it is over."""
        if self.is_over:
            return None
        self._looks += 1
        try:
            if self._store.check(self._keys):
                told = [json.loads(value) for value in self._store.multi_get(self._keys)]
                self.close()
                return told
        except (OSError, RuntimeError, ValueError):
            self.close()
        if self._looks == _MOST_LOOKS:
            self.close()
        return None

    def close(self) -> None:
        """Idempotent."""
        self.is_over = True
        self._store.close()
