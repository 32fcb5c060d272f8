"""Wires that fail: slow ones, and cables that are pulled."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from gnnsys.lab import Lab
from tests.comm.endpoints import Proxy


class SlowProxy(Proxy):
    """A wire that holds every piece of what is said back for `delay` seconds, and can do all that a Proxy can."""

    def __init__(self, endpoint: str, delay: float = 0.0) -> None:
        self.delay = delay
        super().__init__(endpoint)

    def _forward(self, source: socket.socket) -> None:
        time.sleep(self.delay)
        super()._forward(source)


@contextlib.contextmanager
def link_cut(lab: Lab, host: int) -> Iterator[None]:
    """Pulls a host's cable for as long as the block lasts."""
    lab.cut(host)
    try:
        yield
    finally:
        lab.heal(host)
