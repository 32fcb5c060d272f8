"""Lists in errors: a graph may have hundreds of types, and an error is one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MANY = 8  # names an error can show in one line


def some(names: Iterable[Any], most: int = MANY) -> str:
    """The names as a list would print them, or the first few and how many more there are.

    >>> some(["user", "item"])
    "['user', 'item']"
    >>> some(range(30), 3)
    '[0, 1, 2, and 27 more]'
    """
    listed = list(names)
    shown = [repr(name) for name in listed[:most]]
    if len(listed) > most:
        shown.append(f"and {len(listed) - most} more")
    return f"[{', '.join(shown)}]"
