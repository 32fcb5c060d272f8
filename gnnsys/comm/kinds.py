"""What a message asks for: one list for all rooms, because the number is on the wire.

Every number has a handler. Numbers are grouped by the room that serves them and never change their meaning; a new one
is appended to its group.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What a request asks for; its reply carries the same kind."""

    PING = 1
    STATUS = 2
    STOP = 3
    OPEN = 4
    SEAL = 5
    RAISE = 6

    PULL = 16
    PUSH = 17
    CREATE = 18
    DROP = 19
    SAVE = 20
    STEP = 21
    DESCRIBE = 22

    PREPARE = 32
    SAMPLE = 33
    FIND_EDGES = 34
    EDGE_ENDS = 35
    SELECT = 36
    VISITS = 37
    INDUCED = 38
    GUIDE = 39
    SHARES = 40

    LOADER = 48
    BATCH = 49


CONTROL = "control"
BULK = "bulk"

_CONTROL_KINDS = frozenset(
    (
        Kind.PING,
        Kind.STATUS,
        Kind.STOP,
        Kind.OPEN,
        Kind.SEAL,
        Kind.RAISE,
        Kind.CREATE,
        Kind.DROP,
        Kind.SAVE,
        Kind.DESCRIBE,
        Kind.PREPARE,
        Kind.GUIDE,
        Kind.LOADER,
    )
)


def traffic_class(kind: int) -> str:
    """The connection a kind travels on: heartbeats and orders never wait behind rows."""
    return CONTROL if kind in _CONTROL_KINDS else BULK


# What changes nothing at the peer, so that it does not matter which of two comes first.
_SPREAD_KINDS = frozenset(
    (
        Kind.PULL, Kind.SAMPLE, Kind.FIND_EDGES, Kind.EDGE_ENDS, Kind.SELECT, Kind.VISITS, Kind.INDUCED, Kind.SHARES,
        Kind.BATCH,
    )
)  # fmt: skip


# What batches are made of before their rows are known. Replies are short, and the next hop waits for them.
_STRUCTURE_KINDS = _SPREAD_KINDS - {Kind.PULL, Kind.BATCH}


def is_structure(kind: int) -> bool:
    """Whether a reply is structure: it must not wait behind rows."""
    return kind in _STRUCTURE_KINDS


def is_spread(kind: int) -> bool:
    """Whether requests of a kind may travel on several connections to a peer at once, and so overtake each other."""
    return kind in _SPREAD_KINDS


# What changes rows. Order matters, replies are a few bytes, and a step's reply holds up the rank that waits for it.
_CHANGE_KINDS = frozenset((Kind.PUSH, Kind.STEP))


def is_change(kind: int) -> bool:
    """Whether a request changes rows. Such requests keep their order and never queue behind rows being read."""
    return kind in _CHANGE_KINDS


def kind_name(kind: int) -> str:
    """For messages to people and for counters: `PULL`, or the bare number where it is nobody's."""
    try:
        return Kind(kind).name
    except ValueError:
        return str(kind)
