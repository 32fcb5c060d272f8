"""What holds for every policy: nothing over capacity or workers, each job once, and plain answers in plain cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial

import pytest

from gnnsys.jobs import ContinuousPolicy, Room, WaitingJob, find_policy, fits, memory_of, replay_queue
from gnnsys.jobs.policies import FifoPolicy
from tests.jobs.policies.queues import POLICIES, check_promises, draw_jobs, draw_seconds


def slowed(speeds: list[float], together: Sequence[WaitingJob]) -> list[float]:
    """Relative speeds, by how many there are."""
    return [speeds[len(together) - 1]] * len(together)


@pytest.mark.parametrize("name", POLICIES)
def test_each_job_runs_once_and_nothing_is_over_capacity_or_workers(name: str):
    draw = random.Random(name)
    for _ in range(60):
        capacity = draw.choice((20, 100, 1000))
        room = Room(capacity=capacity, workers=draw.randint(1, 5))
        jobs = draw_jobs(draw, draw.randint(1, 12), capacity, arrive=draw.choice((0.0, 50.0, 500.0)))
        slow = [draw.uniform(0.3, 1.0) ** beside for beside in range(5)]
        found = replay_queue(jobs, draw_seconds(draw, jobs), POLICIES[name](), room, partial(slowed, slow))
        check_promises(jobs, room, found)


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_that_is_too_large_holds_nobody_up(name: str):
    room, policy = Room(capacity=10, workers=2), POLICIES[name]()
    jobs = [WaitingJob(number=number, memory=size, submitted=number) for number, size in enumerate((11, 3, 2))]
    started: set[int] = set()
    for _ in range(3):  # each time all that started has ended
        now = policy([job for job in jobs if job.number not in started], [], room, 1e6)
        started |= set(now)
    assert started == {1, 2}


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_queue_starts_nothing(name: str):
    assert POLICIES[name]()([], [], Room(capacity=10, workers=2), 0.0) == []


def test_a_graph_that_two_jobs_read_counts_once():
    first, second = (WaitingJob(number=n, memory=3, submitted=n, graphs={"papers": 5}) for n in (0, 2))
    other = WaitingJob(number=1, memory=3, submitted=1.0, graphs={"products": 5})
    assert memory_of([first, second]) == 11 and memory_of([first, other]) == 16
    room = Room(capacity=12, workers=2)
    assert fits([first, second], room) and not fits([first, other], room)
    for name, expected in (("base", [0]), ("lmcf", [0]), ("continuous", [0, 2])):
        assert find_policy(name)([first, other, second], [], room, 3.0) == expected
    assert find_policy("base")([first, second, other], [], room, 3.0) == [0]


def test_one_at_a_time_the_shortest_first_is_the_best_of_all_orders():
    draw = random.Random(1)
    for count in range(1, 8):
        seconds = {number: draw.uniform(1.0, 100.0) for number in range(count)}
        jobs = [WaitingJob(number=n, memory=1, submitted=0.0, seconds=length) for n, length in seconds.items()]
        found = replay_queue(jobs, seconds, ContinuousPolicy(patience=1e9), Room(capacity=1, workers=1))
        best = min(
            sum(itertools.accumulate(seconds[number] for number in order))
            for order in itertools.permutations(range(count))
        )
        assert found.mean_completion == pytest.approx(best / count)


def test_on_several_workers_that_do_not_disturb_each_other_it_is_too():
    draw = random.Random(2)
    for count, workers in ((5, 2), (6, 3), (7, 2)):
        seconds = {number: draw.uniform(1.0, 100.0) for number in range(count)}
        jobs = [WaitingJob(number=n, memory=1, submitted=0.0, seconds=length) for n, length in seconds.items()]
        found = replay_queue(jobs, seconds, ContinuousPolicy(patience=1e9), Room(capacity=99, workers=workers))
        assert found.mean_completion == pytest.approx(best_mean(jobs, seconds, Room(capacity=99, workers=workers)))


def test_where_memory_is_scarce_it_is_near_the_best_of_all_orders():
    draw, ratios = random.Random(3), []
    for _ in range(15):
        seconds = {number: draw.uniform(1.0, 100.0) for number in range(6)}
        jobs = [
            WaitingJob(number=n, memory=draw.randint(1, 10), submitted=0.0, seconds=length)
            for n, length in seconds.items()
        ]
        room = Room(capacity=10, workers=3)
        found = replay_queue(jobs, seconds, ContinuousPolicy(patience=1e9), room)
        ratios.append(found.mean_completion / best_mean(jobs, seconds, room))
    assert min(ratios) >= 1 - 1e-9 and max(ratios) < 1.6 and sum(ratios) / len(ratios) < 1.12


def best_mean(jobs: list[WaitingJob], seconds: dict[int, float], room: Room) -> float:
    """The least mean completion of all schedules that look at jobs in some order and start what fits."""
    best = float("inf")
    for order in itertools.permutations(jobs):
        running: list[tuple[float, WaitingJob]] = []
        waiting, now, total = list(order), 0.0, 0.0
        while waiting or running:
            for job in list(waiting):
                if fits([each for _, each in running] + [job], room):
                    waiting.remove(job)
                    running.append((now + seconds[job.number], job))
                    total += now + seconds[job.number]
            running.sort(key=lambda entry: entry[0])
            now = running.pop(0)[0]
            if total >= best:
                break
        best = min(best, total)
    return best / len(jobs)


def test_first_come_first_served_lets_nobody_overtake():
    jobs = [WaitingJob(number=9 - n, memory=size, submitted=n) for n, size in enumerate((6, 6, 1))]
    assert FifoPolicy(3)(jobs, [], Room(capacity=10, workers=3), 9.0) == [9]
    assert FifoPolicy(3)(jobs, [], Room(capacity=13, workers=3), 9.0) == [9, 8, 7]
    assert FifoPolicy()(jobs, [], Room(capacity=13, workers=3), 9.0) == [9]


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="no policy 'sjf'; choose one of: base, bmc, continuous, fifo, lmcf"):
        find_policy("sjf")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        FifoPolicy(0)
    with pytest.raises(ValueError, match="must not be negative"):
        ContinuousPolicy(patience=-1.0)
    with pytest.raises(RuntimeError, match=r"starts none of \[0\]"):
        replay_queue(
            [WaitingJob(number=0, memory=1, submitted=0.0)], {0: 1.0}, lambda *_: [], Room(capacity=1, workers=1)
        )
    with pytest.raises(RuntimeError, match="starts job 3, which does not wait"):
        replay_queue(
            [WaitingJob(number=0, memory=1, submitted=0.0)], {0: 1.0}, lambda *_: [3], Room(capacity=1, workers=1)
        )
