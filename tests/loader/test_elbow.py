"""When a curve of scores is said to bend: on noisy ones too, by its shape alone, and never where it still rises."""

import math
import random

import pytest

from gnnsys.loader.elbow import SETTLED, elbow_of

RUNS = 100


def bends_after(curve):
    """How many scores it takes until the elbow is found; None where all of them do not do."""
    return next((count for count in range(1, len(curve) + 1) if elbow_of(curve[:count]) is not None), None)


def saturating(tau, noise=0.0, seed=0, count=200):
    draw = random.Random(seed)
    return [1 - math.exp(-t / tau) + draw.gauss(0, noise) for t in range(1, count)]


@pytest.mark.parametrize("tau", [0.5, 1, 3, 8, 15])
def test_a_saturating_curve_bends_when_nearly_all_is_gained(tau):
    """The elbow itself is where the gain per epoch is the mean of all epochs, which a formula has."""
    curve = saturating(tau)
    count = bends_after(curve)
    first, last = curve[0], curve[count - 1]
    assert (last - first) / (1 - first) > 0.93 and count <= max(4 * tau, SETTLED + 4)
    mean = (last - first) / (count - 1)
    by_formula = tau * math.log(1 / (tau * mean)) - 1  # where exp(-t / tau) / tau is the mean; scores begin at t = 1
    assert abs(elbow_of(curve[:count]) - by_formula) <= 1


@pytest.mark.parametrize("tau", [1, 3, 8])
@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_noise_moves_the_moment_but_little(tau, noise):
    exact, found = bends_after(saturating(tau)), [bends_after(saturating(tau, noise, seed)) for seed in range(RUNS)]
    assert 1 - math.exp(-min(found) / tau) > 0.7 and max(found) <= 1.5 * exact, "most of it is gained, and not too late"
    assert abs(sorted(found)[RUNS // 2] - exact) <= 3


@pytest.mark.parametrize("slope", [0.0, -1.0, -0.001])
def test_what_does_not_rise_bends_as_soon_as_that_is_settled(slope):
    assert bends_after([slope * t for t in range(30)]) == SETTLED + 1
    for seed in range(RUNS):
        draw = random.Random(seed)
        noisy = [slope * t + draw.gauss(0, 0.01) for t in range(60)]
        assert SETTLED < bends_after(noisy) <= 40


@pytest.mark.parametrize("power", [1.0, 1.5, 3.0])
def test_what_still_rises_does_not_bend(power):
    for seed in range(RUNS):
        draw = random.Random(seed)
        assert bends_after([(t + draw.uniform(-0.5, 0.5)) ** power if t else 0.0 for t in range(80)]) is None


@pytest.mark.parametrize("plateau", range(1, SETTLED + 1))
def test_a_jump_behind_a_short_plateau_is_waited_for_and_a_long_plateau_is_not(plateau):
    jump = [0.2] * plateau + [0.2 + 0.6 * (1 - math.exp(-t / 3)) for t in range(1, 100)]
    assert jump[bends_after(jump) - 1] > 0.2 + 0.6 * 0.9
    assert bends_after([0.2] * 10 * SETTLED + jump) == SETTLED + 1


@pytest.mark.parametrize("to", [-1e6, -1.0, 2.0, 1e6])
def test_one_score_that_is_far_off_changes_little(to):
    curve = saturating(5)
    exact = bends_after(curve)
    for at in range(1, 40):
        spoiled = [to if i == at else score for i, score in enumerate(curve)]
        assert 2 / 3 * exact <= bends_after(spoiled) <= exact + 3


@pytest.mark.parametrize(("scale", "shift"), [(2.0**-30, 0.0), (2.0**20, 0.0), (1.0, 4.0), (0.5, -16.0)])
def test_only_the_shape_counts(scale, shift):
    for seed in range(20):
        curve = [round(score * 1024) / 1024 for score in saturating(4, 0.05, seed)]  # exact under scale and shift
        assert bends_after([scale * score + shift for score in curve]) == bends_after(curve)


def test_no_curve_at_all_bends_nowhere():
    assert [elbow_of([1.0] * count) for count in range(SETTLED + 1)] == [None] * (SETTLED + 1)
