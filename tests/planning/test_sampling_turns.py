"""Batches dealt to host and device: within 1 + eps of every other way, and forecasts by moving medians."""

import itertools
import statistics

import numpy as np
import pytest

from gnnsys.planning.scheduling.sampling_turns import (
    SamplingForecast,
    assign_longest_first,
    assign_nearly_best,
)


def _shortest(seconds, speed):
    """Over all 2^n ways."""
    ways = np.array(list(itertools.product([False, True], repeat=len(seconds))))
    return np.maximum(~ways @ seconds, ways @ seconds / speed).min()


def _time(seconds, turns, speed):
    return max(seconds[~turns.on_device].sum(), seconds[turns.on_device].sum() / speed)


@pytest.mark.parametrize("eps", [0.01, 0.05, 0.3, 1.0])
def test_it_is_within_one_plus_eps_of_all_ways(eps):
    generator = np.random.default_rng(int(100 * eps))
    worst, simple_is_worse = 1.0, 0
    for number, speed in itertools.product([1, 2, 3, 5, 8, 12], [0.1, 0.5, 1.0, 1.7, 6.0, 40.0]):
        for draw in (generator.standard_exponential, generator.random, lambda n: generator.integers(0, 4, n) + 0.0):
            seconds = draw(number)
            turns = assign_nearly_best(seconds, speed, eps=eps)
            assert turns.seconds == pytest.approx(_time(seconds, turns, speed))
            best = _shortest(seconds, speed)
            assert turns.seconds <= (1 + eps) * best + 1e-12
            worst = max(worst, turns.seconds / best if best else 1.0)
            simple = assign_longest_first(seconds, speed)
            assert simple.seconds == pytest.approx(_time(seconds, simple, speed))
            assert best <= simple.seconds + 1e-12 and simple.seconds <= 2 * best + 1e-12
            simple_is_worse += simple.seconds > (1 + eps) * best + 1e-12
    assert (eps < 0.3 or worst > 1.0) and (eps > 0.05 or simple_is_worse > 0), (
        "it rounds, and does more than the simple way"
    )


def test_many_batches_come_near_the_bound_that_no_way_beats():
    generator = np.random.default_rng(1)
    for speed in (0.3, 1.0, 12.0):
        seconds = np.concatenate([generator.exponential(size=2000), [90.0, 60.0, 300.0]])
        turns = assign_nearly_best(seconds, speed, eps=0.02)
        least = max(seconds.sum() / (1 + speed), seconds.max() / max(1, speed))
        assert least <= turns.seconds <= 1.02 * least


def test_what_cannot_be_dealt_is_refused():
    for bad in ([-1.0], [float("nan")], [[1.0]]):
        with pytest.raises(ValueError, match="0 or more"):
            assign_nearly_best(bad, 2.0)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="speed="):
            assign_longest_first([1.0], bad)
    with pytest.raises(ValueError, match="eps"):
        assign_nearly_best([1.0], 1.0, eps=0.0)
    assert assign_nearly_best([], 2.0).seconds == 0 and len(assign_longest_first([], 2.0).on_device) == 0
    assert assign_nearly_best([0.0, 0.0], 2.0).seconds == 0


def test_a_batch_is_forecast_by_the_median_of_its_last_times():
    generator, forecast, seen = np.random.default_rng(2), SamplingForecast(window=5), {}
    assert forecast.of_batch(0) is None and forecast.of_size(10) is None
    for _ in range(12):
        for batch in range(3):
            seconds = float(generator.exponential()) * (batch + 1)
            forecast.observe(batch, seconds, size=100 * (batch + 1))
            seen.setdefault(batch, []).append(seconds)
            assert forecast.of_batch(batch) == statistics.median(seen[batch][-5:])
    one_slow = SamplingForecast()
    for seconds in [1.0] * 8 + [1000.0]:
        one_slow.observe(0, seconds, size=50)
    assert one_slow.of_batch(0) == 1.0 and one_slow.of_size(100) == 2.0, "one slow time changes nothing"
    assert one_slow.of_batch(7) == 1.0, "a batch that was not seen is like the others"
    with pytest.raises(ValueError, match="window=0"):
        SamplingForecast(window=0)
