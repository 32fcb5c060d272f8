"""Sizes to measure at: spread evenly on a logarithmic scale over what batches have, the same ones on every machine.

Points of a Halton sequence fill a box evenly however few they are. A first coordinate of rows, a second of widths.
"""

from __future__ import annotations

_PRIMES = (2, 3, 5, 7)


def halton(index: int, dimension: int) -> float:
    """Coordinate `dimension` of point `index`, in (0, 1).

    >>> [halton(index, 0) for index in range(3)]
    [0.5, 0.25, 0.75]
    """
    base, value, share = _PRIMES[dimension], 0.0, 1.0
    rest = index + 1
    while rest:
        share /= base
        value += share * (rest % base)
        rest //= base
    return value


def spread(index: int, dimension: int, low: float, high: float) -> float:
    """The same between two positive bounds, evenly by ratio."""
    return low * (high / low) ** halton(index, dimension)


def width_at(index: int, dimension: int, low: int = 16, high: int = 1024) -> int:
    """A number of features, a multiple of four."""
    return max(4, 4 * round(spread(index, dimension, low, high) / 4))


# Features and hidden rows as graphs and models have them, measured by themselves. Rows of every other one are no whole
# lines of memory, which counts for as much as their size.
WIDTHS = (16, 36, 32, 100, 64, 172, 128, 300, 256, 500, 1024, 602)


def listed_width(number: int) -> int:
    """The widths of `WIDTHS` in turn, not in order, so that small and large counts of rows meet each."""
    return WIDTHS[5 * number % len(WIDTHS)]
