"""Least squares whose coefficients are never negative, by the active sets of Lawson and Hanson (1974, chapter 23).

A second has no negative part: neither bytes nor edges give time back. Fits are small (a dozen points, a few terms), so
numpy is all that is needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_TOLERANCE = 1e-12
_MOST_STEPS = 30  # per column, as scipy's


def nonnegative_least_squares(matrix: Array, target: Array, like: Array | None = None) -> Array:
    """The x >= 0 that minimises |matrix @ x - target|. `like` is the x of a problem that is much the same, if there is
    one: the search begins where that is above zero.

    >>> nonnegative_least_squares(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0])).tolist()
    [2.0, 0.0]
    """
    scale = np.sqrt((matrix**2).sum(axis=0))  # columns have very different units: bytes beside calls
    scale[scale == 0] = 1.0
    columns = matrix / scale
    passive = np.ones(columns.shape[1], dtype=bool) if like is None else like > 0
    solution = np.zeros(columns.shape[1])
    solution[passive] = np.linalg.lstsq(columns[:, passive], target, rcond=None)[0]
    if (solution[passive] <= 0).any():
        solution[:], passive[:] = 0.0, False
    least = _TOLERANCE * max(1.0, float(np.abs(columns.T @ target).max(initial=0.0)))
    for _ in range(_MOST_STEPS * columns.shape[1]):
        gradient = np.where(passive, -np.inf, columns.T @ (target - columns @ solution))
        if gradient.max(initial=-np.inf) <= least:
            break
        passive[int(gradient.argmax())] = True
        solution = _within(columns, target, passive, solution)
    return solution / scale


def _within(columns: Array, target: Array, passive: npt.NDArray[np.bool_], solution: Array) -> Array:
    """Least squares over the passive columns; those that would turn negative leave at zero, one after the other."""
    while True:
        trial = np.zeros_like(solution)
        trial[passive] = np.linalg.lstsq(columns[:, passive], target, rcond=None)[0]
        negative = passive & (trial <= 0)
        if not negative.any():
            return trial
        moves = solution[negative] - trial[negative]
        step = float(np.min(np.divide(solution[negative], moves, out=np.zeros_like(moves), where=moves > 0)))
        solution = solution + step * (trial - solution)
        passive &= solution > _TOLERANCE
        solution[~passive] = 0.0
        if not passive.any():
            return solution
