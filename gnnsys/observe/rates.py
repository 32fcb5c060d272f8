"""Rates of links as people write and read them: "10gbit", "250mbit", "30MB/s", or a number of bytes per second."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}  # of ten: so networks count
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(bit|b|B)(?:ps|/s)?)?\s*", re.IGNORECASE)
UNLIMITED = "unlimited"


def bytes_per_second(rate: str | float) -> float:
    """Bytes per second of a rate as it is written; infinity for "unlimited".

    A number is bytes per second already. `bit` are bits, `B` are bytes; units are powers of ten.

    >>> bytes_per_second("10gbit")
    1250000000.0
    >>> bytes_per_second("30MB/s")
    30000000.0
    """
    if isinstance(rate, str) and rate.strip().lower() == UNLIMITED:
        return math.inf
    found = None if isinstance(rate, bool) else _number(rate)
    if found is None or math.isnan(found):
        raise ValueError(f"a rate looks like 10gbit, 250mbit, 30MB/s or {UNLIMITED}, got {rate!r}")
    if found <= 0:
        raise ValueError(f"a rate must be more than 0, got {rate!r}; a link without a limit is {UNLIMITED}")
    return found


def format_rate(rate: float) -> str:
    """Text that `bytes_per_second` reads as the same number: in bits where that is exact.

    >>> format_rate(31250000.0)
    '250mbit'
    """
    if math.isinf(rate):
        return UNLIMITED
    bits = rate * 8
    for unit, size in (("g", 1e9), ("m", 1e6), ("k", 1e3), ("", 1.0)):
        if bits >= size:
            text = f"{bits / size:.9g}{unit}bit"
            return text if "e" not in text and bytes_per_second(text) == rate else f"{rate!r}B/s"
    return f"{rate!r}B/s"


def _number(rate: object) -> float | None:
    if isinstance(rate, int | float):
        return float(rate)
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is None or match[3] == "b":  # 10gb: bits or bytes?
        return None
    size = float(match[1]) * _UNITS[(match[2] or "").lower()]
    return size / 8 if (match[3] or "").lower() == "bit" else size
