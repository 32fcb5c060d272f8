"""Rows from GPU to GPU: NCCL's point-to-point, which has no tags, behind `RankExchange`, whose messages do.

NCCL wants both ends to begin their transfers in the same order, and one that its peer has not begun holds up all that
follow. So the sender announces a message by its tag, over gloo; once it is announced and expected, the receiver answers
with a go-ahead and begins to receive; go-aheads come in the order in which they were given, and the sender begins in
that order. Each direction between two ranks has a process group of its own (`up`, to the higher rank, and `down`), so
that what one sends never waits for what it receives. No transfer is begun that the peer is not about to begin.

Nothing here asks for NCCL: with gloo's groups and rows on the host it is the same, which is how it is tested.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnsys.comm.device_place import place_of
from gnnsys.comm.transfers import begin_transfer, finish_transfer, start_waiter, trainer_lost

_GO_AHEAD, _ROWS = 0, 1  # tags; NCCL knows none


class SentRows:
    """Rows that are sent when the peer is ready for them. `wait`: what the current stream does next may change them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.ready = rows, record_ready(rows.device)
        self._begun = threading.Event()
        self._work: Any = None
        self._error: Exception | None = None

    def begun(self, work: Any = None, error: Exception | None = None) -> None:
        self._work, self._error = work, error
        self._begun.set()

    def wait(self, limit: timedelta) -> None:
        if not self._begun.wait(limit.total_seconds()):
            raise TimeoutError(f"nobody was ready for rows within {limit.total_seconds():.0f} s")
        if self._error is not None:
            raise self._error
        self._work.wait()
        if self.rows.is_cuda:  # whose memory is given to others when this stream, which waits, comes to that
            self.rows.record_stream(torch.cuda.current_stream(self.rows.device))


class DeviceLink:
    """Carries rows on `device` to and from other ranks, whose rows are on devices too.

    `send` is for the thread that computes, `receive` for those that wait for announcements. A message is announced
    after `send` has returned.
    """

    def __init__(self, up: Any, down: Any, rank: int, device: torch.device, limit: timedelta) -> None:
        self.device = device
        self._up, self._down, self._rank, self._limit = up, down, rank, limit
        self._lock = threading.Lock()
        self._receiving: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._waiting: dict[int, dict[int, deque[SentRows]]] = {}  # per peer and tag: rows without a go-ahead
        self._go_aheads: dict[int, SimpleQueue[tuple[Any, Tensor] | None]] = {}  # per peer: what its thread waits for
        weakref.finalize(self, _end, self._go_aheads)

    def send(self, peer: int, tag: int, rows: Tensor) -> SentRows:
        """Sends `rows` once the peer gives its go-ahead to the tag."""
        group = self._up if peer > self._rank else self._down
        sent, number = SentRows(rows), torch.empty(1, dtype=torch.int64, device="cpu")
        if peer not in self._go_aheads:
            self._waiting[peer] = defaultdict(deque)
            queue = self._go_aheads[peer] = SimpleQueue()
            args = (group, peer, queue, self._waiting[peer], self._lock, self._limit)
            start_waiter(f"gnnsys-go-aheads-{peer}", _send_all, *args, idle=queue)
        with self._lock:
            self._waiting[peer][tag].append(sent)
        self._go_aheads[peer].put((begin_transfer(group.recv, number, peer, _GO_AHEAD), number))
        return sent

    def receive(self, peer: int, tag: int, rows: Tensor, ready: Any) -> Any:
        """Begins to receive the announced message into `rows`, behind the event `ready`. Before they are read, `wait()`
        on the result makes the current stream wait for them."""
        group = self._up if peer < self._rank else self._down
        with self._lock:
            in_order = self._receiving[peer]
        with in_order:
            number = torch.tensor([tag], device="cpu")
            finish_transfer(begin_transfer(group.send, number, peer, _GO_AHEAD), peer, self._limit)
            with _behind(ready, rows.device):
                return begin_transfer(group.recv, rows, peer, _ROWS)


class DeviceRoute:
    """Whether rows go from GPU to GPU in the pass that is under way, and the link that carries them, made when it is
    first needed. Exchanges over the same process group share it: they share the order of transfers."""

    def __init__(
        self, group: Any, make: Callable[[torch.device, timedelta], DeviceLink] | None = None, device_type: str = "cuda"
    ) -> None:
        self._group, self._device_type = group, device_type
        self._make = make or (lambda device, limit: make_link(group, device, limit))
        self._can_link = make is not None or _has_nccl(group)
        self._link: DeviceLink | None = None
        self._is_shared: bool | None = None  # a GPU by several ranks, once that is known
        self._is_used = False

    def suits(self, device: torch.device) -> bool:
        """Whether this rank could send rows on `device` from there."""
        is_same = self._link is None or self._link.device == device
        return self._can_link and device.type == self._device_type and is_same

    def agree(self, device: torch.device, suits_all: bool, swap: Callable[..., list[Tensor]], limit: timedelta) -> None:
        """From here on rows go by it if they are on a device that `suits` on all ranks. All ranks call it."""
        if suits_all and self._is_shared is None:
            self._is_shared = not _are_different(device, self._group, swap)
        self._is_used = suits_all and not self._is_shared
        if self._is_used and self._link is None:
            self._link = self._make(device, limit)

    def link_of(self, device: torch.device) -> DeviceLink | None:
        """What carries rows on `device`; None where they go through the host."""
        return self._link if self._is_used and self._link is not None and self._link.device == device else None


def _has_nccl(group: Any) -> bool:
    if not (isinstance(group, dist.ProcessGroup) and torch.cuda.is_available() and dist.is_nccl_available()):
        return False
    try:
        return bool(group._get_backend(torch.device("cuda")).name() == "nccl")
    except RuntimeError:
        return False


def _are_different(device: torch.device, group: Any, swap: Callable[..., list[Tensor]]) -> bool:
    """Whether no two ranks have the same GPU. On the host, where tests have their rows, there is none to share."""
    if device.type == "cpu":
        return True
    place = hashlib.sha256("/".join(place_of(device)).encode()).digest()
    own = torch.frombuffer(bytearray(place[:8]), dtype=torch.int64).cpu()
    return len({int(each) for each in swap([own] * group.size())}) == group.size()


def make_link(group: Any, device: torch.device, limit: timedelta) -> DeviceLink:
    """Joins every two ranks, one pair after the other: joins that wait for each other around a circle never end."""
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    up, down = (dist.new_group(ranks, backend=backend, use_local_synchronization=True) for _ in range(2))
    rows = torch.zeros(1, device=device)
    for low, high in itertools.combinations(range(group.size()), 2):
        if rank in (low, high):
            peer, is_low = low + high - rank, rank == low
            begin_transfer(up.send if is_low else up.recv, rows, peer, _ROWS).wait()
            begin_transfer(down.recv if is_low else down.send, rows, peer, _ROWS).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return DeviceLink(up, down, rank, device, limit)


def _send_all(
    group: Any, peer: int, queue: SimpleQueue[Any], waiting: dict[int, deque[SentRows]], lock: threading.Lock,
    limit: timedelta,
) -> None:  # fmt: skip
    """One thread per peer: begins to send what the peer is ready for. There is one go-ahead for each message."""
    while (expected := queue.get()) is not None:
        work, number = expected
        try:
            finish_transfer(work, peer, limit)
            with lock:
                sent = waiting[int(number)].popleft()
        except Exception as error:  # the peer is lost to all that wait for it
            with lock:
                left = [sent for of_tag in waiting.values() for sent in of_tag]
                waiting.clear()
            for sent in left:
                sent.begun(error=error)
            continue
        try:
            with _behind(sent.ready, sent.rows.device):
                sent.begun(begin_transfer(group.send, sent.rows, peer, _ROWS))
        except Exception as error:
            sent.begun(error=error if isinstance(error, RuntimeError) else trainer_lost(peer, 0.0, "a send", error))
        del work, number, expected, sent


def record_ready(device: torch.device) -> Any:
    """An event behind what the current stream has to do now; None on the host."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextlib.contextmanager
def _behind(ready: Any, device: torch.device) -> Iterator[None]:
    """Transfers that are begun inside it come behind the event."""
    if ready is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        yield


def _end(queues: dict[int, SimpleQueue[Any]]) -> None:
    for queue in queues.values():
        queue.put(None)
    queues.clear()
