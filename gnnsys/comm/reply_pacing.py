"""Replies at a rate: a token bucket for each client that is paced (`gnnsys.open(pace=...)`).

OES's rate of a flow (Eq. 19-20) is the least over its two machines of link rate / active flows in that direction. The
receiver says its half in every request (`Header.share`); the server knows the other half. A flow here is all that a
server answers to one client. It is active while a reply of it waits, or while what was sent takes time at its rate:
while the bucket is in debt. A share that is absurdly small is served at LEAST_RATE: it slows down only the rank that
sent it.
"""

from __future__ import annotations

import math

LEAST_RATE = 1 << 16  # bytes per second; also where link rate / flows is less
LINK_PAYLOAD = 0.94  # of a link's bytes: headers of Ethernet, IP and TCP take 90 of every 1538
TURN_SECONDS = 0.02  # after which a job that was let go and sent nothing is taken for gone
_BURST_SECONDS = 0.025  # of its rate that a flow may have saved up: timers are late, and small replies need not wait


class TokenBucket:
    """The bucket of one peer. `tokens` are bytes that may be sent now; below zero, the flow is in debt."""

    __slots__ = ("_at", "is_awaited", "is_counted", "rate", "share", "tokens", "turn_until")

    def __init__(self, share: float, now: float) -> None:
        self.share = share
        self.rate = max(share, LEAST_RATE)
        self.tokens = 0.0
        self.is_counted = False  # among the server's active flows
        self.is_awaited = False  # jobs wait for it
        self.turn_until = 0.0  # a job was let go and may send until then
        self._at = now

    def settle(self, now: float) -> None:
        """Adds the tokens of the time since the last call."""
        self.tokens = min(self.rate * _BURST_SECONDS, self.tokens + self.rate * (now - self._at))
        self._at = now

    @property
    def is_in_debt(self) -> bool:
        return self.tokens <= -1.0  # a whole byte

    @property
    def is_active(self) -> bool:
        return self.is_in_debt or self.is_awaited

    def wait(self, now: float) -> float:
        """Seconds until a job may go on."""
        return max(-self.tokens / self.rate, self.turn_until - now, 0.0)


class TokenBuckets:
    """The buckets of all paced flows out of a server. Not locked: `Egress` holds its lock around every call."""

    def __init__(self) -> None:
        self._rate_out = math.inf
        self._active: dict[TokenBucket, None] = {}

    def __len__(self) -> int:
        """How many flows are active."""
        return len(self._active)

    def set_rate_out(self, rate: float, now: float) -> None:
        self.advance(now)
        self._rate_out = rate
        self._share_out()

    def set_share(self, bucket: TokenBucket, share: float, now: float) -> None:
        self.settle(bucket, now)
        bucket.share = share
        self._share_out()

    def advance(self, now: float) -> None:
        """Adds tokens to all active flows; those that are done have none of the server's rate from now on."""
        for bucket in self._active:
            bucket.settle(now)
        done = [bucket for bucket in self._active if not bucket.is_active and now >= bucket.turn_until]
        for bucket in done:
            del self._active[bucket]
            bucket.is_counted = False
        if done:
            self._share_out()

    def settle(self, bucket: TokenBucket, now: float) -> None:
        """Brings a flow, active or not, and all that are active up to date."""
        self.advance(now)
        if not bucket.is_counted:
            bucket.rate = self.rate_of(bucket)
            bucket.settle(now)

    def activate(self, bucket: TokenBucket) -> None:
        """The flow counts, if it has a reason to."""
        if bucket.is_active and not bucket.is_counted:
            self._active[bucket] = None
            bucket.is_counted = True
            self._share_out()

    def charge(self, bucket: TokenBucket, num_bytes: int, now: float) -> None:
        """So many bytes were sent."""
        self.settle(bucket, now)
        bucket.tokens -= num_bytes
        bucket.turn_until = 0.0
        self.activate(bucket)

    def forget(self, bucket: TokenBucket) -> None:
        if self._active.pop(bucket, bucket) is None:
            self._share_out()

    def rate_of(self, bucket: TokenBucket) -> float:
        """Bytes per second that the flow has, or would have if it became active."""
        num_active = len(self._active) + (not bucket.is_counted)
        return max(LEAST_RATE, min(bucket.share, self._rate_out / num_active))

    def _share_out(self) -> None:
        for bucket in self._active:
            bucket.rate = self.rate_of(bucket)
