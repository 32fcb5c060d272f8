"""Sharing must pay: what was measured decides who runs together again, and how long a job is thought to run."""

from __future__ import annotations

import itertools
import random

import pytest

from gnnsys.jobs import (
    ContinuousPolicy,
    EndedRun,
    Room,
    SharingRecord,
    WaitingJob,
    predict_seconds,
    relative_speeds,
    replay_queue,
    steps_per_second,
    to_be_parted,
)


def test_speeds_are_relative_to_those_alone():
    speeds = relative_speeds({1: 5.0, 2: 30.0, 3: 7.0}, {1: 10.0, 2: 40.0})
    assert speeds == {1: 0.5, 2: 0.75}
    assert not to_be_parted(speeds) and to_be_parted({1: 0.5, 2: 0.54})
    assert not to_be_parted({1: 0.5, 2: 0.55}) and not to_be_parted({1: 0.4}), "nobody else is there"


def test_lengths_are_those_of_runs_like_it_by_their_steps():
    runs = [EndedRun(kind="a", seconds=10.0, num_steps=100), EndedRun(kind="a", seconds=40.0, num_steps=200, speed=0.5)]
    assert steps_per_second("a", runs) == 10.0
    assert predict_seconds("a", 50, runs) == 5.0 and predict_seconds("b", 50, runs) is None
    broken = EndedRun(kind="b", seconds=0.0, num_steps=0)
    assert predict_seconds("b", 50, [broken]) is None


def test_a_set_below_the_least_speed_is_remembered_and_so_is_any_that_has_it_in_it():
    record = SharingRecord().measured(("b", "a"), 1.04).measured(("a", "a"), 1.3)
    assert not record.pays_for(("a", "b")) and not record.pays_for(("c", "b", "a"))
    assert record.pays_for(("a", "a")) and record.pays_for(("b", "b")) and record.pays_for(("a",))
    assert record.measured(("a", "b"), 1.05).pays_for(("a", "b")), "the latest figure counts"


def test_a_larger_set_must_not_be_slower_than_a_part_of_it():
    record = SharingRecord().measured(("a", "a"), 1.5).measured(("a", "a", "a"), 1.2)
    assert not record.pays_for(("a", "a", "a")) and record.pays_for(("a", "a"))
    assert record.measured(("a", "a", "a"), 1.45).pays_for(("a", "a", "a")), "within noise"


def test_a_part_of_a_set_that_pays_pays():
    draw = random.Random(1)
    for _ in range(60):
        record = SharingRecord()
        for _ in range(draw.randint(0, 6)):
            record = record.measured(draw.choices("abc", k=draw.randint(2, 4)), draw.uniform(0.9, 2.0))
        kinds = draw.choices("abc", k=5)
        for size in range(1, 6):
            for whole in itertools.combinations(kinds, size):
                if record.pays_for(whole):
                    assert all(record.pays_for(part) for part in itertools.combinations(whole, size - 1))


def test_a_record_is_json_and_back():
    record = SharingRecord().measured(("b", "a"), 1.04).measured(("a", "a", "c"), 1.3)
    assert SharingRecord.from_json(record.as_json()) == record
    with pytest.raises(ValueError, match="a record of sharing has entries"):
        SharingRecord.from_json([["a", 1.0]])


def test_jobs_of_no_kind_are_tried_every_time():
    jobs = [WaitingJob(number=n, memory=1, submitted=0.0) for n in range(2)]
    assert SharingRecord().measured(("", ""), 0.5).pays(jobs)


def test_with_what_was_learned_a_queue_that_does_not_share_well_is_as_fast_as_one_after_the_other():
    """Two jobs of this kind get 0.9 of the work of one done: together they would take 1.11 times as long."""
    jobs = [WaitingJob(number=n, memory=1, submitted=0.0, seconds=10.0, kind="a") for n in range(20)]
    seconds = {job.number: 10.0 for job in jobs}
    room = Room(capacity=9, workers=2)

    def speeds(together):
        return [1.0] if len(together) == 1 else [0.45, 0.45]

    learned = SharingRecord().measured(("a", "a"), sum(speeds(jobs[:2])))
    without = replay_queue(jobs, seconds, ContinuousPolicy(), room, speeds)
    with_it = replay_queue(jobs, seconds, ContinuousPolicy(pays=learned.pays), room, speeds)
    assert without.makespan == pytest.approx(200 / 0.9) and with_it.makespan == pytest.approx(200)
    assert with_it.mean_completion < without.mean_completion
