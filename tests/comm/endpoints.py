"""A server and a client in this process, joined by real sockets, and a wire between them that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from gnnsys.comm import Client, Server
from gnnsys.comm.request import Handler

DEADLINE = 120.0  # seconds; what every wait of these tests ends after


def until(condition: Callable[[], Any]) -> None:
    """Polls with a deadline; what is waited for happens in other threads of this process."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def joined(handlers: Mapping[int, Handler], *, client: Any = None, **server: Any) -> Iterator[tuple[Server, Client]]:
    """A server of `handlers` and a client whose peer 0 it is."""
    with Server(handlers, **server) as serving:
        options = {"sender": 3, "incarnation": 7, "timeout": DEADLINE, "keys": server.get("keys")} | (client or {})
        with Client({0: serving.endpoints[0]}, **options) as asking:
            yield serving, asking


class Proxy:
    """Forwards TCP connections to an endpoint; can swallow what one side says, hold a connection up, cut one or all.

    It listens at `place`, an address and a port, or a port that is free.
    """

    def __init__(self, endpoint: str, place: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(place)
        self.endpoint = f"tcp://{place[0]}:{self._listener.getsockname()[1]}"
        self._pairs: dict[socket.socket, tuple[socket.socket, bool]] = {}  # the other end, and whether it is the server
        self._wake, self._woken = socket.socketpair()
        self._cut = self._closed = False
        self._joined: list[socket.socket] = []  # the clients' ends of all connections so far
        self._cut_off: list[int] = []  # numbers of connections that are cut next
        self._held: set[socket.socket] = set()  # the clients' ends of connections on which nothing is forwarded
        self._orders: list[tuple[set[int], threading.Event]] = []  # numbers of those that are held next
        self.swallow = ""  # what is lost from now on: "replies" or "requests"
        self._swallowed = 0  # bytes
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_swallowed(self, num_bytes: int, timeout: float = DEADLINE) -> bool:
        """Until that many bytes have been lost since the last cut; False where they were not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._swallowed >= num_bytes, timeout)

    def cut(self) -> None:
        """Resets every connection; new ones are forwarded again, and nothing is swallowed."""
        self._cut = True
        self._wake.send(b"x")

    @property
    def num_joined(self) -> int:
        """Connections so far, those that were cut included."""
        return len(self._joined)

    def cut_off(self, number: int) -> None:
        """Resets the connection that was made after `number` others; nothing happens to the rest."""
        self._cut_off.append(number)
        self._wake.send(b"x")

    def hold(self, number: int) -> None:
        """Forwards nothing more on the connection that was made after `number` others, either way. Nothing is lost."""
        self._order({number})

    def let_go(self) -> None:
        """Forwards what was held up, and what comes."""
        self._order(set())

    def _order(self, held: set[int]) -> None:
        done = threading.Event()
        self._orders.append((held, done))
        self._wake.send(b"x")
        assert done.wait(DEADLINE)

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"x")
        self._thread.join(DEADLINE)
        for each in (self._listener, self._wake, self._woken):
            each.close()

    def _run(self) -> None:
        while not self._closed:
            ready = wait([self._listener, self._woken, *self._flowing()], DEADLINE)
            for each in ready:
                if each is self._woken:
                    each.recv(100)
                elif each is self._listener:
                    self._join(each.accept()[0])
                elif each in self._pairs:
                    self._forward(each)
            while self._cut_off:
                self._part(self._joined[self._cut_off.pop()])
            while self._orders:
                held, done = self._orders.pop(0)
                self._held = {self._joined[number] for number in held}
                done.set()
            if self._cut or self._closed:
                self._cut, self.swallow, self._swallowed = False, "", 0
                for each in list(self._pairs):
                    each.close()
                self._pairs.clear()

    def _flowing(self) -> list[socket.socket]:
        """The ends that are read, of connections that are not held up."""
        return [end for end, (other, _) in self._pairs.items() if not {end, other} & self._held]

    def _join(self, near: socket.socket) -> None:
        far = socket.create_connection(self._target, timeout=DEADLINE)
        self._pairs[near] = (far, False)
        self._pairs[far] = (near, True)
        self._joined.append(near)

    def _part(self, near: socket.socket) -> None:
        far, _ = self._pairs[near]
        for each in (near, far):
            del self._pairs[each]
            each.close()

    def _forward(self, source: socket.socket) -> None:
        target, from_server = self._pairs[source]
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            for each in (source, target):
                self._pairs.pop(each, None)
                each.close()
        elif self.swallow == ("replies" if from_server else "requests"):
            with self._changed:
                self._swallowed += len(data)
                self._changed.notify_all()
        else:
            with contextlib.suppress(OSError):  # the other end has gone, and is noticed when it is read
                target.sendall(data)
