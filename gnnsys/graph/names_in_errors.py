"""Names in error messages: a list that fits one line, and the name that a user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MANY = 8  # names an error can show in one line


def some(names: Iterable[Any], *, near: Any = None, most: int = MANY) -> str:
    """The names as a list would print them, or the first few and how many more there are: a graph may have hundreds.

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


def in_words(names: Iterable[Any], *, most: int = MANY) -> str:
    """The names with commas, as a person writes them: for people who have not written a line of Python.

    >>> in_words(["h1", "h2"]), in_words([])
    ('h1, h2', 'none')
    >>> in_words(range(30), most=3)
    '0, 1, 2 and 27 more'
    """
    listed = [str(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more if listed else "none"


def did_you_mean(wanted: Any, names: Iterable[Any]) -> str:
    """ ": did you mean 'x'?" where a name is close, else nothing.

    >>> did_you_mean("packge", ["package", "user"])
    ": did you mean 'package'?"
    """
    by_text = {str(name): name for name in names}
    near = get_close_matches(str(wanted), by_text, n=1)
    return f": did you mean {by_text[near[0]]!r}?" if near else ""
