"""One test for a whole grid of dtypes, shapes and sizes: for cases that take less time than pytest takes around them.

    @grid(dtype=[torch.float32, torch.int64], shape={"none": (), "long": (128,)})
    def test_rows_come_back(dtype, shape, tmp_path):

runs four times, with a new `tmp_path` each and all other fixtures made once. Every case runs; the test fails with the
names of those that did not hold.

    @every_pair(model=[sage, gat], world_size=[1, 2, 3], moves={"rows lie": False, "rows move": True})
    def test_losses_are_those_of_one_process(model, world_size, moves):

is six tests instead of twelve: for cases that take longer, where what one argument does may depend on one other, but a
mistake that needs three of them at once is not what is looked for.

    @every_value(model=[sage, gat], world_size=[1, 2, 3], moves={"rows lie": False, "rows move": True})
    def test_losses_are_those_of_one_process(model, world_size, moves):

is the same six, of which `make test` runs the three that have every value; the others are marked `long`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

SHOWN = 20  # cases that a failure names


def grid(**axes: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for every combination of its arguments' values. A mapping gives values names to be told by."""
    named = {axis: _name(values) for axis, values in axes.items()}
    empty = [axis for axis, values in named.items() if not values]
    if empty or not axes:
        raise ValueError(f"a test of no cases cannot fail: {', '.join(empty) or 'no argument'} has no values")

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        if unknown := axes.keys() - signature.parameters.keys():
            raise ValueError(f"{test.__name__} has no argument {sorted(unknown)}")

        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            folder = fixtures.get("tmp_path")
            for number, chosen in enumerate(product(*named.values())):
                words = ", ".join(f"{axis}={word}" for axis, (word, _) in zip(named, chosen, strict=True))
                values = {axis: value for axis, (_, value) in zip(named, chosen, strict=True)}
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(number)
                    fixtures["tmp_path"].mkdir()
                try:
                    test(**values, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((words, error))
                except pytest.skip.Exception as error:
                    raise AssertionError(f"a case of a grid cannot be skipped: {words}: {error}") from error
            if failed:
                told = [f"{words}: {type(error).__name__}: {error}" for words, error in failed[:SHOWN]]
                raise AssertionError(f"{len(failed)} cases failed\n" + "\n".join(told)) from failed[0][1]

        kept = [parameter for name, parameter in signature.parameters.items() if name not in axes]
        run_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # what pytest looks at
        return run_all

    return wrap


def every_pair(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test so that any two values of two different arguments meet in a case, in few cases.

    The cases are the same in every process: each is the first of those that have most pairs that none before it had.
    """
    return _parametrize(axes, lambda rows: [False] * len(rows))


def every_value(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """`every_pair`, with all cases marked `long` but a few that have every value among them."""

    def is_long(rows: list[tuple[int, ...]]) -> list[bool]:
        left = {value for row in rows for value in enumerate(row)}
        short = set()
        while left:
            best = max(rows, key=lambda row: len(left.intersection(enumerate(row))))
            left.difference_update(enumerate(best))
            short.add(best)
        return [row not in short for row in rows]

    return _parametrize(axes, is_long)


def _parametrize(
    axes: Mapping[str, Iterable[Any]], is_long: Callable[[list[tuple[int, ...]]], list[bool]]
) -> pytest.MarkDecorator:
    named = {axis: _name(values) for axis, values in axes.items()}
    empty = [axis for axis, values in named.items() if not values]
    if empty or len(axes) < 2:
        raise ValueError(f"pairs need two arguments with values: {', '.join(empty) or list(axes)}")
    all_cases = list(product(*(range(len(values)) for values in named.values())))
    left = {pair for case in all_cases for pair in _pairs(case)}
    rows: list[tuple[int, ...]] = []
    while left:
        rows.append(max(all_cases, key=lambda case: len(left.intersection(_pairs(case)))))
        left.difference_update(_pairs(rows[-1]))
    cases = []
    for row, long in zip(rows, is_long(rows), strict=True):
        chosen = [values[at] for values, at in zip(named.values(), row, strict=True)]
        marks = [pytest.mark.long] if long else []
        cases.append(
            pytest.param(*(value for _, value in chosen), id="-".join(word for word, _ in chosen), marks=marks)
        )
    return pytest.mark.parametrize(list(axes), cases)


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """All pairs of (argument, value) of a case, by their numbers."""
    return list(combinations(enumerate(case), 2))


def _name(values: Iterable[Any]) -> list[tuple[str, Any]]:
    pairs = values.items() if isinstance(values, Mapping) else [(value, value) for value in values]
    return [(str(getattr(word, "__name__", word)), value) for word, value in pairs]
