"""Groups of CoGNN's policies, held to the paper's text."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from gnnsys.jobs import GroupedPolicy, Grouping, Room, WaitingJob, base_groups, bmc_groups, lmcf_groups, memory_of
from tests.jobs.policies.queues import draw_jobs

GROUPINGS = (base_groups, lmcf_groups, bmc_groups)


def algorithm_1(memory: list[int], num_workers: int, allocated: int) -> list[list[int]]:
    """Algorithm 1 line by line. `memory` ascends; groups of its indices."""
    deque_ = deque(range(len(memory)))
    task_group: list[list[int]] = []
    que_size = len(deque_)
    g_pmc, g_counter, e_counter = 0, -1, num_workers
    for i in range(0, que_size):
        if i % 2 == 1:  # noqa: SIM108
            task = deque_.pop()
        else:
            task = deque_.popleft()
        g_pmc = g_pmc + memory[task]
        if g_pmc >= allocated or e_counter == num_workers:
            task_group.append([])
            g_pmc, e_counter = memory[task], 0
            g_counter = g_counter + 1
        task_group[g_counter].append(task)
        e_counter = e_counter + 1
    return task_group


def plain_jobs(memory: list[int]) -> list[WaitingJob]:
    return [WaitingJob(number=number, memory=size, submitted=0.0) for number, size in enumerate(memory)]


def numbers(groups: list[list[WaitingJob]]) -> list[list[int]]:
    return [[job.number for job in group] for group in groups]


def test_bmc_is_algorithm_1():
    draw, sizes = random.Random(0), set()
    for _ in range(300):
        memory = sorted(draw.randint(1, 12) for _ in range(draw.randint(0, 12)))  # some are too large: they start there
        workers, capacity = draw.randint(1, 4), draw.randint(2, 40)
        groups = numbers(bmc_groups(plain_jobs(memory), Room(capacity=capacity, workers=workers)))
        assert groups == algorithm_1(memory, workers, capacity)
        sizes |= {len(group) for group in groups}
    assert sizes == {1, 2, 3, 4}


def test_bmc_is_algorithm_1_for_all_queues_of_up_to_seven_small_jobs():
    for count in range(8):
        for memory in itertools.combinations_with_replacement((1, 4, 5, 9), count):
            for workers in (1, 2, 3):
                groups = bmc_groups(plain_jobs(list(memory)), Room(capacity=10, workers=workers))
                assert numbers(groups) == algorithm_1(list(memory), workers, 10)


def test_a_group_that_would_fill_the_capacity_to_the_byte_is_ended():
    jobs, room = plain_jobs([5, 5]), Room(capacity=10, workers=2)
    assert [numbers(grouping(jobs, room)) for grouping in GROUPINGS] == [[[0], [1]]] * 3
    assert numbers(base_groups(jobs, Room(capacity=11, workers=2))) == [[0, 1]]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_are_safe_and_have_each_job_once(grouping: Grouping):
    draw = random.Random(3)
    for _ in range(200):
        room = Room(capacity=draw.choice((20, 1000)), workers=draw.randint(1, 4))
        jobs = draw_jobs(draw, draw.randint(0, 10), room.capacity)
        groups = grouping(jobs, room)
        assert sorted(job.number for group in groups for job in group) == list(range(len(jobs)))
        for group in groups:
            assert 1 <= len(group) <= room.workers and memory_of(group) <= room.capacity
            assert len(group) == 1 or not any(job.is_alone for job in group)


def test_in_the_order_of_submission_no_grouping_has_fewer_groups():
    draw = random.Random(4)
    for _ in range(100):
        count, room = draw.randint(1, 7), Room(capacity=21, workers=draw.randint(1, 3))
        jobs = [job for job in draw_jobs(draw, count, 20) if not job.is_alone]
        fewest = len(jobs)
        for cuts in itertools.product((False, True), repeat=max(len(jobs) - 1, 0)):
            places = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), len(jobs)]
            groups = [jobs[a:b] for a, b in itertools.pairwise(places)]
            if all(len(group) <= room.workers and memory_of(group) < room.capacity for group in groups):
                fewest = min(fewest, len(groups))
        assert len(base_groups(jobs, room)) == fewest


def test_the_smallest_come_first_and_of_equals_the_first_to_come():
    jobs = [WaitingJob(number=n, memory=size, submitted=-n) for n, size in enumerate((3, 9, 3, 1))]
    assert numbers(lmcf_groups(jobs, Room(capacity=100, workers=1))) == [[3], [2], [0], [1]]
    assert numbers(base_groups(jobs, Room(capacity=100, workers=1))) == [[3], [2], [1], [0]]


def run_all(policy: GroupedPolicy, jobs: list[WaitingJob], room: Room) -> list[list[int]]:
    waiting, found = list(jobs), []
    while waiting:
        group = policy(waiting, [], room, 0.0)
        running = [job for job in waiting if job.number in group]
        waiting = [job for job in waiting if job.number not in group]
        assert policy(waiting, running, room, 0.0) == policy(waiting, running[1:] or running, room, 0.0) == []
        found.append(group)
    return found


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_queue_runs_in_the_groups_of_the_whole_and_only_when_nothing_runs(grouping: Grouping):
    draw = random.Random(5)
    for _ in range(100):
        room = Room(capacity=20, workers=draw.randint(1, 3))
        jobs = plain_jobs([draw.randint(1, 19) for _ in range(draw.randint(1, 9))])
        assert run_all(GroupedPolicy(grouping), jobs, room) == numbers(grouping(jobs, room))


def test_a_job_that_comes_later_is_grouped_with_those_that_wait():
    policy, room = GroupedPolicy(lmcf_groups), Room(capacity=100, workers=2)
    jobs = plain_jobs([4, 5, 6, 7])
    assert policy(jobs, [], room, 0.0) == [0, 1]
    late = WaitingJob(number=9, memory=1, submitted=8.0)
    assert policy([*jobs[2:], late], [], room, 9.0) == [9, 2]
    assert policy(jobs[3:], [], room, 9.0) == [3]


def test_a_group_goes_on_without_who_was_cancelled_and_anew_where_it_no_longer_fits():
    policy, room = GroupedPolicy(lmcf_groups), Room(capacity=100, workers=2)
    jobs = plain_jobs([4, 5, 6, 7, 8, 9])
    assert policy(jobs, [], room, 0.0) == [0, 1]
    assert policy(jobs[3:], [], room, 0.0) == [3]
    grown = WaitingJob(number=5, memory=99, submitted=0.0)  # measured since
    assert policy([jobs[4], grown], [], room, 0.0) == [4]
    assert policy([grown], [], room, 0.0) == [5]


def test_who_could_not_start_with_his_group_starts_in_it_later():
    policy, room = GroupedPolicy(lmcf_groups), Room(capacity=100, workers=3)
    jobs = plain_jobs([4, 5, 6, 7, 8])
    assert policy(jobs, [], room, 0.0) == [0, 1, 2]
    assert policy(jobs[1:], jobs[:1], room, 0.0) == [1, 2], "one worker was ready"
    assert policy(jobs[2:], jobs[1:2], room, 0.0) == [2], "the first has ended already"
    assert policy(jobs[3:], jobs[1:3], room, 0.0) == [] and policy(jobs[3:], [], room, 0.0) == [3, 4]
