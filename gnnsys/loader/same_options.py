"""Ranks that train on shares of the same seeds compare how they cut them into batches, so that all make as many steps.

Only shares (`gnnsys.split`) are compared: they promise every rank the same number of batches. A loader that one rank
alone makes, to evaluate say, must not be taken for one of the others'. So two loaders are compared only if the same
lines of the program made them (the whole stack of calls), for the same time, over shares of the same seeds. Where that
cannot be known nothing is compared.

Nobody waits for anybody. When a loader's first epoch begins, the rank that comes first writes into the store of the
process group what it does, and whoever does otherwise refuses. torchrun then ends the others.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch.distributed as dist

from gnnsys.comm import BoundedStore
from gnnsys.loader.rank_choice import numbered, process_group_store
from gnnsys.seeds import Ranks

_ANSWER_SECONDS = 2.0  # in which the store answers, or is not asked


class SameOptions:
    """The comparison of one loader: made where the loader is made, and over when its first epoch has begun."""

    def __init__(self, ranks: Ranks, largest: int | None) -> None:
        """`largest`: of the shares of all ranks; None where the inputs are no share."""
        self._ranks = ranks
        self._refusal: str | None = None
        self._name: str | None = None
        if largest is not None and ranks.world_size > 1:
            seeds = None if ranks.recipe is None else ranks.recipe.digest
            place = json.dumps([_calls(), seeds, largest, ranks.world_size])
            self._name = numbered(hashlib.sha256(place.encode()).hexdigest()[:32])

    @property
    def is_over(self) -> bool:
        return self._name is None and self._refusal is None

    def check(self, options: Mapping[str, Any]) -> None:
        """ValueError where a rank that came before has other options."""
        name, self._name = self._name, None
        store = None if name is None else _store_of(self._ranks)
        if store is not None:
            self._refusal = _compare(store, f"gnnsys/options/{name}", self._ranks.rank, options)
        if self._refusal is not None:
            raise ValueError(self._refusal)


def _compare(store: dist.Store, key: str, rank: int, options: Mapping[str, Any]) -> str | None:
    """Why this rank's options will not do; None where they will, or where the store is gone, and with it the job."""
    mine, asked = json.dumps([rank, dict(options)], default=str), _Store(store, _ANSWER_SECONDS)
    _, ours = json.loads(mine)
    try:
        first, theirs = json.loads(asked.first(key, mine))
    except (OSError, RuntimeError, ValueError):
        return None
    finally:
        asked.close()
    if theirs == ours:
        return None
    told = "; ".join(
        f"{name}={theirs.get(name)} on rank {first} and {value} on rank {rank}"
        for name, value in ours.items()
        if theirs.get(name) != value
    )
    return (
        f"ranks cut their shares into batches differently: {told}. They would make different numbers of steps: give "
        "all ranks the same, or the ids of the share (seeds.ids) where that is meant"
    )


class _Store(BoundedStore):
    """With one call more, which several ranks may make at once."""

    def first(self, key: str, value: str) -> str:
        """What was written there first: `value`, unless somebody was sooner."""
        return bytes(self._call(lambda: self._store.compare_set(key, "", value))).decode()


def _store_of(ranks: Ranks) -> dist.Store | None:
    """The store of the process group, where that is of the ranks that the shares are of."""
    store = process_group_store()
    are_these = store is not None and (dist.get_rank(), dist.get_world_size()) == (ranks.rank, ranks.world_size)
    return store if are_these else None


def _calls() -> list[tuple[str, int, str]]:
    """The lines of the user's program that are being run, the innermost first."""
    calls: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith("gnnsys."):
            code = frame.f_code
            calls.append((PurePath(code.co_filename).name, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return calls
