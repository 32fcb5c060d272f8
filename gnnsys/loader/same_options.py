"""Ranks that train on shares of the same seeds compare the options of their loaders, so that all make as many steps.

Only shares (`gnnsys.split`) are compared: they promise every rank the same number of batches, which holds only where
all ranks cut and sample alike. A loader that one rank alone makes, to evaluate say, must not be taken for one of the
others'. So two loaders are compared only if the same lines of the program made them (the whole stack of calls), for the
same time, over shares of the same seeds. Where that cannot be known nothing is compared.

It happens when a loader's first epoch begins, through the store of the process group. The first rank to come writes
down its options; whoever comes with others refuses, and has written down why before it does. Nobody waits for more than
a moment: a rank that has waited in vain goes on as if nothing were known, and does not wait again at that place.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch.distributed as dist

from gnnsys.comm import BoundedStore
from gnnsys.loader.identity import plain
from gnnsys.loader.rank_choice import numbered, process_group_store
from gnnsys.seeds import Ranks

_ANSWER_SECONDS = 2.0  # in which the store answers, or is not asked again
_WAIT_SECONDS = 2.0  # for ranks that have not come yet
_POLL_SECONDS = (0.001, 0.05)
_MOST_LOOKS = 16  # at beginnings of epochs
_waited_in_vain: set[str] = set()  # places of the program
_lock = threading.Lock()


class SameOptions:
    """The comparison of one loader. It is made where the loader is, and `check` is called whenever an epoch begins."""

    def __init__(self, ranks: Ranks, largest: int | None) -> None:
        """`largest`: of the shares of all ranks; None where the inputs are no share."""
        self._ranks = ranks
        self._refusal: str | None = None
        self._meeting: _Meeting | None = None
        self._looks = 0
        self._place = ""
        self._is_over = largest is None or ranks.world_size < 2
        if not self._is_over:
            seeds = None if ranks.recipe is None else ranks.recipe.digest
            told = json.dumps([_calls(), seeds, largest, ranks.world_size])
            self._place = hashlib.sha256(told.encode()).hexdigest()[:32]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compare: `check` does not look at its options any more."""
        return self._is_over and self._refusal is None

    def check(self, options: Mapping[str, Any]) -> None:
        """ValueError, the same on all ranks that have come, where one of them has a loader with other options."""
        if self._refusal is not None:
            raise ValueError(self._refusal)
        if self._is_over:
            return
        try:
            self._refusal = self._look(options)
        except (OSError, RuntimeError, ValueError):  # the store is gone: so is the job, or there is none
            self._end()
        if self._refusal is not None:
            self._end()
            raise ValueError(self._refusal)

    def _look(self, options: Mapping[str, Any]) -> str | None:
        self._looks += 1
        if self._meeting is not None:
            self._take(self._meeting.answer())
        else:
            store = _store_of(self._ranks)
            if store is None:
                self._end()
                return None
            self._meeting = _Meeting(store, numbered(self._place), self._ranks)
            answer = self._meeting.come(options)
            self._take(self._wait(self._meeting) if answer is None else answer)
        if self._looks == _MOST_LOOKS:
            self._end()
        return self._refusal

    def _take(self, answer: list[str] | None) -> None:
        if answer is not None:
            self._refusal = answer[0] if answer else None
            self._end()

    def _wait(self, meeting: _Meeting) -> list[str] | None:
        with _lock:
            if self._place in _waited_in_vain:
                return None
        answer = meeting.wait(_WAIT_SECONDS)
        if answer is None:
            with _lock:
                _waited_in_vain.add(self._place)
        return answer

    def _end(self) -> None:
        self._is_over = True
        if self._meeting is not None:
            self._meeting.close()


class _Meeting:
    """What ranks write down of one loader. An answer is a list: empty where all are alike, else why they are not."""

    def __init__(self, store: dist.Store, name: str, ranks: Ranks) -> None:
        self._store = _Store(store, _ANSWER_SECONDS)
        self._key, self._ranks = f"gnnsys/options/{name}", ranks

    def come(self, options: Mapping[str, Any]) -> list[str] | None:
        """Says which options this rank has; the answer, where there is one."""
        mine = json.dumps([self._ranks.rank, plain(options)], sort_keys=True)
        (rank, first), (_, ours) = json.loads(self._store.first(f"{self._key}/first", mine)), json.loads(mine)
        if first != ours:  # it is written before this rank counts as come, so that whoever waits for all sees it
            refusal = [_refusal(rank, first, self._ranks.rank, ours)]
            self._store.first(f"{self._key}/answer", json.dumps(refusal))
        if self._store.add(f"{self._key}/came", 1) == self._ranks.world_size:
            self._store.first(f"{self._key}/answer", "[]")
        return self.answer()

    def answer(self) -> list[str] | None:
        key = f"{self._key}/answer"
        return list(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def wait(self, seconds: float) -> list[str] | None:
        until, (pause, longest) = time.monotonic() + seconds, _POLL_SECONDS
        answer = self.answer()
        while answer is None and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, longest)
            answer = self.answer()
        return answer

    def close(self) -> None:
        self._store.close()


class _Store(BoundedStore):
    """With two calls more, which several ranks may make at once."""

    def first(self, key: str, value: str) -> str:
        """What was written there first: `value`, unless somebody was sooner."""
        return bytes(self._call(lambda: self._store.compare_set(key, "", value))).decode()

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda: self._store.add(key, amount)))


def _store_of(ranks: Ranks) -> dist.Store | None:
    """The store of the process group, where that is of the ranks that the shares are of."""
    store = process_group_store()
    are_these = store is not None and (dist.get_rank(), dist.get_world_size()) == (ranks.rank, ranks.world_size)
    return store if are_these else None


def _refusal(first: int, theirs: Mapping[str, Any], rank: int, ours: Mapping[str, Any]) -> str:
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    told = "; ".join(f"{name}={theirs.get(name)} on rank {first} and {ours.get(name)} on rank {rank}" for name in names)
    return (
        f"ranks have made this loader with different options: {told}. Shares of gnnsys.split have as many batches on "
        "every rank only where the options are the same: give all ranks the same, or ids in the place of a share where "
        "ranks are meant to differ"
    )


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
