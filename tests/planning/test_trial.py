"""Ways in turn: which batch is whose, what counts, and which way is the best."""

import pytest

from gnnsys.planning import WayTrial


@pytest.mark.parametrize("num_ways", [1, 2, 4])
def test_every_way_has_as_many_turns_and_measured_batches(num_ways: int):
    trial = WayTrial(num_ways)
    numbers = range(trial.num_batches)
    for way in range(num_ways):
        mine = [n for n in numbers if trial.way_of(n) == way]
        assert sum(map(trial.is_first, mine)) == sum(map(trial.is_last, mine)) == trial.rounds
        assert len(mine) == trial.rounds * trial.turn
    turns = [trial.way_of(n) for n in numbers if trial.is_first(n)]
    assert turns == [*range(num_ways)] * trial.rounds, "interleaved"


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
