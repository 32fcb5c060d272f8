"""What passed through an endpoint. MessageCounts is counted by the one thread that owns the sockets and read by any."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gnnsys.comm.kinds import kind_name

_MAX_NAMES = 4096  # senders name themselves: a stranger must not fill memory with names


@dataclass(slots=True)
class MessageCounts:
    """Messages and bytes of frames, both ways, with one peer or of one kind."""

    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class Tally:
    """MessageCounts by peer and by kind, and events (errors, repeats, drops) by reason."""

    def __init__(self) -> None:
        self._peers: dict[int, MessageCounts] = {}
        self._kinds: dict[int, MessageCounts] = {}
        self._events: Counter[str] = Counter()
        self._lock = threading.Lock()

    def received(self, peer: int, kind: int, num_bytes: int) -> None:
        for traffic in (_of(self._peers, peer), _of(self._kinds, kind)):
            traffic.messages_in += 1
            traffic.bytes_in += num_bytes

    def sent(self, peer: int, kind: int, num_bytes: int) -> None:
        for traffic in (_of(self._peers, peer), _of(self._kinds, kind)):
            traffic.messages_out += 1
            traffic.bytes_out += num_bytes

    def note(self, event: str) -> None:
        """Counts an event; from any thread."""
        with self._lock:
            self._events[event] += 1

    def num_received(self, kinds: Iterable[int]) -> int:
        """Messages of these kinds: what a look at all peers would be too much for."""
        found = (self._kinds.get(kind) for kind in kinds)
        return sum(traffic.messages_in for traffic in found if traffic is not None)

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            events = dict(self._events)
        return {
            "peers": {peer: traffic.to_json() for peer, traffic in sorted(self._peers.copy().items())},
            "kinds": {kind_name(kind): traffic.to_json() for kind, traffic in sorted(self._kinds.copy().items())},
            "events": events,
        }


def _of(table: dict[int, MessageCounts], key: int) -> MessageCounts:
    traffic = table.get(key)
    if traffic is None:
        key = key if len(table) < _MAX_NAMES else -1
        traffic = table.setdefault(key, MessageCounts())
    return traffic
