"""What passed through an endpoint, and how long it took. Counted and read by any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
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

    def add(self, other: MessageCounts) -> None:
        self.messages_in += other.messages_in
        self.bytes_in += other.bytes_in
        self.messages_out += other.messages_out
        self.bytes_out += other.bytes_out

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(slots=True)
class ServiceTimes:
    """Where the time of answered requests went, in microseconds.

    `queued_us`: at the server, before a worker began. `served_us`: from then to the end of the reply. `waited_us`: at
    the client, from the first sending to the last message of the reply; the rest of it is the way there and back.
    """

    replies: int = 0
    queued_us: int = 0
    served_us: int = 0
    waited_us: int = 0

    def add(self, queued_us: int, served_us: int, waited_us: int = 0) -> None:
        self.replies += 1
        self.queued_us += queued_us
        self.served_us += served_us
        self.waited_us += waited_us

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class Tally:
    """Messages and bytes by peer and by kind, times of requests by both, and events (errors, drops) by reason."""

    def __init__(self) -> None:
        self._peers: dict[int, MessageCounts] = {}
        self._kinds: dict[int, MessageCounts] = {}
        self._times: dict[tuple[int, int], ServiceTimes] = {}  # by peer and kind
        self._events: Counter[str] = Counter()
        self._lock = threading.Lock()

    def received(self, peer: int, kind: int, num_bytes: int) -> None:
        with self._lock:
            for traffic in self._both(peer, kind):
                traffic.messages_in += 1
                traffic.bytes_in += num_bytes

    def _both(self, peer: int, kind: int) -> tuple[MessageCounts, MessageCounts]:
        of_peer, of_kind = self._peers.get(peer), self._kinds.get(kind)
        if of_peer is None or of_kind is None:
            return _of(self._peers, peer), _of(self._kinds, kind)
        return of_peer, of_kind

    def sent(self, peer: int, kind: int, num_bytes: int) -> None:
        with self._lock:
            for traffic in self._both(peer, kind):
                traffic.messages_out += 1
                traffic.bytes_out += num_bytes

    def answered(self, peer: int, kind: int, queued_us: int, served_us: int, waited_us: int) -> None:
        """A request of this end has its whole reply."""
        key = (peer, kind)
        with self._lock:
            times = self._times.get(key)
            if times is None:
                times = self._times[key] = ServiceTimes()
            times.add(queued_us, served_us, waited_us)

    def note(self, event: str) -> None:
        """Counts an event; from any thread."""
        with self._lock:
            self._events[event] += 1

    def num_received(self, kinds: Iterable[int]) -> int:
        """Messages of these kinds, without a look at all peers."""
        found = (self._kinds.get(kind) for kind in kinds)
        return sum(traffic.messages_in for traffic in found if traffic is not None)

    def to_json(self) -> dict[str, Any]:
        return {
            "peers": {peer: traffic.to_json() for peer, traffic in sorted(self._peers.copy().items())},
            "kinds": {kind_name(kind): traffic.to_json() for kind, traffic in sorted(self._kinds.copy().items())},
            "times": self._times_by_peer(),
            "events": self.events(),
        }

    def kinds_to_json(self, known: Collection[int]) -> dict[str, dict[str, int]]:
        """Messages and bytes of these kinds; those of all others, which senders make up, are summed as `other`."""
        out: dict[str, dict[str, int]] = {}
        other = MessageCounts()
        for kind, counts in sorted(self._kinds.copy().items()):
            if kind in known:
                out[kind_name(kind)] = counts.to_json()
            else:
                other.add(counts)
        return out | ({"other": other.to_json()} if other.messages_in else {})

    def events(self) -> dict[str, int]:
        with self._lock:
            return dict(self._events)

    def _times_by_peer(self) -> dict[int, dict[str, dict[str, int]]]:
        out: dict[int, dict[str, dict[str, int]]] = {}
        for (peer, kind), times in sorted(self._times.copy().items()):
            out.setdefault(peer, {})[kind_name(kind)] = times.to_json()
        return out


def _of(table: dict[int, MessageCounts], key: int) -> MessageCounts:
    traffic = table.get(key)
    if traffic is None:
        key = key if len(table) < _MAX_NAMES else -1
        traffic = table.setdefault(key, MessageCounts())
    return traffic
