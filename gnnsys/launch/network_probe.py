"""How fast a connection between two hosts is: bytes per second of one TCP stream, and the time of a round trip.

The client says how much follows, sends it, and waits for one byte; amounts grow until one takes long enough. The server
keeps nothing of what it gets. Uses only the standard library: agents have it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

HELLO = b"gnnsys-probe-1\n"
_LENGTH = struct.Struct("!Q")
_BUFFER = 1 << 20
MOST_BYTES = 1 << 33  # in one go
NUM_ROUND_TRIPS = 100
PATIENCE = 30.0  # seconds that either side waits for the other's next bytes
HELLO_PATIENCE = 5.0  # for its first ones
MOST_CLIENTS = 16


@dataclass(frozen=True)
class LinkSpeed:
    """Of a link in one direction. `rate`: bytes per second; `round_trip`: seconds, the median of many."""

    source: str
    target: str
    rate: float
    round_trip: float


class ProbeServer:
    """Listens for clients and answers each in a thread of its own, until it is closed."""

    def __init__(self, port: int = 0, address: str = "") -> None:
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, dualstack_ipv6=both)
        self.port = int(self._listener.getsockname()[1])
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)

    def serve_one(self, timeout: float) -> str:
        """Answers the first client that speaks as one, until it has what it wants; its address. Others are let go."""
        deadline = time.monotonic() + timeout
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            connection, address = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                if _answer(connection):
                    return str(address[0])

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a client
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._answer_and_close, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _answer_and_close(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                _answer(connection)
        finally:
            self._places.release()


def measure_link(address: str, port: int, seconds: float = 0.5, timeout: float = 10.0) -> dict[str, float]:
    """Rate and round trip to a `ProbeServer`. OSError where there is none."""
    with socket.create_connection((address, port), timeout) as link:
        link.settimeout(PATIENCE)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(HELLO)
        trips = [_send(link, 0) for _ in range(NUM_ROUND_TRIPS)]
        amount, took = 1 << 16, 0.0
        while True:
            took = _send(link, amount)
            if took >= seconds or amount >= MOST_BYTES:
                break
            amount *= 2
    return {"rate": amount / took, "round_trip": sorted(trips)[NUM_ROUND_TRIPS // 2]}


def _send(link: socket.socket, amount: int) -> float:
    """Sends so many bytes and waits until all have come; seconds."""
    data = memoryview(bytes(min(amount, _BUFFER)))
    begin = time.perf_counter()
    link.sendall(_LENGTH.pack(amount))
    for sent in range(0, amount, _BUFFER):
        link.sendall(data[: amount - sent])
    if not link.recv(1):
        raise ConnectionError("the other side closed the connection: is it a gnnsys of the same version?")
    return time.perf_counter() - begin


def _answer(link: socket.socket) -> bool:
    """Takes what a client sends until it is done; False for one that does not speak as one."""
    link.settimeout(HELLO_PATIENCE)
    hello = memoryview(bytearray(len(HELLO)))
    if not _fill(link, hello) or hello != HELLO:
        return False
    link.settimeout(PATIENCE)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_BUFFER))
    while _fill(link, buffer[: _LENGTH.size]):
        (left,) = _LENGTH.unpack_from(buffer)
        if left > MOST_BYTES:
            return False
        while left:
            got = link.recv_into(buffer[: min(left, _BUFFER)])
            if not got:
                return False
            left -= got
        link.sendall(b".")
    return True


def _fill(link: socket.socket, place: memoryview) -> bool:
    """Reads as many bytes as there is place for; False where the other side ends first."""
    while place:
        got = link.recv_into(place)
        if not got:
            return False
        place = place[got:]
    return True


class AgentProbe:
    """The probe as an agent offers it: called by name, answered as JSON."""

    def __init__(self) -> None:
        self._server: ProbeServer | None = None

    def listen(self) -> int:
        if self._server is None:
            self._server = ProbeServer()
            self._server.start()
        return self._server.port

    def measure(self, address: str, port: int, seconds: float) -> dict[str, Any]:
        return dict(measure_link(address, port, seconds))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
