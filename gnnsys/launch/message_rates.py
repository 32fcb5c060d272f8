"""How many bytes per second messages of a job carry between hosts: `comm`'s own, encrypted with a key as in a run.

Every host has a `RateServer`. To measure what comes into a host it pulls from all others at once; to measure what goes
out of it all others pull from it at once. A pair alone would not do: the link of the slower one would hide the other's.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gnnsys.comm import (
    Client,
    CommError,
    Keys,
    Kind,
    Pending,
    Reply,
    Request,
    Server,
    default_lanes,
    default_server_io_threads,
    default_server_threads,
)
from gnnsys.observe import num_usable_cores
from gnnsys.planning import bytes_on_wire

FIRST_BYTES, MOST_BYTES = 1 << 14, 1 << 24  # of a reply
REPLY_SECONDS = 0.03  # that one takes at least, where that needs no more than MOST_BYTES
NUM_ASKED = 4  # replies that are under way from each host
LEAST_REPLIES = 4  # of each host, from which a rate is told
NUM_SLICES = 8  # of the time in which bytes are counted
PATIENCE = 15.0  # times the seconds of a measurement, for a link on which replies take long


class RateServer:
    """Answers PULL with as many bytes as it is asked for, on every address of this machine."""

    def __init__(self, keys: Keys) -> None:
        self._bytes = torch.zeros(MOST_BYTES, dtype=torch.uint8, device="cpu")
        cores, anywhere = num_usable_cores(), "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
        self._server = Server(
            {Kind.PULL: self._answer}, bind=[f"tcp://{anywhere}:*"], keys=keys, threads=default_server_threads(cores),
            io_threads=default_server_io_threads(cores), name="rates",
        ).start()  # fmt: skip

    @property
    def port(self) -> int:
        return int(self._server.endpoints[0].rpartition(":")[2])

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: Request) -> Reply:
        size = int(request.options["bytes"])
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"a reply has from 1 to {MOST_BYTES} bytes, got {size}")
        return Reply([self._bytes[:size]])


@dataclass
class _Arrivals:
    """When replies of one host came, and how many bytes each was on the wire."""

    times: list[float]
    sizes: list[float]

    def rates(self, begin: float, end: float) -> list[float]:
        """Bytes per second in each of NUM_SLICES slices of a time, between two replies as if they came evenly."""
        edges = np.linspace(begin, end, NUM_SLICES + 1)
        times = list(self.times)  # the thread that pulls adds to both
        came = np.interp(edges, times, np.cumsum(self.sizes[: len(times)]))
        return [float(rate) for rate in np.diff(came) / np.diff(edges)]

    def cover(self, begin: float, end: float) -> bool:
        """Whether enough replies came since `begin`, and one at `end` or later."""
        return bool(self.times) and self.times[-1] >= end and sum(at >= begin for at in self.times) >= LEAST_REPLIES


class _Puller:
    """Pulls from one host until it is told to stop, several replies under way."""

    def __init__(self, client: Client, peer: int, timeout: float) -> None:
        self._client, self._peer, self._timeout = client, peer, timeout
        self._stop = threading.Event()
        self.arrivals = _Arrivals([], [])
        self.error: Exception | None = None
        self.size = FIRST_BYTES
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._grow()
            asked = [self._ask() for _ in range(NUM_ASKED)]
            while not self._stop.is_set():
                reply = asked.pop(0).result()
                self.arrivals.sizes.append(bytes_on_wire(reply.arrays[0].numel(), back=0, messages=1))
                self.arrivals.times.append(time.monotonic())
                asked.append(self._ask())
        except (CommError, RuntimeError) as error:
            if not self._stop.is_set():
                self.error = error

    def _ask(self) -> Pending:
        return self._client.request(
            self._peer, Kind.PULL, options={"bytes": self.size}, timeout=self._timeout, reply_bytes=self.size
        )

    def _grow(self) -> None:
        """Finds a size of replies that takes long enough. The first is also the one that agrees on keys."""
        self._ask().result()
        while self.size < MOST_BYTES and not self._stop.is_set():
            begin = time.monotonic()
            self._ask().result()
            if time.monotonic() - begin >= REPLY_SECONDS:
                return
            self.size *= 2


def pull_rates(
    peers: Mapping[str, str], keys: Keys, seconds: float, *, patience: float | None = None
) -> dict[str, list[float]]:
    """Bytes per second that come from each host while all are asked at once, slice by slice of `seconds`. Bytes are
    counted as plans count them, headers included.

    `peers`: the endpoint of each host's `RateServer`. Counting begins when half of `seconds` are over and all hosts
    have begun to send; it takes longer than `seconds` where replies do. RuntimeError, naming the host, where one does
    not answer within `patience` seconds.
    """
    patience = PATIENCE * seconds + 10.0 if patience is None else patience
    names, deadline = list(peers), time.monotonic() + patience
    client = Client(
        dict(enumerate(peers.values())), sender=0, incarnation=1, keys=keys, timeout=patience, name="rates",
        lost_after=patience, lanes=default_lanes(num_usable_cores(), max(1, len(names) // 2)),
    )  # fmt: skip
    pullers = [_Puller(client, number, patience) for number in range(len(names))]
    try:
        warm = time.monotonic() + seconds / 2
        begin = _await(pullers, names, deadline, lambda arrivals: len(arrivals.times) > 0, warm)
        end = begin + seconds
        end = _await(pullers, names, deadline, lambda arrivals: arrivals.cover(begin, end), end)
        return {
            name: puller.arrivals.rates(begin, min(end, puller.arrivals.times[-1]))
            for name, puller in zip(names, pullers, strict=True)
        }
    finally:
        for puller in pullers:
            puller.stop()
        client.close()
        for puller in pullers:
            puller.join(deadline)


def host_rate(by_flow: Sequence[Sequence[float]]) -> float:
    """The rate of a host from those of its flows, slice by slice: the median over slices of their sums. A pause of
    some machine is in a few slices alone.

    >>> host_rate([[1.0, 0.0, 1.0], [2.0, 2.0, 2.0]])
    3.0
    """
    return statistics.median(map(sum, zip(*by_flow, strict=True)))


def _await(
    pullers: Sequence[_Puller],
    names: Sequence[str],
    deadline: float,
    is_ready: Callable[[_Arrivals], bool],
    until: float,
) -> float:
    """Waits until all are ready, and not less than `until`; when that was."""
    while True:
        now = time.monotonic()
        for name, puller in zip(names, pullers, strict=True):
            if puller.error is not None:
                raise RuntimeError(f"{name} does not answer: {puller.error}")
        slow = [name for name, puller in zip(names, pullers, strict=True) if not is_ready(puller.arrivals)]
        if not slow and now >= until:
            return now
        if now >= deadline:
            raise RuntimeError(f"{slow[0]} has sent too little: its link is very slow, or cut")
        time.sleep(0.01)
