"""CoGNN's policies (IV-D): jobs are put into groups, and a group starts when the one before it has ended as a whole.

All three pack greedily, under the safety condition and with at most as many jobs as there are workers. They differ in
the order in which they look at jobs: Base as they came, LMCF the smallest memory first, BMC by turns the smallest and
the largest. The loop is that of Algorithm 1, where a group stays below the capacity: `>=` ends it.

With memory 4, 1, 3, 2 of 10 and two workers:

>>> jobs = [WaitingJob(number=size, memory=size, submitted=at) for at, size in enumerate((4, 1, 3, 2))]
>>> for grouping in (base_groups, lmcf_groups, bmc_groups):
...     [[job.number for job in group] for group in grouping(jobs, Room(capacity=10, workers=2))]
[[4, 1], [3, 2]]
[[1, 2], [3, 4]]
[[1, 4], [2, 3]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gnnsys.jobs.policies.waiting_jobs import Room, WaitingJob, by_arrival, fits, memory_of

Grouping = Callable[[Sequence[WaitingJob], Room], list[list[WaitingJob]]]
"""(jobs, room) -> groups in the order in which they run; every job is in one of them."""


def base_groups(jobs: Sequence[WaitingJob], room: Room) -> list[list[WaitingJob]]:
    """In the order of submission."""
    return _pack(sorted(jobs, key=by_arrival), room)


def lmcf_groups(jobs: Sequence[WaitingJob], room: Room) -> list[list[WaitingJob]]:
    """Lowest memory consumption first."""
    return _pack(_ascending(jobs), room)


def bmc_groups(jobs: Sequence[WaitingJob], room: Room) -> list[list[WaitingJob]]:
    """Balanced memory consumption, Algorithm 1: small and large ones by turns."""
    return _pack(_from_both_ends(_ascending(jobs)), room)


def _ascending(jobs: Iterable[WaitingJob]) -> list[WaitingJob]:
    """By what each takes when it runs alone; of equals the first to come."""
    return sorted(jobs, key=lambda job: (memory_of([job]), by_arrival(job)))


def _from_both_ends(ascending: Iterable[WaitingJob]) -> Iterator[WaitingJob]:
    ends = deque(ascending)
    for i in range(len(ends)):
        yield ends.pop() if i % 2 == 1 else ends.popleft()


def _pack(order: Iterable[WaitingJob], room: Room) -> list[list[WaitingJob]]:
    """Lines 12 to 19 of Algorithm 1. A job that is too large for the capacity has a group of its own, as there."""
    groups = list[list[WaitingJob]]()
    for job in order:
        if groups and _may_join(job, groups[-1], room):
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups


def _may_join(job: WaitingJob, group: Sequence[WaitingJob], room: Room) -> bool:
    if len(group) == room.workers or job.is_alone or group[0].is_alone:
        return False
    return memory_of([*group, job]) < room.capacity


class GroupedPolicy:
    """The policy of a grouping: the next group starts when nothing runs.

    A queue is grouped as a whole, as in the paper, and anew when a job has come that no group has. Those of a group
    that could not start with the others, for want of a worker, start when the policy is asked again. What was cancelled
    meanwhile is left out of its group. A job that does not fit the room alone is passed over.
    """

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping
        self._planned = deque[list[int]]()
        self._current = list[int]()

    def __call__(
        self, waiting: Sequence[WaitingJob], running: Sequence[WaitingJob], room: Room, now: float
    ) -> list[int]:
        jobs = {job.number: job for job in waiting}
        late = [jobs[number] for number in self._current if number in jobs]
        is_ours = all(job.number in self._current for job in running)
        if late and is_ours and fits([*running, *late], room):
            return [job.number for job in late]
        if running or not waiting:
            return []
        group = self._next_group(jobs) if jobs.keys() <= {each for group in self._planned for each in group} else []
        if not group or not fits(group, room):
            self._planned = deque([job.number for job in group] for group in self._grouping(waiting, room))
            group = self._next_group(jobs)
            while group and not fits(group, room):
                group = self._next_group(jobs)
        self._current = [job.number for job in group]
        return list(self._current)

    def _next_group(self, jobs: Mapping[int, WaitingJob]) -> list[WaitingJob]:
        """Takes the first group of which anybody still waits; empty where none is left."""
        while self._planned:
            group = [jobs[number] for number in self._planned.popleft() if number in jobs]
            if group:
                return group
        return []
