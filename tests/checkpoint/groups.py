"""Ranks that are threads of the test, each a machine of its own: they meet as processes do, without any store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gnnsys.comm.rendezvous import Group

DEADLINE = 180.0


class Hall:
    """Where they meet: what each rank said at its first, second, ... meeting. A rank that has failed comes to none."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.said, self.failed = num_ranks, dict[tuple[int, int], Any](), False
        self.changed = threading.Condition()

    def meet(self, turn: int, rank: int, value: Any) -> list[Any]:
        keys = [(turn, other) for other in range(self.num_ranks)]
        with self.changed:
            self.said[turn, rank] = value
            self.changed.notify_all()
            came = self.changed.wait_for(lambda: self.failed or all(key in self.said for key in keys), DEADLINE)
            assert came and all(key in self.said for key in keys), f"rank {rank} was left alone at {value}"
            return [self.said[key] for key in keys]

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class ThreadGroup(Group):
    """One of them."""

    def __init__(self, rank: int, hall: Hall) -> None:
        super().__init__(nonce="a" * 32)
        self.rank = self.machine = rank
        self.world_size = self.num_machines = hall.num_ranks
        self.machine_of_rank = list(range(hall.num_ranks))
        self._hall, self._turn_number = hall, 0

    def gather(self, name: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        self._turn_number += 1
        told = self._hall.meet(self._turn_number, self.rank, (name, json.loads(json.dumps(value))))
        assert {told_name for told_name, _ in told} == {name}, "they are at different meetings"
        return [value for _, value in told]

    def share(self, name: str, value: Any = None, root: int = 0, timeout: float | None = None) -> Any:
        return self.gather(name, value)[root]


def on_ranks(num_ranks: int, body: Callable[[Group], Any]) -> list[Any]:
    """What `body` returns on each rank, or the exception that it raises there."""
    hall = Hall(num_ranks)

    def run(rank: int) -> Any:
        try:
            return body(ThreadGroup(rank, hall))
        except Exception as error:
            hall.fail()
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
