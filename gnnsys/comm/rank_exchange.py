"""Tensors from rank to rank over torch.distributed, asynchronously, with a tag each, and a word when one arrives.

gloo's works cannot be polled and a wait that times out ends the connection, so one thread per peer waits for what comes
from it, in the order in which it was expected, and tells the owner through a queue. Transfers go on while Python
computes. A peer that dies closes its connections, which ends every wait on it with TrainerLost.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnnsys.comm.errors import DeadlineExceeded, TrainerLost

_TAG_IDS = 1 << 30  # tags of `swap`, above those of the owner's messages
_PROBE_SECONDS = 1.0
_LEAVE_SECONDS = 2.0


class Arrival(NamedTuple):
    """What came: `token` is the owner's name for it; `error` where nothing will come of it."""

    token: Any
    error: Exception | None


class RankExchange:
    """This rank's way to the others. `group` is a process group whose tensors on the CPU travel (gloo).

    All methods are for one thread. `timeout` is how long one message may take to come after it was asked for; that is
    as long as a peer may be behind.
    """

    def __init__(self, group: Any = None, *, timeout: float = 1800.0, max_outstanding: int = 1 << 30) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        self._group: Any = dist.group.WORLD if group is None and dist.is_initialized() else group
        self.rank = 0 if self._group is None else self._group.rank()
        self.world_size = 1 if self._group is None else self._group.size()
        _check_host(self._group, self.world_size)
        self.timeout = timeout
        self.bytes_sent = [0] * self.world_size  # payload, since the beginning
        self.messages_sent = [0] * self.world_size
        self._limit = timedelta(seconds=timeout)
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._expected: dict[int, SimpleQueue[tuple[Any, Any] | None]] = {}  # per peer: what its thread waits for
        weakref.finalize(self, _end, self._expected)  # threads of one that nobody closed
        self._threads: list[threading.Thread] = []
        self._sends: deque[tuple[int, Any, Tensor, int]] = deque()
        self._outstanding, self._max_outstanding = 0, max_outstanding  # bytes given to gloo and not known to be gone

    def send(self, peer: int, tag: int, rows: Tensor) -> None:
        """Gives contiguous `rows` away: nobody may write them any more. Waits where too much is on its way already."""
        self._sends.append((peer, _begin(self._group.send, rows, peer, tag), rows, rows.nbytes))
        self._outstanding += rows.nbytes
        self.bytes_sent[peer] += rows.nbytes
        self.messages_sent[peer] += 1
        while self._outstanding > self._max_outstanding and len(self._sends) > 1:
            self._wait_send()

    def expect(self, peer: int, tag: int, rows: Tensor, token: Any) -> None:
        """`rows`, contiguous, will be filled by what `peer` sends with that tag; `next_arrival` says when."""
        if peer not in self._expected:
            waiting = self._expected[peer] = SimpleQueue()
            args = (peer, waiting, self._arrivals, self._limit)
            self._threads.append(_thread(f"gnnsys-peer-{peer}", _wait_all, *args, idle=waiting))
        self._expected[peer].put((_begin(self._group.recv, rows, peer, tag), token))

    def next_arrival(self, wait: bool = True) -> Any:
        """The token of something that has come; None where nothing has and `wait` is False."""
        try:
            arrival = self._arrivals.get(wait, self.timeout + 60 if wait else None)
        except Empty:
            if not wait:
                return None
            raise DeadlineExceeded(f"rank {self.rank} waited {self.timeout:.0f} s for what other ranks send") from None
        if arrival.error is not None:
            raise arrival.error
        return arrival.token

    def flush(self, keep: int = 0) -> None:
        """Returns when all that was sent has left, but for the last `keep` messages, which may be under way still."""
        while len(self._sends) > keep:
            self._wait_send()

    def another(self) -> RankExchange:
        """The same way once more, with arrivals of its own; its tags must be others."""
        return RankExchange(self._group, timeout=self.timeout, max_outstanding=self._max_outstanding)

    def swap(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Gives `rows[r]` to rank r, on every rank at once; what they gave to this one. 1-d, one dtype, any length."""
        sizes = [torch.tensor([len(each)], device="cpu") for each in rows]
        told = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in rows]
        self._swap(sizes, told, _TAG_IDS)
        got = [torch.empty(int(size), dtype=rows[0].dtype, device="cpu") for size in told]
        self._swap([each.contiguous() for each in rows], got, _TAG_IDS + 1)
        got[self.rank] = rows[self.rank]
        return got

    def _swap(self, out: Sequence[Tensor], into: Sequence[Tensor], tag: int) -> None:
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        works = [(p, _begin(self._group.recv, into[p], p, tag)) for p in others if into[p].numel()]
        works += [(p, _begin(self._group.send, out[p], p, tag)) for p in others if out[p].numel()]
        for peer, work in works:
            _finish(work, peer, self._limit)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begins to make `values` the sum over all ranks; call `wait()` on the result before using it."""
        if self.world_size == 1:
            return _FinishedSum()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = self._limit
        return _Sum(self, lambda: self._group.allreduce([values], options))

    def lost(self) -> int | None:
        """The rank to which the connection is gone: the first where sending a byte fails, which it does at once."""
        told: SimpleQueue[int] = SimpleQueue()
        for peer in range(self.world_size):
            if peer != self.rank:
                _thread(f"gnnsys-probe-{peer}", _probe, self._group, peer, told)
        with contextlib.suppress(Empty):
            return told.get(timeout=_PROBE_SECONDS)
        return None

    def close(self, grace: float = 0.0) -> None:
        """Ends the threads, once what they wait for has come or failed; what was sent goes on its way.

        Waits for that, but no longer than `grace` seconds: what then is left is left to threads, or, where the process
        ends, lost.
        """
        threads, until = self._threads, time.monotonic() + grace
        _end(self._expected)
        if self._sends:
            sends = [(peer, work, rows) for peer, work, rows, _ in self._sends]
            try:
                threads.append(_thread("gnnsys-sends", _wait_sent, sends, self._limit))
            except RuntimeError:  # the process ends, and nobody needs the connections any more
                _wait_sent(sends, timedelta(seconds=grace))
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._threads = []
        self._sends.clear()

    def _wait_send(self) -> None:
        peer, work, _, num_bytes = self._sends.popleft()
        self._outstanding -= num_bytes
        _finish(work, peer, self._limit)


class _Sum:
    """A sum over all ranks under way. gloo does not say who a failed one lacks, so the connections are looked at."""

    def __init__(self, peers: RankExchange, begin: Callable[[], Any]) -> None:
        self._peers, self._began = peers, time.monotonic()
        try:
            self._work = begin()
        except RuntimeError as error:  # a connection that is gone already
            raise self._lost(error) from error

    def wait(self) -> bool:
        try:
            return bool(self._work.wait())
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> TrainerLost:
        peer = self._peers.lost()
        return _lost(-1 if peer is None else peer, time.monotonic() - self._began, "a sum over all ranks", error)


def _check_host(group: Any, world_size: int) -> None:
    """ValueError where tensors of the CPU cannot travel."""
    if world_size > 1 and isinstance(group, dist.ProcessGroup):
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            raise ValueError(
                "rows go through host memory, and this process group has no backend for it: begin with "
                'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), or "gloo"'
            ) from error


def _end(expected: dict[int, SimpleQueue[Any]]) -> None:
    for waiting in expected.values():
        waiting.put(None)
    expected.clear()


class _FinishedSum:
    def wait(self) -> bool:
        return True


def _begin(transfer: Callable[..., Any], rows: Tensor, peer: int, tag: int) -> Any:
    """Begins one transfer; where the connection is gone already, gloo says so here."""
    try:
        return transfer([rows], peer, tag)
    except RuntimeError as error:
        raise _lost(peer, 0.0, "an exchange of rows", error) from error


def _finish(work: Any, peer: int, limit: timedelta) -> None:
    """Waits for one transfer; what gloo says of a failed one in our words."""
    began = time.monotonic()
    try:
        work.wait(limit)
    except Exception as error:
        raise _lost(peer, time.monotonic() - began, "an exchange of rows", error) from error


def _lost(peer: int, silent_for: float, what: str, error: Exception) -> TrainerLost:
    name = "a rank" if peer < 0 else f"rank {peer}"
    message = (
        f"{name} was lost, or was not heard of for {silent_for:.1f} s, in {what}: look at its output, raise timeout if "
        f"it may be that late, or start again from the last checkpoint ({error})"
    )
    return TrainerLost(message, rank=peer, silent_for=silent_for)


class _Waiter(threading.Thread):
    """Waits for a peer inside gloo, or idles at a queue, which None ends."""

    idle: SimpleQueue[Any] | None = None


_WAITERS: weakref.WeakSet[_Waiter] = weakref.WeakSet()


def _thread(name: str, target: Callable[..., None], *args: Any, idle: SimpleQueue[Any] | None = None) -> _Waiter:
    thread = _Waiter(target=target, args=args, name=name, daemon=True)
    thread.idle = idle
    _WAITERS.add(thread)
    thread.start()
    return thread


@atexit.register
def _leave_in_peace() -> None:
    """A wait in gloo that ends while the interpreter is being taken down aborts the process. Where ranks fail together
    their connections end at about that time, so that is waited for; one that holds longer will hold until the end."""
    until = time.monotonic() + _LEAVE_SECONDS
    waiters = list(_WAITERS)
    for waiter in waiters:
        if waiter.idle is not None:
            waiter.idle.put(None)
    for waiter in waiters:
        waiter.join(max(0.0, until - time.monotonic()))


def _wait_sent(sends: list[tuple[int, Any, Tensor]], limit: timedelta) -> None:
    """Keeps what was sent until it has left."""
    while sends:
        peer, work, _ = sends[0]
        with contextlib.suppress(Exception):  # who has gone needs nothing any more
            _finish(work, peer, limit)
        del sends[0], work


def _wait_all(peer: int, waiting: SimpleQueue[Any], arrivals: SimpleQueue[Arrival], limit: timedelta) -> None:
    """One thread per peer. Holds nothing of its owner, which may be forgotten without being closed."""
    while (expected := waiting.get()) is not None:
        work, token = expected
        try:
            _finish(work, peer, limit)
            arrivals.put(Arrival(token, None))
        except Exception as error:  # raised where the owner waits, whatever it is
            arrivals.put(Arrival(token, error))
        del work, token, expected


def _probe(group: Any, peer: int, told: SimpleQueue[int]) -> None:
    """Tells of a peer that cannot be sent to; one that can does not take the byte, and is not told of in time."""
    try:
        group.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, _TAG_IDS + 2).wait(
            timedelta(seconds=10 * _PROBE_SECONDS)
        )
    except Exception:
        told.put(peer)
