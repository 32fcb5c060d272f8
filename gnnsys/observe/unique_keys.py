"""Files of JSON that people write, read without guessing."""

from __future__ import annotations

from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: a key that is there twice is a mistake, not the last of both."""
    for number, (key, _) in enumerate(pairs):
        if any(key == other for other, _ in pairs[:number]):
            raise ValueError(f"{key!r} is there twice")
    return dict(pairs)
