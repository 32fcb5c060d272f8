"""What a user may have meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def did_you_mean(wanted: Any, names: Iterable[Any]) -> str:
    """ ": did you mean 'x'?" where a name is close, else nothing.

    >>> did_you_mean("packge", ["package", "user"])
    ": did you mean 'package'?"
    """
    by_text = {str(name): name for name in names}
    near = get_close_matches(str(wanted), by_text, n=1)
    return f": did you mean {by_text[near[0]]!r}?" if near else ""
