"""What can go wrong between two processes, told apart by what the caller can do about it."""

from __future__ import annotations


class CommError(RuntimeError):
    """The base of everything that comm raises about another process."""


class WireError(CommError):
    """A message that breaks the format or exceeds the limits; `reason` is one word for counters."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class RemoteError(CommError):
    """The request arrived and its handler raised: `remote_type` and `remote_text` are what it raised."""

    def __init__(self, text: str, *, peer: int, kind: str, remote_type: str, remote_text: str) -> None:
        super().__init__(text)
        self.peer = peer
        self.kind = kind
        self.remote_type = remote_type
        self.remote_text = remote_text


class RemoteValueError(RemoteError, ValueError):
    """The handler raised a ValueError: what was asked is wrong, and asking again will not help."""


class DeadlineExceeded(CommError, TimeoutError):
    """No whole reply within the request's time; the peer may be alive and slow."""


class PeerLost(CommError):
    """Nothing was heard of the peer for so long that it counts as dead; `silent_for` is in seconds."""

    def __init__(self, text: str, *, peer: int, silent_for: float) -> None:
        super().__init__(text)
        self.peer = peer
        self.silent_for = silent_for


class Closed(CommError):
    """This end was closed while the request was outstanding."""
