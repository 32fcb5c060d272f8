"""A grid runs every case, names those that fail, and is no way to have none."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.grid import every_pair, every_value, grid


@grid(number=[1, 2, 3], word={"a": "x", "b": "y"})
def test_every_case_runs_beside_fixtures_and_in_a_folder_of_its_own(number, word, tmp_path, cases):
    cases.append((number, word))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()


@pytest.fixture
def cases():
    found: list[tuple[int, str]] = []
    yield found
    assert found == [(number, word) for number in (1, 2, 3) for word in "xy"]


def test_cases_that_fail_are_named_and_the_others_run():
    ran = []

    @grid(number=range(4), kind={"float": 0.0, "int": 0})
    def check(number, kind):
        ran.append((number, kind))
        if number % 2 and isinstance(kind, float):
            raise ValueError(f"{number} is odd")

    with pytest.raises(AssertionError, match="2 cases failed") as raised:
        check()
    told = ["number=1, kind=float: ValueError: 1 is odd", "number=3, kind=float: ValueError: 3 is odd"]
    assert len(ran) == 8 and str(raised.value).splitlines()[1:] == told
    assert str(raised.value.__cause__) == "1 is odd"


def test_no_values_no_argument_and_no_skipping():
    with pytest.raises(ValueError, match="a test of no cases cannot fail: number has no values"):
        grid(number=[])
    with pytest.raises(ValueError, match=r"has no argument \['colour'\]"):
        grid(colour=["red"])(lambda number: None)

    @grid(number=[1])
    def skips(number):
        pytest.skip("why")

    with pytest.raises(AssertionError, match="cannot be skipped: number=1"):
        skips()


def test_any_two_values_of_two_arguments_meet_in_few_cases_that_have_names():
    axes = {"model": [int, str, float], "size": [1, 2, 3], "moves": {"lie": False, "move": True}, "packed": [0, 1]}
    mark = every_pair(**axes).mark
    names, cases = mark.args
    assert names == list(axes) and 9 <= len(cases) <= 12
    found = {pair for case in cases for pair in combinations(zip(names, case.values, strict=True), 2)}
    values = {name: given.values() if isinstance(given, dict) else given for name, given in axes.items()}
    for one, other in combinations(names, 2):
        assert all(((one, v), (other, w)) in found for v, w in product(values[one], values[other]))
    ids = [case.id for case in cases]
    assert ids[0] == "int-1-lie-0" and len(set(ids)) == len(ids)
    assert [case.id for case in every_pair(**axes).mark.args[1]] == ids


def test_pairs_of_nothing_are_refused():
    with pytest.raises(ValueError, match="pairs need two arguments with values: size"):
        every_pair(model=[int], size=[])
    with pytest.raises(ValueError, match="pairs need two arguments"):
        every_pair(model=[int])


def test_every_value_is_in_a_case_of_make_test_and_every_pair_in_one_of_check_all():
    axes = {"model": [int, float], "size": [1, 2, 3], "moves": {"lies": False, "moves": True}}
    cases, pairs = every_value(**axes).mark.args[1], every_pair(**axes).mark.args[1]
    assert [case.id for case in cases] == [case.id for case in pairs]
    short = [case for case in cases if not case.marks]
    assert len(short) == 3 < len(cases) and all(mark.name == "long" for case in cases for mark in case.marks)
    assert [{case.values[at] for case in short} for at in range(3)] == [{int, float}, {1, 2, 3}, {False, True}]
