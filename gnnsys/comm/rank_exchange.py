"""Tensors from rank to rank over torch.distributed: asynchronous, with a tag each, and a notice when one arrives.

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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnnsys.comm.device_link import DeviceRoute, SentRows, record_ready
from gnnsys.comm.errors import DeadlineExceeded, TrainerLost
from gnnsys.comm.transfers import Waiter, begin_transfer, finish_transfer, start_waiter, trainer_lost

_TAG_IDS = 1 << 30  # tags of `swap`, above those of the owner's messages
_PROBE_SECONDS = 1.0
_LEAVE_SECONDS = 2.0


class Arrival(NamedTuple):
    """A transfer that has ended: `token` is the owner's name for it, `error` is set where it failed."""

    token: Any
    error: Exception | None
    work: Any = None  # of a transfer that the current stream waits for, between GPUs


class RankExchange:
    """Sends tensors to other ranks and receives theirs. `group` is a process group with a backend for the CPU (gloo).

    All methods are for one thread. `timeout` is how long one message may take to come after it was asked for; that is
    as long as a peer may be behind. Rows on the host go through gloo; those on a GPU where `route` says so.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: float = 1800.0,
        max_outstanding: int = 1 << 30,
        route: DeviceRoute | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        self._group: Any = dist.group.WORLD if group is None and dist.is_initialized() else group
        self.rank = 0 if self._group is None else self._group.rank()
        self.world_size = 1 if self._group is None else self._group.size()
        _check_host(self._group, self.world_size)
        self.route = DeviceRoute(self._group) if route is None else route
        self.timeout = timeout
        self.bytes_sent = [0] * self.world_size  # payload, since the beginning
        self.messages_sent = [0] * self.world_size
        self._limit = timedelta(seconds=timeout)
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._expected: dict[int, SimpleQueue[tuple[Any, Any, Any] | None]] = {}  # per peer: what its thread waits for
        self._threads: list[threading.Thread] = []
        self._sends: deque[tuple[int, Any, Tensor, int]] = deque()
        # Of one that nobody closed: its threads end, and what it sent is still delivered, over connections that last.
        # Not where the process ends: a thread that waits in gloo then aborts it.
        weakref.finalize(self, _end, self._expected)
        left = weakref.finalize(self, _deliver, self._sends, self._limit, (self._group, self.route), 0.0)
        left.atexit = False
        self._outstanding, self._max_outstanding = 0, max_outstanding  # bytes given to gloo and not known to be gone
        self._swaps: RankExchange | None = None  # whose threads wait for what `swap` brings
        self._num_bursts = 0  # of swaps, one inside another

    def send(self, peer: int, tag: int, rows: Tensor) -> None:
        """Begins to send contiguous `rows`, which nobody may change until they have left (`flush`).

        Waits while more than `max_outstanding` bytes are on their way.
        """
        link = self.route.link_of(rows.device)
        if link is None:
            self._sends.append((peer, begin_transfer(self._group.send, rows, peer, tag), rows, rows.nbytes))
            self._outstanding += rows.nbytes
        else:
            sent, notice = link.send(peer, tag, rows), torch.zeros(1, dtype=torch.uint8, device="cpu")
            told = begin_transfer(self._group.send, notice, peer, tag)
            self._sends.append((peer, _Announced(told, sent), notice, 0))
        self.bytes_sent[peer] += rows.nbytes
        self.messages_sent[peer] += 1
        while self._outstanding > self._max_outstanding and len(self._sends) > 1:
            self._wait_send()

    def expect(self, peer: int, tag: int, rows: Tensor, token: Any) -> None:
        """Begins to receive into contiguous `rows` what `peer` sends with this tag; `next_arrival` tells when."""
        if peer not in self._expected:
            waiting = self._expected[peer] = SimpleQueue()
            args = (peer, waiting, self._arrivals, self._limit)
            self._threads.append(start_waiter(f"gnnsys-peer-{peer}", _wait_all, *args, idle=waiting))
        link, then = self.route.link_of(rows.device), None
        if link is not None:
            then = partial(link.receive, peer, tag, rows, record_ready(rows.device))
            rows = torch.zeros(1, dtype=torch.uint8, device="cpu")  # the notice that it has been announced
        self._expected[peer].put((begin_transfer(self._group.recv, rows, peer, tag), then, token))

    def next_arrival(self, wait: bool = True) -> Any:
        """The token of a transfer that has arrived; None where none has and `wait` is False."""
        try:
            arrival = self._arrivals.get(wait, self.timeout + 60 if wait else None)
        except Empty:
            if not wait:
                return None
            raise DeadlineExceeded(f"rank {self.rank} waited {self.timeout:.0f} s for what other ranks send") from None
        if arrival.error is not None:
            raise arrival.error
        if arrival.work is not None:
            arrival.work.wait()
        return arrival.token

    def flush(self, keep: int = 0) -> None:
        """Returns when all that was sent has left, but for the last `keep` messages, which may be under way still."""
        while len(self._sends) > keep:
            self._wait_send()

    def another(self) -> RankExchange:
        """Another exchange over the same process group, with arrivals of its own. It must use other tags."""
        return RankExchange(self._group, timeout=self.timeout, max_outstanding=self._max_outstanding, route=self.route)

    def agree_on_route(self, device: torch.device, suits_all: bool) -> None:
        """From here on rows go from GPU to GPU if they are on one that `route.suits` on all ranks, which all call this.

        What is under way arrives as it was sent.
        """
        self.route.agree(device, suits_all, self.swap, self._limit)

    @contextlib.contextmanager
    def many_swaps(self) -> Iterator[None]:
        """Inside it swaps share their threads, which end with it. A swap elsewhere starts threads of its own."""
        self._num_bursts += 1
        try:
            yield
        finally:
            self._num_bursts -= 1
            if not self._num_bursts:
                self._end_swaps()

    def swap(self, rows: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Sends `rows[r]` to rank r and returns what each sent here. All ranks call it. 1-d, one dtype, any length.

        `sizes`: how many come from each rank, where all ranks know that and none has to be told. Nobody checks them:
        where they are wrong, so is what comes, or the connection fails.
        """
        with self.many_swaps():
            if sizes is None:
                told = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in rows]
                self._swap([torch.tensor([len(each)], device="cpu") for each in rows], told, _TAG_IDS)
                sizes = [int(size) for size in told]
            got = [torch.empty(size, dtype=rows[0].dtype, device="cpu") for size in sizes]
            self._swap([each.contiguous() for each in rows], got, _TAG_IDS + 1)
        got[self.rank] = rows[self.rank]
        return got

    def _swap(self, out: Sequence[Tensor], into: Sequence[Tensor], tag: int) -> None:
        """All peers are waited for at once: one that is lost is told of though another, that lives, is silent."""
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        if not others:
            return
        exchange = self._swaps = self._swaps or self.another()
        try:
            expected = [peer for peer in others if into[peer].numel()]
            for peer in expected:
                exchange.expect(peer, tag, into[peer], peer)
            for peer in others:
                if out[peer].numel():
                    exchange.send(peer, tag, out[peer])
            for _ in expected:
                exchange.next_arrival()
            exchange.flush()
        except BaseException:  # what is still under way must not arrive in the next one
            self._end_swaps()
            raise

    def _end_swaps(self, grace: float = 0.0) -> None:
        exchange, self._swaps = self._swaps, None
        if exchange is not None:
            exchange.close(grace)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begins to make `values` the sum over all ranks; call `wait()` on the result before using it."""
        if self.world_size == 1:
            return _FinishedSum()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = self._limit
        return _Sum(self, lambda: self._group.allreduce([values], options))

    def lost(self) -> int | None:
        """A rank whose connection is gone: sending it a byte fails at once. None where all connections hold."""
        told: SimpleQueue[int] = SimpleQueue()
        for peer in range(self.world_size):
            if peer != self.rank:
                start_waiter(f"gnnsys-probe-{peer}", _probe, self._group, peer, told)
        with contextlib.suppress(Empty):
            return told.get(timeout=_PROBE_SECONDS)
        return None

    def close(self, grace: float = 0.0) -> None:
        """Ends the threads once what they wait for has arrived or failed. What was sent is still delivered.

        Waits for both, at most `grace` seconds. Daemon threads finish the rest, unless the process ends first.
        """
        threads, until = self._threads, time.monotonic() + grace
        _end(self._expected)
        self._end_swaps(grace)
        threads += _deliver(self._sends, self._limit, (self._group, self.route), grace)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._threads = []

    def _wait_send(self) -> None:
        peer, work, _, num_bytes = self._sends.popleft()
        self._outstanding -= num_bytes
        finish_transfer(work, peer, self._limit)


class _Announced(NamedTuple):
    """A message between GPUs: over gloo the notice of it, then its rows."""

    notice: Any
    rows: SentRows

    def wait(self, limit: timedelta) -> None:
        self.notice.wait(limit)
        self.rows.wait(limit)


class _Sum:
    """A sum over all ranks under way. gloo does not say which rank a failed one lacks, so connections are probed."""

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
        return trainer_lost(-1 if peer is None else peer, time.monotonic() - self._began, "a sum over all ranks", error)


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


def _deliver(sends: deque[tuple[int, Any, Tensor, int]], limit: timedelta, over: Any, grace: float) -> list[Waiter]:
    """A thread that keeps what was sent, and connections, until it has left. Nothing is in `sends` then."""
    begun = [(peer, work, rows) for peer, work, rows, _ in sends]
    sends.clear()
    try:
        return [start_waiter("gnnsys-sends", _wait_sent, begun, limit, over)] if begun else []
    except RuntimeError:  # the process ends, and nobody needs the connections any more
        _wait_sent(begun, timedelta(seconds=grace), over)
        return []


class _FinishedSum:
    def wait(self) -> bool:
        return True


@atexit.register
def _leave_in_peace() -> None:
    """Waits at exit, for a while, for the threads that wait inside gloo.

    A wait that ends while the interpreter is being taken down aborts the process. Where ranks fail together, their
    connections end at about that time. A connection that lasts longer than this lasts until the process is gone.
    """
    until = time.monotonic() + _LEAVE_SECONDS
    waiters = [thread for thread in threading.enumerate() if isinstance(thread, Waiter)]
    for waiter in waiters:
        if waiter.idle is not None:
            waiter.idle.put(None)
    for waiter in waiters:
        waiter.join(max(0.0, until - time.monotonic()))


def _wait_sent(sends: list[tuple[int, Any, Tensor]], limit: timedelta, over: Any) -> None:
    """Keeps what was sent, and what it is sent over, until it has left."""
    while sends:
        peer, work, _ = sends[0]
        with contextlib.suppress(Exception):  # who has gone needs nothing any more
            finish_transfer(work, peer, limit)
        del sends[0], work


def _wait_all(peer: int, waiting: SimpleQueue[Any], arrivals: SimpleQueue[Arrival], limit: timedelta) -> None:
    """One thread per peer. Holds nothing of its owner, which may be forgotten without being closed."""
    while (expected := waiting.get()) is not None:
        work, then, token = expected
        try:
            finish_transfer(work, peer, limit)
            arrivals.put(Arrival(token, None, None if then is None else then()))
        except Exception as error:  # raised where the owner waits, whatever it is
            arrivals.put(Arrival(token, error))
        del work, then, token, expected


def _probe(group: Any, peer: int, told: SimpleQueue[int]) -> None:
    """Puts `peer` into `told` where nothing can be sent to it. A living peer never takes the byte, and is not named."""
    try:
        group.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, _TAG_IDS + 2).wait(
            timedelta(seconds=10 * _PROBE_SECONDS)
        )
    except RuntimeError:  # gloo's, of a connection that is gone
        told.put(peer)
