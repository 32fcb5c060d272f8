"""The cost models of DAHA (PVLDB 17(6), 2024) as written, to stand beside ours: Eq. 2 for work, Eq. 4 for transfers.

Both are plain least squares on absolute errors. Eq. 2 has ten coefficients, and the paper fits it to ten points: that
is interpolation, and between or beyond the points it may say anything, negative seconds too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from gnnsys.planning.costs.nonnegative import Array

_CUBIC = 3
_TRANSFER_DEGREE = 2  # the paper names none: bytes are n * f_n + m * f_m and some per edge, so two is the least


@dataclass(frozen=True)
class CubicCost:
    """Eq. 2: all products of n (nodes) and m (edges) up to the third degree. It knows no widths: one fit for each."""

    coefficients: tuple[float, ...]

    @classmethod
    def fit(cls, nodes: Sequence[float], edges: Sequence[float], seconds: Sequence[float]) -> CubicCost:
        return cls(_least_squares([nodes, edges], _CUBIC, seconds))

    def seconds(self, nodes: float, edges: float) -> float:
        """May be negative."""
        return _evaluate(self.coefficients, [nodes, edges], _CUBIC)


@dataclass(frozen=True)
class TransferCost:
    """Eq. 4: `first` / N, where `first` is what the first transfer of a process costs and N the number of batches, and
    a polynomial of nodes, edges and the widths of their features."""

    first: float
    coefficients: tuple[float, ...]

    @classmethod
    def fit(
        cls,
        first: float,
        nodes: Sequence[float],
        edges: Sequence[float],
        node_width: Sequence[float],
        edge_width: Sequence[float],
        seconds: Sequence[float],
    ) -> TransferCost:
        return cls(first, _least_squares([nodes, edges, node_width, edge_width], _TRANSFER_DEGREE, seconds))

    def seconds(
        self, nodes: float, edges: float, node_width: float, edge_width: float = 0.0, *, num_batches: int = 1
    ) -> float:
        """May be negative."""
        variable = _evaluate(self.coefficients, [nodes, edges, node_width, edge_width], _TRANSFER_DEGREE)
        return self.first / num_batches + variable


def _products(variables: Sequence[Sequence[float]], degree: int) -> Array:
    """A column per product of the variables, from the constant up to the given degree."""
    values = np.asarray(variables, dtype=np.float64)
    columns = [np.ones(values.shape[1])]
    for count in range(1, degree + 1):
        columns += [
            np.prod(values[list(chosen)], axis=0) for chosen in combinations_with_replacement(range(len(values)), count)
        ]
    return np.stack(columns, axis=1)


def _least_squares(variables: Sequence[Sequence[float]], degree: int, seconds: Sequence[float]) -> tuple[float, ...]:
    columns = _products(variables, degree)
    scale = np.abs(columns).max(axis=0)  # the same solution, without losing it to cubes of millions
    scale[scale == 0] = 1.0
    solution = np.linalg.lstsq(columns / scale, np.asarray(seconds, dtype=np.float64), rcond=None)[0]
    return tuple(float(value) for value in solution / scale)


def _evaluate(coefficients: Sequence[float], values: Sequence[float], degree: int) -> float:
    return float((_products([[value] for value in values], degree) @ np.asarray(coefficients)).item())
