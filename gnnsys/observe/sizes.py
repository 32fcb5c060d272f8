"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes from "4G", "512MiB" or "1.5g": powers of 1024.

    >>> parse_size("4G")
    4294967296
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"a size must look like 4G, 512M or 1000000, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size: float) -> str:
    """ "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
