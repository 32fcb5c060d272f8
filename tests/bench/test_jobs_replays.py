"""CoGNN's queues played through: they are the paper's, and what is computed of them is near its Table V."""

from __future__ import annotations

from collections import Counter

import pytest

from gnnsys.bench import SuiteOptions, run_suite
from gnnsys.bench.case import OURS
from gnnsys.bench.jobs.cognn_queues import KINDS, PUBLISHED_ORDERS, TABLE_FIVE, published, random_orders
from gnnsys.bench.jobs.replays import BENCHMARKS, FIGURES, HISTORY, IN_TURN, ORACLE, ROOM, minutes, replay_tasks
from gnnsys.bench.jobs.table_four import KINDS as MODELS
from gnnsys.bench.jobs.task_costs import cost_of


@pytest.mark.parametrize("queue", PUBLISHED_ORDERS)
def test_a_queue_has_twenty_jobs_that_fit_and_begins_with_a_large_one(queue: str):
    tasks = published(queue)
    assert len(set(tasks)) == 20 and {KINDS[task.kind] for task in tasks} <= set(MODELS)
    memory = [cost_of(task).memory for task in tasks]
    assert max(memory) < ROOM.capacity and max(memory) in memory[:2]
    for order in random_orders(queue):
        assert Counter(order) == Counter(tasks) and order != tasks
    assert random_orders(queue) == random_orders(queue)


@pytest.mark.parametrize("queue", [queue for queue in PUBLISHED_ORDERS if queue != "GIN"])
def test_one_after_the_other_takes_what_table_v_says(queue: str):
    found = replay_tasks(published(queue), IN_TURN)
    for figure in FIGURES:
        told = getattr(TABLE_FIVE["PipeSwitch"], figure)[queue]
        assert told / 1.15 < minutes([found], figure) < told * 1.15


def test_every_job_is_replayed_once_and_policies_differ_as_in_the_paper():
    tasks = published("Mix")
    found = {side: replay_tasks(tasks, side) for side in (OURS, IN_TURN, "base", "lmcf", "bmc", ORACLE, HISTORY)}
    assert all(sorted(job.number for job in each.jobs) == list(range(20)) for each in found.values())
    completion = {side: each.mean_completion for side, each in found.items()}
    assert completion["lmcf"] < completion["base"] / 3 and completion["bmc"] > completion["base"] / 2
    assert completion[OURS] <= completion["lmcf"] and completion[HISTORY] < completion[ORACLE]


def test_the_quick_suite_runs_and_shows_table_v():
    report = run_suite("jobs", BENCHMARKS, SuiteOptions(quick=True), show=lambda line: None)
    assert report.failures() == [] and len(report.samples) == 6
    first = report.samples["jobs/replay/Mix, published order, completion"]
    assert first["lmcf, Table V"] == [1.15] and first[OURS][0] > 0
