"""What each client holds at a server: unanswered requests and their bytes.

A client here is a connection, or several whose names begin alike: its lanes. One that holds too much is refused (BUSY);
the others are not held up. Replies that are not sent yet are held back by `Egress`.
"""

from __future__ import annotations

from gnnsys.comm.wire import Limits

CLIENT_NAME_BYTES = 14  # of a connection's name say whose it is; those behind them tell the client's lanes apart


def client_of(identity: bytes) -> bytes:
    """The client that a connection belongs to. Names of strangers may be shorter, and are their own clients."""
    return identity[:CLIENT_NAME_BYTES]


def peer_of(identity: bytes) -> bytes:
    """The same without the traffic class: what says how much it can take speaks for all of a client's connections."""
    return identity[: CLIENT_NAME_BYTES - 1]


class ClientQuota:
    """What one client holds."""

    __slots__ = ("bytes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0


class ClientQuotas:
    """What every client holds, by its name (`client_of`). Not locked: the server holds its lock around every call."""

    def __init__(self, limits: Limits) -> None:
        self.bytes = 0
        self._joint_bytes = 0  # of them
        self._limits = limits
        self._quotas: dict[bytes, ClientQuota] = {}

    def of(self, client: bytes) -> ClientQuota:
        quota = self._quotas.get(client)
        if quota is None:
            quota = self._quotas[client] = ClientQuota()
        return quota

    def enter(self, quota: ClientQuota, num_bytes: int, *, is_joint: bool = False) -> str | None:
        """Counts a request; the reason to refuse it, or None. Either way `leave` must be called for it.

        A request is admitted while what is held is below the limit, so one that is larger than the limit is admitted
        alone. Requests that are answered once all ranks have sent theirs (`is_joint`) do not count towards the limit
        over all clients: refusing one would hold up all ranks.
        """
        limits, held, of_all = self._limits, quota.bytes, self.bytes - self._joint_bytes
        quota.requests += 1
        quota.bytes += num_bytes
        self.bytes += num_bytes
        self._joint_bytes += num_bytes if is_joint else 0
        if quota.requests > limits.max_client_requests:
            return f"{limits.max_client_requests} requests of this client are unanswered already"
        if held >= limits.max_client_bytes:
            return f"requests of this client with {held} bytes are unanswered already"
        if not is_joint and of_all >= limits.max_bytes:
            return f"requests with {of_all} bytes are unanswered already"
        return None

    def has_room(self, client: bytes) -> bool:
        """Whether `enter` would admit a small request of a client now."""
        limits, quota = self._limits, self._quotas.get(client)
        if self.bytes - self._joint_bytes >= limits.max_bytes:
            return False
        return quota is None or (quota.requests < limits.max_client_requests and quota.bytes < limits.max_client_bytes)

    def leave(self, client: bytes, num_bytes: int, *, is_joint: bool = False) -> None:
        """A request has been answered."""
        quota = self._quotas[client]
        quota.requests -= 1
        quota.bytes -= num_bytes
        self.bytes -= num_bytes
        self._joint_bytes -= num_bytes if is_joint else 0
        if not quota.requests:
            del self._quotas[client]

    def __len__(self) -> int:
        return len(self._quotas)
