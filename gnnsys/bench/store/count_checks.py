"""Counts what a pull takes, or what all that is checked in it takes, in a process of its own.

`python -m gnnsys.bench.store.count_checks WHAT ROWS UNIT` prints it as JSON; see `main` for what (`idle` has
seconds for rows). Server and client are in this one process, so that both ends are counted.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import timeit
import zlib
from collections.abc import Callable
from typing import Any

import torch

from gnnsys.bench.instructions import STEPPED, Counter
from gnnsys.bench.store.pull_checks import PullMessages, checked, trusting
from gnnsys.comm import CURVE, Client, Keys, Kind, Server
from gnnsys.store import Pull, Shard, Store, TableSpec

_DIM = 128  # values: 512 bytes
_SPEC_NAME = "x"
_PULLS, _WARM_UP = 20, 3
_STEPPED_PULLS, _STEPPED_CHECKS = 1, 4  # each is tens of seconds
_NEVER, _LATE = 3600.0, 1800.0  # while a process is stepped
_LOOK_SECONDS = 4.0  # at what is done by the clock
_FEW = 100


class Count:
    """Counts calls in this process. What it does by the clock meanwhile is taken off, and nothing is collected."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.is_stepped = counter.unit == STEPPED
        self.by_the_clock = 0.0  # per second, of whatever is open now

    def of(self, call: Callable[[], object], times: int) -> float:
        """Of one call."""
        call()
        gc.collect()
        gc.disable()
        sys.setswitchinterval(_NEVER)  # threads take turns where they wait: a stepped process has no time
        total, seconds = self._counter.count(lambda: [call() for _ in range(times)])
        gc.enable()
        return max(0.0, total - self.by_the_clock * seconds) / times

    def idle(self, seconds: float) -> float:
        """Of a second in which nothing is asked."""
        total, passed = self._counter.count(lambda: time.sleep(seconds))
        return total / passed


def serve_rows(num_rows: int, keys: Keys | None, **seconds: Any) -> tuple[Server, Client, Store]:
    """A server of this process and a client of it; `seconds` say how often the client speaks unasked."""
    rows = torch.rand(2 * num_rows, _DIM)
    spec = TableSpec(_SPEC_NAME, (_DIM,), torch.float32, (0, rows.shape[0]))
    shard = Shard()
    shard.add(spec, 0, rows)
    server = Server(shard.handlers(), keys=keys, short={Kind.PULL: shard.answer_small}).start()
    client = Client({0: server.endpoints[0]}, sender=0, incarnation=1, keys=keys, timeout=_NEVER, **seconds)
    store = Store(machine_of_part=[0], machine=1, client=client, rank=0, world_size=1)
    store.register(spec)
    return server, client, store


def prepare_pull(store: Store, num_rows: int) -> Callable[[], object]:
    """A pull of random rows into a buffer that is used again."""
    ids, out = torch.randperm(2 * num_rows)[:num_rows], torch.empty(num_rows, _DIM)
    pull = lambda: store.pull([Pull(_SPEC_NAME, ids, out)]).result()  # noqa: E731
    for _ in range(_WARM_UP):
        pull()
    return pull


def measure_pull(count: Count | None, num_rows: int, keys: Keys | None) -> dict[str, float]:
    """Its GB/s, which are timed; what it takes, where that is to be counted."""
    server, client, store = serve_rows(num_rows, keys, lost_after=_NEVER, resend_after=_LATE, ping_interval=_LATE)
    with contextlib.closing(server), client:
        pull = prepare_pull(store, num_rows)
        seconds = min(timeit.repeat(pull, number=1, repeat=_PULLS))
        found = {"GB/s": 1e-9 * num_rows * _DIM * 4 / seconds}
        if count is not None:
            count.by_the_clock = count.idle(_LOOK_SECONDS) if count.is_stepped else 0.0
            found["counted"] = count.of(pull, _STEPPED_PULLS if count.is_stepped else _PULLS)
    return found


def count_checks(count: Count, num_rows: int) -> float:
    """Of everything that is checked in a pull, beyond what it takes to believe it."""
    traffic, times = PullMessages(num_rows, _DIM), _STEPPED_CHECKS if count.is_stepped else 10 * _PULLS
    beyond = count.of(checked(traffic), times) - count.of(trusting(traffic), times)
    return max(0.0, beyond)  # two CPU times that are nearly equal may come out the other way round


def count_checksum(count: Count, num_rows: int) -> float:
    """Of a checksum of as many bytes as a pull has: files have one, looked at when a part is opened."""
    rows = torch.rand(num_rows, _DIM).numpy().data
    return count.of(lambda: zlib.crc32(rows), 1 if count.is_stepped else _PULLS)


def count_idle(count: Count, seconds: float) -> float:
    """Of a second in which a client and its server only show each other that they live, as often as they do."""
    server, client, store = serve_rows(_FEW, None)
    with contextlib.closing(server), client:
        prepare_pull(store, _FEW)
        return count.idle(seconds)


def main(what: str, num_rows: int, unit: str) -> None:
    torch.set_num_threads(1)
    if what in ("sealed speed", "CURVE speed"):
        found = measure_pull(None, num_rows, Keys.generate(encrypts=CURVE if what == "CURVE speed" else True))
    else:
        count = Count(Counter((unit,)))
        found = {
            "pull": lambda: measure_pull(count, num_rows, None),
            "key": lambda: measure_pull(count, num_rows, Keys.generate()),
            "checks": lambda: {"counted": count_checks(count, num_rows)},
            "checksum": lambda: {"counted": count_checksum(count, num_rows)},
            "idle": lambda: {"counted": count_idle(count, num_rows)},
        }[what]()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
