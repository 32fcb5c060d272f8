"""The elbow of a curve of validation scores, found while the curve grows: behind it there is little more to gain.

The curve is drawn into a unit square, from its first point to the best one so far. Its elbow is the point that is
furthest above the chord between the two. A straight line is nowhere above it; of 1 - exp(-t / tau) the elbow is a third
of the square above it at t = 3 tau, with 95% of the gain behind. Only the shape counts, not the scale.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate

HEIGHT = 1 / 3  # above the chord
SETTLED = 5  # scores behind the elbow that have seen no other


def elbow_of(scores: Sequence[float]) -> int | None:
    """The number of the score where the curve bends; None while it does not. Scores are finite, and more is better.

    What does not rise at all, flat or falling, bends at its first score. One score that is far from its neighbours,
    either way, is passed over.

    >>> elbow_of([0.1, 0.5, 0.75, 0.8, 0.81, 0.82, 0.82, 0.83])
    2
    >>> elbow_of([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]) is None
    True
    """
    last = len(scores) - 1
    if last < SETTLED:
        return None
    curve = list(accumulate(_without_outliers(scores), max))
    gain = curve[-1] - curve[0]
    heights = [((at - curve[0]) / gain if gain > 0 else 1.0) - i / last for i, at in enumerate(curve)]
    elbow = max(range(len(heights)), key=lambda i: heights[i])
    return elbow if heights[elbow] >= HEIGHT and last - elbow >= SETTLED else None


def _without_outliers(scores: Sequence[float]) -> list[float]:
    """Each the median of itself and its neighbours; the first one no higher than that behind it: luck is no gain.

    The last one stays: where it is too high the elbow is only found later.
    """
    inner = [statistics.median(scores[i - 1 : i + 2]) for i in range(1, len(scores) - 1)]
    return [min(scores[0], inner[0]), *inner, scores[-1]]
