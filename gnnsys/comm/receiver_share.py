"""The receiver's half of a paced reply: what a client can take of each peer, its rate in divided by its active flows.

Every request for rows or structure carries the share of its peer. When peers begin or cease to send, those that still
send are told their new share by a heartbeat on the control connection, which never waits behind rows: not at once, as
requests to many peers are made one after the other, and not for a small difference. Later heartbeats say it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping

from gnnsys.comm.kinds import is_spread
from gnnsys.comm.peer_link import Link

_SETTLE_SECONDS = 0.002  # in which further peers may begin to send
_AGAIN_SECONDS = 0.01  # between two such rounds
_RECENT_SECONDS = 0.1  # in which as many peers as before are expected to send again
_MOST_SHARE = 2.0**62  # bytes per second, which a header can say
_WORTH = 1.25  # a share is told again where it is so many times as large or as small


class ReceiverShare:
    """`tell(link, share)` sends a heartbeat. `rate` is bytes per second of all replies, None where they are not paced.

    `next_at` is when the client's thread calls `tell_all`. Requests are counted where they are: a peer sends while
    something that it is asked to send is outstanding.
    """

    def __init__(self, links: Mapping[int, Link], tell: Callable[[Link, int], None], wake: Callable[[], None]) -> None:
        self.rate: float | None = None
        self.next_at = math.inf
        self._links, self._tell, self._wake = links, tell, wake
        self._without: frozenset[int] = frozenset()
        self._told_flows = 0  # how many there were when shares were told
        self._told_at = self._seen_at = -math.inf  # when they were told, and when there were as many again

    def set_rate(self, rate: float | None, without: Collection[int] = ()) -> None:
        """`without`: peers whose replies come over no link, those of this machine. What is under way stays as it is."""
        if rate is not None and not rate > 0:
            raise ValueError(f"rate_in is {rate}; it must be a positive number of bytes per second, or None")
        self._without = frozenset(without)
        self.rate = rate
        self.next_at = math.inf

    def of_request(self, peer: int, kind: int) -> int:
        """The share that a request to a peer carries, which counts as sending from now on; 0: it is not paced.

        The first of many requests that are made together expects the others, where there were as many a moment ago.
        """
        rate = self.rate
        if rate is None or not is_spread(kind) or peer in self._without or peer not in self._links:
            return 0
        num_flows = 1 + sum(link.peer != peer for link in self._sending())
        if time.monotonic() - self._seen_at < _RECENT_SECONDS:
            num_flows = max(num_flows, self._told_flows)
        share = self._links[peer].told_share = max(1, int(min(rate / num_flows, _MOST_SHARE)))
        return share

    def of_ping(self, link: Link) -> int:
        """What every heartbeat says again while its peer sends: one that told a share may have been lost, or have come
        before the request that it was about."""
        return link.told_share if self.rate is not None and link.peer not in self._without and link.is_sending() else 0

    def note_change(self, now: float) -> None:
        """A request was made, or answered."""
        if self.rate is None:
            return
        num_flows = len(self._sending())
        if num_flows == self._told_flows:
            self._seen_at = now
        if num_flows in (0, self._told_flows):
            return
        at = max(now + _SETTLE_SECONDS, self._told_at + _AGAIN_SECONDS)
        if at < self.next_at:
            self.next_at = at
            self._wake()

    def tell_all(self, now: float) -> None:
        """Tells peers that send what their share is now, where it is another than they know."""
        self.next_at = math.inf
        rate, sending = self.rate, self._sending()
        if rate is None or not sending:
            return
        self._told_at = self._seen_at = now
        self._told_flows = len(sending)
        share = max(1, int(rate / len(sending)))
        for link in sending:
            known = link.told_share
            if known and not known / _WORTH < share < known * _WORTH:
                link.told_share = share
                self._tell(link, share)

    def _sending(self) -> list[Link]:
        return [link for peer, link in self._links.items() if peer not in self._without and link.is_sending()]
