"""Of `gnnsys bench jobs`, policies beside each other without a device: CoGNN's five queues, played through.

How long jobs run alone, how much memory they take and how they disturb each other is computed from their sizes for the
paper's V100 (`task_costs.py`); 2 workers, 26 GB. The paper's Table V stands beside it. No policy knows how long jobs
run, but for two sides: the shortest first, and ours with a history of the same jobs, which also knows who should not
share.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.jobs.cognn_queues import PUBLISHED_ORDERS, TABLE_FIVE, QueuedTask, published, random_orders
from gnnsys.bench.jobs.task_costs import cost_of, shared_speeds
from gnnsys.bench.workload import FULL, Workload
from gnnsys.jobs import (
    ContinuousPolicy,
    Policy,
    ReplayedQueue,
    Room,
    SharingRecord,
    WaitingJob,
    find_policy,
    replay_queue,
)

ROOM = Room(capacity=26 * 2**30, workers=2)  # V-G.1: 6 of 32 GB are reserved
IN_TURN, ORACLE, HISTORY = "one after the other", "shortest first, lengths known", "gnnsys, with a history"
FIGURES = {"completion": "mean_completion", "queueing": "mean_queueing", "makespan": "makespan"}
NEAR_ORACLE, NO_SLOWER = 1 / 1.15, 0.97
_METHODS = {IN_TURN: "PipeSwitch", "base": "Base", "lmcf": "LMCF", "bmc": "BMC"}  # in Table V


def policy_of(side: str, tasks: Sequence[QueuedTask]) -> Policy:
    if side == HISTORY:
        return ContinuousPolicy(pays=record_of(tasks).pays)
    if side == ORACLE:
        return ContinuousPolicy(patience=float("inf"))
    return find_policy({OURS: "continuous", IN_TURN: "fifo"}.get(side, side))


def record_of(tasks: Sequence[QueuedTask]) -> SharingRecord:
    """What would have been measured of all pairs."""
    costs = {task.name: cost_of(task) for task in tasks}
    pairs = combinations(sorted(costs), 2)
    return SharingRecord({pair: sum(shared_speeds([costs[name] for name in pair])) for pair in pairs})


def replay_tasks(tasks: Sequence[QueuedTask], side: str, room: Room = ROOM) -> ReplayedQueue:
    """A queue whose jobs are all submitted at once, in this order."""
    costs = dict(enumerate(map(cost_of, tasks)))
    jobs = [
        WaitingJob(
            number=number,
            memory=cost.memory,
            submitted=0.0,
            seconds=cost.seconds if side in (ORACLE, HISTORY) else None,
            kind=tasks[number].name,
        )
        for number, cost in costs.items()
    ]
    seconds = {number: cost.seconds for number, cost in costs.items()}

    def speeds(together: Sequence[WaitingJob]) -> list[float]:
        return shared_speeds([costs[job.number] for job in together])

    return replay_queue(jobs, seconds, policy_of(side, tasks), room, speeds)


def minutes(replays: Sequence[ReplayedQueue], figure: str) -> float:
    """The mean over orders of the same queue."""
    return statistics.mean(getattr(each, FIGURES[figure]) for each in replays) / 60


def replayed_queues(work: Workload) -> Iterator[Case]:
    """Mean completion, mean queueing and makespan of each queue, in the published order and in random ones."""
    for queue in PUBLISHED_ORDERS if work.sizes is FULL else ("Mix",):
        for order in ("published order", "random orders"):
            for figure in FIGURES:
                yield _case(work, queue, order, figure)


def _case(work: Workload, queue: str, order: str, figure: str) -> Case:
    def sides() -> dict[str, Side]:
        orders = [published(queue)] if order == "published order" else random_orders(queue)

        def told(side: str) -> float:
            name = f"jobs/replay/{queue}, {order}, {side}"
            return minutes(work.once(name, lambda: [replay_tasks(tasks, side) for tasks in orders]), figure)

        found = {name: Side(partial(told, name)) for name in (OURS, *_METHODS, ORACLE, HISTORY)}
        for name, method in _METHODS.items():
            found[_paper(name)] = Side(partial(getattr(TABLE_FIVE[method], figure).get, queue))
        return found

    target = {IN_TURN: NO_SLOWER} if figure == "makespan" else {ORACLE: NEAR_ORACLE} if figure == "completion" else {}
    versus = [Versus((name,), target.get(name)) for name in (*_METHODS, ORACLE, HISTORY)]
    if order == "published order":
        versus += [Versus((_paper(name),)) for name in (IN_TURN, "lmcf")]
    return Case(f"jobs/replay/{queue}, {order}, {figure}", value("min"), sides, tuple(versus), repeats=1)


def _paper(side: str) -> str:
    return f"{side}, Table V"


BENCHMARKS: list[Benchmark] = [replayed_queues]
