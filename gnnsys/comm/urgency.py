"""How urgent a message is: one int32, the smaller the sooner. Pure functions.

Hermod orders traffic strictly by micro-batch, type and layer (chapter 5, Tables 5.3 and 5.4: MID, CType, LID). In place
of the micro-batch stands `need`: whether a thread waits for the reply now (WAITED), or will need it later (AHEAD). If a
thread begins to wait for a batch, the client asks servers to send its remaining replies earlier (`Kind.RAISE`). How far
ahead a batch is does not count: that number becomes wrong when its consumer takes the next batch, and one loader asks
for its batches in their order anyway. A user's priority is compared before all of these.
"""

from __future__ import annotations

from functools import lru_cache

from gnnsys.comm.kinds import Kind, is_structure

WAITED, AHEAD = 0, 1
CLASSES = ("waited", "ahead", "background")
LEVELS = 4
_NEED_BITS, _TYPE_BITS, _LAYER_BITS = 12, 4, 4
USER_BITS = _NEED_BITS + _TYPE_BITS + _LAYER_BITS
MOST_USER = (1 << (31 - USER_BITS)) - 1  # of the numbers that users may give: from -MOST_USER - 1 on
BACKGROUND = 1  # the user's priority of traffic that no thread will wait for
PRIORITIES = {"background": BACKGROUND}  # names that users may give in place of a number

# Types, the most urgent first: steps and pushes; rows that a thread waits for; samples, before the rows they lead to;
# other rows; all else.
CHANGES, LOOK_UPS, STRUCTURE, ROWS, OTHERS = range(5)
_TYPES = {Kind.STEP: CHANGES, Kind.PUSH: CHANGES, Kind.PULL: ROWS, Kind.BATCH: ROWS}
_BACKGROUND_KINDS = frozenset((Kind.GUIDE, Kind.SAVE))


def urgency(need: int, type: int, layer: int = 0) -> int:
    """The number in a header for (MID, type, LID): MID before type before LID, each up to its greatest value.

    >>> urgency(WAITED, ROWS) < urgency(AHEAD, STRUCTURE) < urgency(AHEAD, ROWS, 0) < urgency(AHEAD, ROWS, 1)
    True
    """
    need, type, layer = (
        min(max(0, value), (1 << bits) - 1)
        for value, bits in ((need, _NEED_BITS), (type, _TYPE_BITS), (layer, _LAYER_BITS))
    )
    return (need << _TYPE_BITS | type) << _LAYER_BITS | layer


@lru_cache(maxsize=4096, typed=True)  # a few kinds, steps and layers
def of_request(kind: int, need: int, layer: int = -1, asked: int | None = None) -> int:
    """The urgency of a request. `asked`: the user's priority, compared before need, type and layer.

    >>> of_request(Kind.PULL, AHEAD) < of_request(Kind.PULL, WAITED, asked=1)
    True
    """
    asked = user_priority(asked)
    if asked is None:
        asked = BACKGROUND if kind in _BACKGROUND_KINDS else 0
    return (asked << USER_BITS) + urgency(need, type_of(kind, need), layer)


def type_of(kind: int, need: int) -> int:
    """The type of a request. Rows that a thread waits for are look-ups."""
    if kind == Kind.PULL and need == WAITED:
        return LOOK_UPS
    return STRUCTURE if is_structure(kind) else _TYPES.get(kind, OTHERS)  # type: ignore[call-overload]


def raised(priority: int) -> int:
    """The number of the same request once a thread waits for it: only its need changes."""
    own = priority & ((1 << USER_BITS) - 1)
    return priority - own + (own & ((1 << (_TYPE_BITS + _LAYER_BITS)) - 1))


def need_of(priority: int) -> int:
    """WAITED or AHEAD, of a number in a header."""
    return (priority & ((1 << USER_BITS) - 1)) >> (_TYPE_BITS + _LAYER_BITS)


def user_of(priority: int) -> int:
    """The user's number in a number in a header."""
    return priority >> USER_BITS


def class_of(priority: int) -> int:
    """Which of CLASSES a number in a header is of."""
    return 2 if user_of(priority) > 0 else min(need_of(priority), AHEAD)


def level_of(priority: int) -> int:
    """One of LEVELS, which never falls as `priority` rises: a user's negative numbers, waited, ahead, a user's positive
    numbers."""
    user = user_of(priority)
    return 0 if user < 0 else LEVELS - 1 if user > 0 else 1 + min(need_of(priority), AHEAD)


def user_priority(given: int | str | None) -> int | None:
    """The number that a user's priority stands for; ValueError for any other."""
    if isinstance(given, str):
        if given not in PRIORITIES:
            raise ValueError(f"priority must be a whole number or one of {sorted(PRIORITIES)}, got {given!r}")
        return PRIORITIES[given]
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not -MOST_USER - 1 <= given <= MOST_USER:
        raise ValueError(
            f"priority must be a whole number from {-MOST_USER - 1} to {MOST_USER}, or one of {sorted(PRIORITIES)}, "
            f"got {given!r}"
        )
    return given
