"""What passed through an endpoint, and how long it took. Counted and read by any thread."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gnnsys.comm.kinds import Kind, kind_name

_MAX_NAMES = 4096  # of peers and kinds: senders name themselves, and a stranger must not fill memory with names


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


@dataclass(slots=True)
class _Traffic:
    """All that is counted of one kind with one peer."""

    counts: MessageCounts = field(default_factory=MessageCounts)
    times: ServiceTimes = field(default_factory=ServiceTimes)


# By whom, of which kind; messages and bytes that are not counted yet; queued_us, served_us; seconds waited.
_Answer = tuple[int, int, int, int, int, int, float]


class Tally:
    """Messages and bytes by peer and by kind, times of requests by both, and events (errors, drops) by reason."""

    def __init__(self) -> None:
        self._traffic: dict[tuple[int, int], _Traffic] = {}  # by peer and kind
        self._received = dict.fromkeys((int(kind) for kind in Kind), 0)  # messages, whoever has sent them
        self._answers: deque[_Answer] = deque()
        self._events: Counter[str] = Counter()
        self._lock = threading.Lock()

    def received(self, peer: int, kind: int, num_bytes: int) -> None:
        with self._lock:
            counts = (self._traffic.get((peer, kind)) or self._new(peer, kind)).counts
            counts.messages_in += 1
            counts.bytes_in += num_bytes
            if kind in self._received:
                self._received[kind] += 1

    def sent(self, peer: int, kind: int, num_bytes: int) -> None:
        with self._lock:
            counts = (self._traffic.get((peer, kind)) or self._new(peer, kind)).counts
            counts.messages_out += 1
            counts.bytes_out += num_bytes
            if self._answers:
                self._count_answers()

    def answered(self, answer: _Answer) -> None:
        """A request of this end has its whole reply. Counted when the next is sent: whoever says it waits for rows."""
        self._answers.append(answer)

    def _count_answers(self) -> None:
        """Call with the lock."""
        while self._answers:
            peer, kind, num_messages, num_bytes, queued_us, served_us, seconds = self._answers.popleft()
            traffic = self._traffic.get((peer, kind)) or self._new(peer, kind)
            traffic.counts.messages_in += num_messages
            traffic.counts.bytes_in += num_bytes
            traffic.times.add(queued_us, served_us, int(seconds * 1e6))

    def _new(self, peer: int, kind: int) -> _Traffic:
        key = (peer, kind) if len(self._traffic) < _MAX_NAMES else (-1, -1)
        return self._traffic.setdefault(key, _Traffic())

    def note(self, event: str) -> None:
        """Counts an event; from any thread."""
        with self._lock:
            self._events[event] += 1

    def num_received(self, kinds: Iterable[int]) -> int:
        """Messages of these kinds that came by themselves, replies to this end's requests not among them."""
        with self._lock:
            return sum(self._received.get(kind, 0) for kind in kinds)

    def to_json(self) -> dict[str, Any]:
        peers, kinds = self._counts_by(0), self._counts_by(1)
        return {
            "peers": {peer: counts.to_json() for peer, counts in sorted(peers.items())},
            "kinds": {kind_name(kind): counts.to_json() for kind, counts in sorted(kinds.items())},
            "times": self._times_by_peer(),
            "events": self.events(),
        }

    def kinds_to_json(self, known: Collection[int]) -> dict[str, dict[str, int]]:
        """Messages and bytes of these kinds; those of all others, which senders make up, are summed as `other`."""
        out: dict[str, dict[str, int]] = {}
        other = MessageCounts()
        for kind, counts in sorted(self._counts_by(1).items()):
            if kind in known:
                out[kind_name(kind)] = counts.to_json()
            else:
                other.add(counts)
        return out | ({"other": other.to_json()} if other.messages_in else {})

    def events(self) -> dict[str, int]:
        with self._lock:
            return dict(self._events)

    def _all(self) -> list[tuple[tuple[int, int], _Traffic]]:
        with self._lock:
            self._count_answers()
            return sorted(self._traffic.items(), key=lambda entry: entry[0])

    def _counts_by(self, place: int) -> dict[int, MessageCounts]:
        """By peer (0) or by kind (1)."""
        found: dict[int, MessageCounts] = {}
        for key, traffic in self._all():
            found.setdefault(key[place], MessageCounts()).add(traffic.counts)
        return found

    def _times_by_peer(self) -> dict[int, dict[str, dict[str, int]]]:
        out: dict[int, dict[str, dict[str, int]]] = {}
        for (peer, kind), traffic in self._all():
            if traffic.times.replies:
                out.setdefault(peer, {})[kind_name(kind)] = traffic.times.to_json()
        return out
