"""A large job starts within its bound while small ones keep arriving."""

from __future__ import annotations

import random

import pytest

from gnnsys.jobs import ContinuousPolicy, Room, WaitingJob, replay_queue
from gnnsys.jobs.policies import expected_lengths
from tests.jobs.policies.queues import draw_jobs, draw_seconds

ROOM = Room(capacity=100, workers=4)


def stream(large: WaitingJob, last: float) -> tuple[list[WaitingJob], dict[int, float]]:
    """A large job among small ones, of which three run at any time: one every two seconds, for six."""
    small = [
        WaitingJob(number=1 + n, memory=20, submitted=2.0 * n, seconds=6.0, kind="small") for n in range(int(last / 2))
    ]
    return [large, *small], {large.number: 50.0, **{job.number: 6.0 for job in small}}


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_large_job_starts_within_its_bound_while_small_ones_keep_arriving(is_alone: bool):
    large = WaitingJob(number=0, memory=70, submitted=11.0, seconds=50.0, is_alone=is_alone)
    jobs, seconds = stream(large, 2000.0)
    policy = ContinuousPolicy(patience=100.0, stretch=2.0)
    found = {job.number: job for job in replay_queue(jobs, seconds, policy, ROOM).jobs}
    assert policy.due_at(large) == 111.0 < found[0].started <= policy.latest_start(large, 0, 6.0) == 117.0
    endless = ContinuousPolicy(patience=1e9)
    starved = {job.number: job for job in replay_queue(jobs, seconds, endless, ROOM).jobs}
    assert starved[0].started >= 1990.0, "without ageing it waits for the last of them"


def test_every_job_starts_within_the_bound_of_those_that_are_due_before_it():
    draw, waited = random.Random(7), 0
    for _ in range(20):
        jobs = draw_jobs(draw, 40, 100, arrive=draw.choice((10.0, 400.0, 2000.0)))
        seconds = draw_seconds(draw, jobs)
        room = Room(capacity=100, workers=draw.randint(1, 5))
        policy = ContinuousPolicy(patience=draw.choice((0.0, 20.0, 200.0)), stretch=draw.choice((0.0, 0.5)))
        found = {job.number: job for job in replay_queue(jobs, seconds, policy, room).jobs}
        for job in jobs:
            due = policy.due_at(job)
            ahead = [
                other
                for other in jobs
                if (policy.due_at(other), other.submitted, other.number) < (due, job.submitted, job.number)
                and found[other.number].started > due
            ]
            waited += found[job.number].started > due
            assert found[job.number].started <= policy.latest_start(job, len(ahead), max(seconds.values())) + 1e-6
    assert waited > 100, "many of them were due before they started"


def test_small_ones_start_beside_a_large_one_that_room_is_kept_for():
    large = WaitingJob(number=0, memory=70, submitted=0.0)
    small = [WaitingJob(number=n, memory=20, submitted=50.0) for n in (1, 2, 3)]
    policy, now = ContinuousPolicy(patience=10.0), 60.0
    before = WaitingJob(number=8, memory=40, submitted=0.0, started=5.0)  # ran before the large one was due
    assert policy([large, *small], [before], ROOM, now) == [1], "20 and 70 fit, 40 and 70 do not"
    since = WaitingJob(number=9, memory=40, submitted=0.0, started=11.0)
    assert policy([large, *small], [since], ROOM, now) == [], "the large one must wait for it as well"
    unknown = WaitingJob(number=9, memory=40, submitted=0.0)
    assert policy([large, *small], [unknown], ROOM, now) == []
    assert policy([large, *small], [], ROOM, now) == [0, 1]
    assert policy([large, *small], [before], ROOM, 9.0) == [1, 2, 3], "it is not due yet"


def test_of_those_that_are_due_the_first_to_be_due_starts_first():
    jobs = [WaitingJob(number=n, memory=90, submitted=-n, seconds=100.0 * n) for n in range(4)]
    policy = ContinuousPolicy(patience=1.0, stretch=1.0)
    assert [policy.due_at(job) for job in jobs] == [1.0, 99.0, 198.0, 297.0]
    assert policy(jobs[1:], [], ROOM, 500.0) == [1] and policy(jobs[2:], [], ROOM, 500.0) == [2]


def test_memory_stands_for_seconds_where_they_are_not_known():
    known = WaitingJob(number=0, memory=10, submitted=0.0, seconds=30.0)
    unknown = WaitingJob(number=1, memory=4, submitted=0.0, graphs={"g": 5})
    assert expected_lengths([unknown]) == {1: 9.0}
    assert expected_lengths([known, unknown]) == {0: 30.0, 1: pytest.approx(27.0)}
    one = Room(capacity=100, workers=1)
    short = WaitingJob(number=2, memory=50, submitted=0.0, seconds=1.0)
    assert ContinuousPolicy()([known, unknown], [], one, 1.0) == [1]
    assert ContinuousPolicy()([known, unknown, short], [], one, 1.0) == [2]


def test_a_set_that_does_not_pay_is_not_made_and_the_bound_stays():
    def pays(jobs):
        return not {"small", "large"} <= {job.kind for job in jobs}

    large = WaitingJob(number=0, memory=10, submitted=1.0, seconds=50.0, kind="large")
    jobs, seconds = stream(large, 1000.0)
    policy = ContinuousPolicy(patience=100.0, stretch=1.0, pays=pays)
    found = {job.number: job for job in replay_queue(jobs, seconds, policy, ROOM).jobs}
    assert 101.0 < found[0].started <= 107.0
    assert not any(
        job.started < found[0].ended and job.ended > found[0].started for job in found.values() if job.number
    )
