"""Keeps the machine's graph server running: one that ends is started again at the same port, with its parts open.

A socket that is bound and never listens reserves the port, so that no other account can take it in between and receive
the clients that look for their server. One thread waits for the server to end and starts the next one. A server that
ends too often is not started again, and whoever waits for it on this machine is told at once.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gnnsys.comm import Keys, endpoint
from gnnsys.session.server_process import ServerProcess

_log = logging.getLogger(__name__)

_WITHIN_SECONDS = 600.0
_START_SECONDS = 120.0  # for a graph server to import torch on a busy machine


class ServerSupervisor:
    """The constructor starts the first process and returns at once; `order` has it listen, `close` ends it.

    `parts` is what the next process opens before it listens: (directory, numbers of parts), or None. It is started
    again at most `max_restarts` times within ten minutes.
    """

    def __init__(self, max_restarts: int = 3) -> None:
        self.parts: tuple[str, Sequence[int]] | None = None
        self.rate_out: float | None = None  # of the next process
        self.flow_order = "auto"  # likewise
        self.is_over = False  # it is not started again
        self._process = ServerProcess()
        self._number = 0
        self._orders: dict[str, Any] = {}
        self._place: socket.socket | None = None
        self._restarts: deque[float] = deque(maxlen=max_restarts)
        self._is_closing = False
        self._lock = threading.Lock()  # of starting another one, and of closing
        self._keeper: threading.Thread | None = None

    def order(
        self, machine: int, address: str, *, keys: Keys | None, threads: int, lost_after: float,
        sampler: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Has it listen at `address`; the endpoint. RuntimeError where it does not. `sampler`: see `ServerProcess`."""
        self._place = reserve(address)
        bind = endpoint(address, self._place.getsockname()[1])
        self._orders = {
            "machine": machine, "bind": [bind], "keys": keys, "threads": threads, "lost_after": lost_after,
            "is_reserved": True, "sampler": sampler,
        }  # fmt: skip
        self._process.order(**self._orders, order=self.flow_order)
        return self._process.endpoints(_START_SECONDS)[0]

    @property
    def _role(self) -> str:
        return "graph server" if self._orders["sampler"] is None else "sampler"

    def keep(self, on_end: Callable[[str], None]) -> None:
        """Starts it again whenever it ends; `on_end` is called, in a thread, with what to say once it does not."""
        self._keeper = threading.Thread(target=self._keep, args=(on_end,), name="gnnsys-server-keeper", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Of the last process; None while it runs."""
        return self._process.returncode

    def close(self) -> None:
        """Ends it. Idempotent."""
        with self._lock:
            self._is_closing = self.is_over = True
        self._process.close()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(_START_SECONDS)
        if self._place is not None:
            self._place.close()

    def _keep(self, on_end: Callable[[str], None]) -> None:
        machine = self._orders["machine"]
        while True:
            code = self._process.wait()
            if self._is_closing:
                return
            what = f"the {self._role} of machine {machine} (process {self.pid}) ended with exit code {code}"
            now = time.monotonic()
            count = len(self._restarts)
            if count == self._restarts.maxlen and (count == 0 or now - self._restarts[0] < _WITHIN_SECONDS):
                self.is_over = True
                on_end(
                    f"{what}; it was started again {count} times within {_WITHIN_SECONDS / 60:g} minutes and is not "
                    "once more. What it printed says why; start again from the last checkpoint"
                )
                return
            self._restarts.append(now)
            _log.warning("%s; it is started again", what)
            self._begin()

    def _begin(self) -> None:
        self._process.close()  # its pipes; it has ended
        with self._lock:
            if self._is_closing:
                return
            self._number += 1
            self._process = ServerProcess()
        try:
            self._process.order(
                **self._orders, life=self._number, parts=self.parts, parent_death=True, rate_out=self.rate_out,
                order=self.flow_order,
            )  # fmt: skip
            self._process.endpoints(_START_SECONDS)
        except (RuntimeError, OSError, ValueError) as error:  # the latter where `close` has shut its pipes meanwhile
            if not self._is_closing:
                _log.error("life %d of machine %d's %s: %s", self._number, self._orders["machine"], self._role, error)
            self._process.close()


def reserve(address: str) -> socket.socket:
    """A free port of an address, kept for who says SO_REUSEPORT in this account. SO_REUSEADDR would be for anybody."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RuntimeError(f"no server can listen at {address}: {error}") from error
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place.bind(where)
    except OSError as error:
        place.close()
        raise RuntimeError(f"no server can listen at {address}: {error}") from error
    return place
