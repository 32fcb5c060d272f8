"""Lists in errors: a graph may have hundreds of types, and an error is one line."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MANY = 8  # names an error can show in one line


def some(names: Iterable[Any], *, near: Any = None, most: int = MANY) -> str:
    """The names as a list would print them, or the first few and how many more there are.

    Where some are left out, those that look like `near`, which was asked for, come first.

    >>> some(["user", "item"])
    "['user', 'item']"
    >>> some(range(30), most=3)
    '[0, 1, 2, and 27 more]'
    """
    listed = [repr(name) for name in names]
    shown = listed[:most]
    if len(listed) > most:
        if near is not None:
            close = get_close_matches(repr(near), listed, n=3)
            shown = [*close, *(name for name in listed if name not in close)][:most]
        shown.append(f"and {len(listed) - most} more")
    return f"[{', '.join(shown)}]"
