"""What can go wrong between two processes, told apart by what the caller can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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


class ShardLost(PeerLost):
    """A machine's shard is dead, or came back without the tables that were made there: `rank` is who says so."""

    def __init__(self, text: str, *, machine: int, rank: int = -1, silent_for: float = 0.0) -> None:
        super().__init__(text, peer=machine, silent_for=silent_for)
        self.machine = machine
        self.rank = rank

    def to_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "silent_for": self.silent_for}


class TrainerLost(CommError):
    """A rank that others wait for was not heard of for so long that it counts as dead."""

    def __init__(self, text: str, *, rank: int, silent_for: float) -> None:
        super().__init__(text)
        self.rank = rank
        self.silent_for = silent_for

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "silent_for": self.silent_for}


class Closed(CommError):
    """This end was closed while the request was outstanding."""


def error_from_reply(name: str, text: str, facts: Mapping[str, Any], *, rank: int) -> CommError | None:
    """The error that a server raised by that name and that keeps its type here, told by `rank`; None for others."""
    try:
        if name == ShardLost.__name__:
            return ShardLost(text, machine=int(facts["machine"]), rank=rank, silent_for=float(facts["silent_for"]))
        if name == TrainerLost.__name__:
            return TrainerLost(text, rank=int(facts["rank"]), silent_for=float(facts["silent_for"]))
    except (KeyError, TypeError, ValueError):
        pass  # not told as it should be: it stays what the peer raised
    return None
