"""Settings of a suite from the command line: `--set rates=1gbit,100mbit --set cpu=0.9`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

S = TypeVar("S")


def from_texts(cls: type[S], texts: Mapping[str, str], base: Mapping[str, Any]) -> S:
    """A dataclass whose fields are numbers, texts or tuples of them: `base`, overridden by the parsed `texts`."""
    kinds = get_type_hints(cls)
    for name in texts:
        if name not in kinds:
            names = ", ".join(field.name for field in fields(cls))  # type: ignore[arg-type]
            raise ValueError(f"there is no setting {name!r}, only {names}")
    return cls(**{**base, **{name: _parse(name, text, kinds[name]) for name, text in texts.items()}})


def _parse(name: str, text: str, kind: Any) -> Any:
    pieces = text.split(",")
    try:
        if kind in (int, float, str):
            return kind(text)
        return tuple(map(int if kind == tuple[int, ...] else str, pieces))
    except ValueError:
        raise ValueError(f"setting {name}={text!r} is not what it should be: {kind}") from None
