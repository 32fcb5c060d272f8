"""Ranks as threads of this process that hand each other tensors: what gloo's connections do, without their cost.

gloo's threads spin while another thread that holds their lock waits for a processor, which took half of the time of the
tests of this room. Its connections are in tests/fullgraph/ranks.py, and every kind of training has a test over them.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fullgraph.ranks import DEADLINE, run_threads

T = TypeVar("T")
OPS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}


def run_ranks(world_size: int, work: Callable[[int, Any], T], timeout: float = DEADLINE) -> list[T]:
    """What `work(rank, group)` returns on each rank; the first error of any, which ends all waits of the others."""
    meeting = Meeting(world_size)
    return run_threads(world_size, work, lambda rank: ThreadGroup(meeting, rank), timeout, failed=meeting.fail)


class Transfer:
    """A tensor under way, in the words of `torch.distributed.Work`. Nobody may change it until it has left."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._under_way = threading.Lock()  # held until it has ended: an Event takes five times as long
        self._under_way.acquire()
        self._error: str | None = None

    def end(self, error: str | None = None) -> None:
        self._error = error
        self._under_way.release()

    def wait(self, limit: timedelta | None = None) -> bool:
        seconds = DEADLINE if limit is None else limit.total_seconds()
        if not self._under_way.acquire(timeout=seconds):
            raise RuntimeError(f"timed out after {seconds:g} s")
        self._under_way.release()  # for others that wait
        if self._error is not None:
            raise RuntimeError(self._error)
        return True


class Meeting:
    """Where threads meet: a tensor is copied when both have come, the one that sends it and the one that takes it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self._error: str | None = None
        self._sent: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)  # by sender, receiver and tag
        self._asked: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self._sums: dict[int, dict[int, Transfer]] = defaultdict(dict)  # by number and rank

    def send(self, key: tuple[int, int, int], rows: Tensor) -> Transfer:
        return self._meet(key, rows, self._sent, self._asked)

    def receive(self, key: tuple[int, int, int], rows: Tensor) -> Transfer:
        return self._meet(key, rows, self._asked, self._sent)

    def _meet(self, key: tuple[int, int, int], rows: Tensor, own: Any, others: Any) -> Transfer:
        assert rows.is_contiguous() and rows.device.type == "cpu"
        mine = Transfer(rows)
        with self._lock:
            self._check()
            if not others[key]:
                own[key].append(mine)
                return mine
            other = others[key].popleft()
        source, target = (other, mine) if own is self._asked else (mine, other)
        assert source.rows.nbytes == target.rows.nbytes, f"{source.rows.shape} was sent, {target.rows.shape} expected"
        with torch.no_grad():
            target.rows.view(torch.uint8).copy_(source.rows.detach().view(torch.uint8))
        source.end()
        target.end()
        return mine

    def all_reduce(self, number: int, rank: int, values: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Transfer:
        mine = Transfer(values)
        with self._lock:
            self._check()
            all_ranks = self._sums[number]
            all_ranks[rank] = mine
            if len(all_ranks) < self.world_size:
                return mine
            del self._sums[number]
        result = reduce(op, [all_ranks[each].rows for each in range(self.world_size)])
        for each in all_ranks.values():
            each.rows.copy_(result)
            each.end()
        return mine

    def fail(self, rank: int) -> None:
        """A rank has failed: no wait of another goes on."""
        with self._lock:
            if self._error is not None:
                return
            self._error = f"rank {rank} has failed"
            waiting = [*self._sent.values(), *self._asked.values(), *(each.values() for each in self._sums.values())]
            for transfer in [each for transfers in waiting for each in transfers]:
                transfer.end(self._error)

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)


class ThreadGroup:
    """What a rank has of a meeting: of a process group all that an exchange between ranks uses."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self._num_sums = meeting, rank, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.world_size

    def send(self, rows: Sequence[Tensor], peer: int, tag: int) -> Transfer:
        return self._meeting.send((self._rank, peer, tag), rows[0])

    def recv(self, rows: Sequence[Tensor], peer: int, tag: int) -> Transfer:
        return self._meeting.receive((peer, self._rank, tag), rows[0])

    def allreduce(self, values: Sequence[Tensor], options: dist.AllreduceOptions) -> Transfer:
        self._num_sums += 1
        (op,) = (function for kind, function in OPS.items() if options.reduceOp == kind)
        return self._meeting.all_reduce(self._num_sums, self._rank, values[0], op)
