"""An argument that a class does not know is refused in one line, with the name that was meant.

Loaders that stand in for PyG's and DGL's hand the words they do not use on to torch, which only says that it knows no
such word. And of a required argument under a wrong name Python says that it is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from gnnsys.graph import did_you_mean, some

OF_TORCH = {  # what our own loaders have in the place of torch's words
    "num_workers": "write num_threads",
    "prefetch_factor": "write prefetch, the number of finished batches that may wait",
    "persistent_workers": "threads live on between epochs anyway, leave it away",
    "pin_memory": "write device, and batches go there through pinned memory",
    "generator": "write seed, which everything random follows from",
}
Init = TypeVar("Init", bound=Callable[..., None])


def knows_words(*also: Iterable[str], instead: Mapping[str, str] | None = None) -> Callable[[Init], Init]:
    """Decorates an `__init__`: TypeError for a keyword that is neither a parameter of it nor one of `also`.

    `instead` says of some words what to write.
    """

    def decorate(init: Init) -> Init:
        parameters = list(inspect.signature(init).parameters.values())[1:]
        own = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        known = set(own).union(*also)
        names = sorted(name for name in known if not name.startswith("_"))

        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for word in kwargs:
                if word not in known:
                    raise TypeError(_unknown(type(self).__name__, word, names, instead or {}))
            init(self, *args, **kwargs)

        return cast(Init, checked)

    return decorate


def words_of(function: Callable[..., Any]) -> list[str]:
    """The parameters of a method, but for `self` and those without a name."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def _unknown(name: str, word: str, known: list[str], instead: Mapping[str, str]) -> str:
    if word in instead:
        return f"{name} takes no {word!r}: {instead[word]}"
    return f"{name} takes no {word!r}" + (did_you_mean(word, known) or f", only {some(known, near=word)}")
