"""Names in messages: what there is, shortened to a line, with those that a user may have meant first."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_MOST = 8  # names that a message lists


def listed(names: Iterable[Any], wanted: Any = None) -> str:
    """The names as a list in one line: all of them where they are few, else those closest to `wanted` and how many.

    >>> listed(["x", "y"])
    "['x', 'y']"
    >>> listed([f"f{i}" for i in range(40)], wanted="f7")
    "['f7', 'f37', 'f27', 'f0', 'f1', 'f2', 'f3', 'f4', ... 32 more]"
    """
    known = list(names)
    if len(known) > _MOST:
        near = close_to(wanted, known)
        chosen = (near + [name for name in known if name not in near])[:_MOST]
        return f"[{', '.join(map(repr, chosen))}, ... {len(known) - _MOST} more]"
    return f"[{', '.join(map(repr, known))}]"


def close_to(wanted: Any, names: Iterable[Any]) -> list[Any]:
    """Those of `names` that are spelled nearly like `wanted`, the closest first."""
    by_text = {_text(name): name for name in names}
    return [] if wanted is None else [by_text[text] for text in get_close_matches(_text(wanted), by_text, n=3)]


def did_you_mean(wanted: Any, names: Iterable[Any]) -> str:
    """ ": did you mean 'x'?" where a name is close, else nothing."""
    near = close_to(wanted, names)
    return f": did you mean {near[0]!r}?" if near else ""


def _text(name: Any) -> str:
    return name if isinstance(name, str) else "|".join(map(str, name)) if isinstance(name, tuple) else str(name)
