"""Least squares without negative coefficients, beside scipy's and by the conditions that a solution must meet."""

from __future__ import annotations

import numpy as np
import pytest

from gnnsys.planning.costs.nonnegative import nonnegative_least_squares


def problems(count: int):
    """Random ones, tall and wide, with columns of very different units, some that are the same twice, some of zeros."""
    draw = np.random.default_rng(0)
    for number in range(count):
        rows, columns = int(draw.integers(1, 30)), int(draw.integers(1, 9))
        matrix = draw.normal(size=(rows, columns)) * 10.0 ** draw.integers(-9, 9, size=columns)
        if number % 3 == 0:
            matrix[:, draw.integers(columns)] = matrix[:, 0]
        if number % 5 == 0:
            matrix[:, draw.integers(columns)] = 0.0
        yield matrix, draw.normal(size=rows)


def test_the_residual_is_that_of_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    for matrix, target in problems(200):
        ours = nonnegative_least_squares(matrix, target)
        scale = np.where((matrix == 0).all(axis=0), 1.0, np.sqrt((matrix**2).sum(axis=0)))
        _, residual = optimize.nnls(matrix / scale, target)
        assert (ours >= 0).all()
        assert np.linalg.norm(matrix @ ours - target) == pytest.approx(residual, rel=1e-6, abs=1e-9)


def test_wherever_the_search_begins_it_ends_at_the_same_residual():
    draw = np.random.default_rng(2)
    for matrix, target in problems(200):
        cold = nonnegative_least_squares(matrix, target)
        warm = nonnegative_least_squares(
            matrix, target, draw.random(matrix.shape[1]) * draw.integers(2, size=cold.size)
        )
        assert (warm >= 0).all()
        assert np.linalg.norm(matrix @ warm - target) == pytest.approx(np.linalg.norm(matrix @ cold - target), abs=1e-7)


def test_no_coefficient_could_be_changed_to_come_closer():
    for matrix, target in problems(200):
        solution = nonnegative_least_squares(matrix, target)
        scale = np.where((matrix == 0).all(axis=0), 1.0, np.sqrt((matrix**2).sum(axis=0)))
        gradient = (matrix / scale).T @ (target - matrix @ solution)  # of what is left, towards more of each column
        assert (gradient <= 1e-7).all()
        assert np.abs(gradient[solution > 0]).max(initial=0.0) <= 1e-7


def test_what_is_a_sum_is_found_again():
    draw = np.random.default_rng(1)
    matrix = draw.random((20, 5))
    planted = np.array([0.0, 2.0, 0.0, 1e-3, 5.0])
    assert nonnegative_least_squares(matrix, matrix @ planted) == pytest.approx(planted, abs=1e-9)
