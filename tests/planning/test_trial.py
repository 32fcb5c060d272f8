"""Ways in turn: which batch is whose, what counts, and which way is the best."""

import pytest

from gnnsys.planning import WayTrial


@pytest.mark.parametrize("num_ways", [1, 2, 4])
def test_every_way_has_a_turn_in_a_round(num_ways: int):
    trial = WayTrial(num_ways)
    numbers = range(trial.num_batches)
    for way in range(num_ways):
        mine = [n for n in numbers if trial.way_of(n) == way]
        assert sum(map(trial.is_first, mine)) == sum(map(trial.is_last, mine)) == 1
        assert len(mine) == trial.turn
    turns = [trial.way_of(n) for n in numbers if trial.is_first(n)]
    assert turns == [*range(num_ways)], "interleaved"


def _played(seconds: list[list[float]]) -> list[list[int]]:
    """Who had a turn in each round, where turns took so long, by way and round."""
    trial, rounds = WayTrial(len(seconds)), []
    while not trial.is_over:
        rounds.append(list(trial.playing))
        for way in trial.playing:
            trial.add(way, seconds[way][trial.round])
        trial.end_round()
    return rounds


def test_ways_that_are_far_behind_have_no_more_turns():
    assert _played([[1.0] * 3, [1.4] * 3, [1.6] * 3, [3.1] * 3]) == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]


def test_one_bad_turn_of_several_is_noise():
    assert _played([[1.0] * 3, [2.9, 1.4, 1.4]]) == [[0, 1]] * 3
    assert _played([[1.0] * 3, [1.4, 9.0, 1.4]]) == [[0, 1]] * 3


def test_the_first_way_has_two_turns_at_least_as_the_first_batches_of_all_may_be_slow():
    assert _played([[50.0, 1.0, 1.0], [1.5] * 3]) == [[0, 1]] * 3
    assert _played([[50.0] * 3, [1.5] * 3]) == [[0, 1], [0, 1]]


def test_a_trial_with_one_way_left_is_over():
    assert _played([[1.0] * 3, [5.0] * 3]) == [[0, 1]]


def test_two_that_are_hard_to_tell_apart_have_more_turns():
    noisy, faster = [1.0, 0.8, 1.0, 1.0, 1.0, 1.0], [0.9, 0.95, 0.9, 0.9, 0.9, 0.9]
    assert _played([noisy, faster, [1.2] * 6]) == [[0, 1, 2]] * 3 + [[0, 1]]
    always = [1.0, 0.8, 1.0, 0.8, 1.0, 0.8]
    assert _played([always, [0.85] * 6]) == [[0, 1]] * 6
    assert _played([[1.0] * 6, [0.99] * 6]) == _played([[1.0] * 6, [0.9] * 6]) == [[0, 1]] * 3


def test_of_ways_that_are_alike_the_one_that_is_named_first_is_taken():
    trial = WayTrial(4)
    trial.seconds = {0: [2.0] * 3, 1: [1.02] * 3, 2: [1.0] * 3, 3: [1.5] * 3}
    assert trial.best() == 1
    trial.seconds[1] = [1.04] * 3
    assert trial.best() == 2


def test_a_long_trial_is_gone_on_with():
    trial = WayTrial(2)
    while not trial.is_over:
        trial.add(0, 0.8 if trial.round % 2 else 1.0)
        trial.add(1, 0.85)
        trial.end_round()
    assert trial.round == 6
    other = WayTrial(2)
    other.take(trial.to_json())
    assert other.round == 6 and other.playing == trial.playing


def test_ways_of_which_nothing_was_measured_go_on():
    trial = WayTrial(2)
    for _ in range(trial.rounds):
        assert not trial.is_over and trial.playing == [0, 1]
        trial.end_round()
    assert trial.is_over and trial.best() == 0


def test_a_trial_of_some_ways_compares_them_with_its_first():
    trial = WayTrial(3)
    trial.seconds = {0: [9.0], 1: [1.0], 2: [1.5]}
    assert trial.near(1.6) == [1, 2] and trial.near(5.0) == [0, 1, 2]
    trial.begin([1, 2])
    assert trial.seconds == {0: [9.0]} and [trial.way_of(n) for n in (0, trial.turn)] == [1, 2]
    trial.seconds |= {1: [2.0], 2: [1.99]}
    assert trial.best() == 1, "within noise"
    trial.seconds[2] = [1.5]
    assert trial.best() == 2
    again = WayTrial(3)
    again.take(trial.to_json())
    assert (again.tried, again.playing, again.round) == ([1, 2], [1, 2], 0)


def test_a_way_that_cannot_be_gone_is_not_near_and_one_that_was_not_measured_is():
    trial = WayTrial(3)
    trial.seconds = {0: [1.0]}
    trial.refuse(1, "out of memory")
    assert trial.near(1.0) == [0, 2]


def test_the_fastest_stays_by_its_median():
    trial = WayTrial(3)
    for way, seconds in enumerate(([3.0, 3.1, 2.9], [2.0, 2.1, 9.0], [2.5, 2.4, 2.6])):
        for second in seconds:
            trial.add(way, second)
    assert trial.best() == 1 and trial.median(1) == 2.1


def test_what_is_done_without_a_plan_is_left_only_for_more_than_noise():
    trial = WayTrial(2)
    trial.add(0, 1.00)
    trial.add(1, 0.99)
    assert trial.best() == 0
    trial.seconds[1] = [0.97]
    assert trial.best() == 1


def test_a_way_stays_unless_the_other_beats_all_of_its_turns():
    trial = WayTrial(2)
    for first, second in ((1.0, 0.9), (0.85, 0.88), (1.1, 0.9)):
        trial.add(0, first)
        trial.add(1, second)
    assert trial.best() == 0, "0.9 is below 0.98 of the median, and not below the best turn"
    trial.seconds[1] = [0.8, 0.8, 2.0]
    assert trial.best() == 1


def test_nothing_is_chosen_that_was_compared_with_nothing():
    trial = WayTrial(2)
    trial.add(1, 0.5)
    assert trial.best() == 0


def test_ways_that_cannot_be_gone_are_not_chosen():
    trial = WayTrial(3)
    trial.add(0, 2.0)
    trial.add(1, 1.0)
    trial.refuse(1, "out of memory")
    assert trial.best() == 0 and trial.median(1) is None and trial.median(2) is None
    assert WayTrial(3).best() == 0, "nothing was measured"
