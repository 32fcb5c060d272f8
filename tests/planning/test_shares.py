"""Shares of rules: the value is that of HiGHS, and a pattern has them as nearly as its length allows."""

import itertools

import numpy as np
import pytest

from gnnsys.planning.scheduling import shares as shares_module
from gnnsys.planning.scheduling.shares import bound, round_shares

RESOURCES = ("cores", "bus up", "bus down", "gpu")


def _random_uses(generator, num_rules):
    seconds = generator.exponential(size=(num_rules, len(RESOURCES))) * (generator.random((num_rules, 4)) < 0.7)
    return {f"rule {n}": dict(zip(RESOURCES, row.tolist(), strict=True)) for n, row in enumerate(seconds)}


def _value_by_scipy(uses):
    linprog = pytest.importorskip("scipy.optimize").linprog
    matrix = np.array([[used[r] for used in uses.values()] for r in RESOURCES])
    solved = linprog(
        [0.0] * len(uses) + [1.0],
        A_ub=np.hstack([matrix, -np.ones((4, 1))]), b_ub=np.zeros(4), A_eq=[[1.0] * len(uses) + [0.0]], b_eq=[1.0],
    )  # fmt: skip
    return solved.fun


def _check(uses, found):
    assert sum(found.shares.values()) == pytest.approx(1) and min(found.shares.values()) >= 0
    busy = {r: sum(share * uses[rule][r] for rule, share in found.shares.items()) for r in RESOURCES}
    assert max(busy.values()) == pytest.approx(found.seconds)
    assert all(busy[r] == pytest.approx(found.seconds) for r in found.binding) and (found.binding or not found.seconds)


def test_every_vertex_is_looked_at_and_the_best_is_that_of_highs():
    generator = np.random.default_rng(0)
    for num_rules in [1, 1, 2, 2, 3, 3, 4, 4, 6, 6, 9, 9]:
        uses = _random_uses(generator, num_rules)
        found = bound(uses)
        _check(uses, found)
        assert found.seconds == pytest.approx(_value_by_scipy(uses), abs=1e-9)


def test_rules_that_are_thousands_of_times_slower_hide_nothing():
    generator = np.random.default_rng(5)
    for number in range(24):
        uses = {
            f"rule {n}": dict(zip(RESOURCES, (10.0 ** generator.uniform(-5, 3, 4)).tolist(), strict=True))
            for n in range(2 + number % 8)
        }
        least = min(max(used.values()) for used in uses.values())
        uses = {rule: {r: s / least for r, s in used.items()} for rule, used in uses.items()}
        assert bound(uses).seconds == pytest.approx(_value_by_scipy(uses), rel=1e-6)


def test_many_rules_go_to_scipy_or_say_that_they_need_it(monkeypatch):
    uses = _random_uses(np.random.default_rng(1), 6)
    by_vertices = bound(uses)
    monkeypatch.setattr(shares_module, "_MOST_VERTICES", 10)
    with monkeypatch.context() as without:
        without.setitem(__import__("sys").modules, "scipy.optimize", None)
        assert "gnnsys[plan]" in bound(uses)
    pytest.importorskip("scipy.optimize")
    by_program = bound(uses)
    _check(uses, by_program)
    assert by_program.seconds == pytest.approx(by_vertices.seconds)


def test_rules_that_are_equal_or_cost_nothing_are_no_trouble():
    same = {rule: {"gpu": 2.0, "bus up": 2.0} for rule in "abc"}
    assert bound(same).seconds == pytest.approx(2) and set(bound(same).binding) == {"gpu", "bus up"}
    assert bound({"a": {"gpu": 0.0}, "b": {}}).seconds == 0
    assert bound({"a": {"gpu": 1.0}, "b": {}}).shares == {"a": 0.0, "b": 1.0}
    assert bound({"a": {"gpu": 1.0}, "b": {}}).seconds == 0
    with pytest.raises(ValueError, match="no rules"):
        bound({})
    with pytest.raises(ValueError, match="0 or more"):
        bound({"a": {"gpu": -1.0}})


def test_it_mixes_rows_over_the_bus_with_sums_of_the_host_as_far_as_that_pays():
    """Milliseconds of an H200 with 16 cores: 6.9 without a mix, 5.5 with one; 5.0 if sums are faster."""
    over_the_bus = {"bus up": 5.4 + 1.5, "gpu": 4.2}
    uses = {"bus": over_the_bus, "sums": {"cores": 10.9 + 1.0, "bus up": 2.4 + 1.5, "gpu": 4.0}}
    assert bound(uses).seconds == pytest.approx(5.5, abs=0.05) and bound(uses).binding == ("bus up", "cores")
    uses["sums"]["cores"] = 10.9 * 36 / 60 + 1.0
    assert bound(uses).seconds == pytest.approx(5.0, abs=0.1)
    assert set(round_shares(bound(uses).shares)) == {"bus", "sums"}


def test_a_pattern_is_nearest_to_the_shares_of_all_counts():
    generator = np.random.default_rng(2)
    for num_rules, longest in itertools.product([1, 2, 3], [1, 2, 5, 8]):
        wanted = generator.dirichlet(np.ones(num_rules)) * 3  # need not sum to 1
        pattern = round_shares({str(n): share for n, share in enumerate(wanted)}, longest)
        assert 1 <= len(pattern) <= longest

        def error(counts, wanted=wanted):
            return np.abs(np.array(counts) / sum(counts) - wanted / wanted.sum()).sum()

        every = [c for c in itertools.product(range(longest + 1), repeat=num_rules) if 1 <= sum(c) <= longest]
        counts = [pattern.count(str(n)) for n in range(num_rules)]
        assert error(counts) == pytest.approx(min(map(error, every)))
        assert sum(counts) == min(sum(c) for c in every if error(c) <= error(counts) + 1e-9)


def test_rules_are_spread_evenly():
    for counts in [{"a": 3, "b": 5}, {"a": 1, "b": 7}, {"a": 2, "b": 3, "c": 3}, {"a": 4, "b": 4}]:
        length = sum(counts.values())
        pattern = round_shares(counts) * 16
        for first in range(length):
            for size in range(1, length):
                window = pattern[first : first + size]
                assert all(abs(window.count(r) - size * n / length) < 2 for r, n in counts.items())


def test_shares_that_are_none_are_refused():
    for bad in [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan")}]:
        with pytest.raises(ValueError, match="not all 0"):
            round_shares(bad)
    with pytest.raises(ValueError, match="longest=0"):
        round_shares({"a": 1.0}, longest=0)
    assert round_shares({"a": 1e-12}) == ("a",)
