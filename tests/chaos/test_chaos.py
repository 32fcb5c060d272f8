"""A job of two hosts is killed in parts and ends as if nothing had been. A selection of what `make chaos` runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.chaos.job import NUM_RANKS, NUM_SEEDS, Ended, Plan, compare, judge, place, whole
from tests.chaos.runs import NUM_EPOCHS, NUM_RUNS, check_lives, draw, perform
from tests.support.faults import TARGETS

SHARD = draw(0)  # a shard with trained rows
SELECTION = [  # and epochs
    pytest.param(replace(SHARD, faults=(replace(SHARD.faults[0], moment="step:8"),)), 2, id="shard"),
    pytest.param(SHARD, NUM_EPOCHS, id="shard, later", marks=pytest.mark.long),
    # a trainer, and again while it resumes; a trainer dies in examples, too
    pytest.param(draw(4), NUM_EPOCHS, id="trainer", marks=pytest.mark.long),
    # a leader during a save: checkpoint/test_crash.py has all moments
    pytest.param(draw(20), NUM_EPOCHS, id="leader", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with place(tmp_path_factory.mktemp("chaos")) as made:
        yield made


@pytest.mark.parametrize(("run", "epochs"), SELECTION)
def test_a_job_that_is_killed_ends_with_every_batch_once_and_every_bit_the_same(hosts, run, epochs):
    ended, problems = perform(hosts, run, epochs)
    assert not problems, f"{run}: {problems}\n{ended.output[-6000:]}"


def test_a_run_in_which_nobody_died_is_noticed():
    costly, free = draw(0), next(run for run in map(draw, range(NUM_RUNS)) if run.costs_nothing)
    calm = ended((0, ALL))
    assert "nobody began again" in check_lives(costly, calm)[0]
    assert "nobody began again" in check_lives(free, calm)[0]
    calm.logs[0].append({"shard_lives": [1, 1]})
    assert check_lives(free, calm) == []
    assert check_lives(costly, ended((0, range(1, 8)), (5, ALL))) == []


def test_the_runs_of_make_chaos_kill_each_target_ten_times_some_during_a_save():
    runs = [draw(seed) for seed in range(NUM_RUNS)]
    assert runs == [draw(seed) for seed in range(NUM_RUNS)]
    killed = [run.faults[-1].target for run in runs]
    assert [killed.count(target) for target in TARGETS] == [10, 10, 10]
    moments = [fault.moment.split(":")[0] for run in runs for fault in run.faults]
    assert len(set(moments) - {"step", "open", "resume-again"}) >= 4, "stages of a save"
    assert any(not run.trains_rows for run in runs) and any(run.own_disks for run in runs)


def log(*lives: tuple[int, range]) -> list[dict]:
    """What a rank writes that has as many lives: each with the step it begins after, and the steps it does."""
    lines = []
    for resumed, steps in lives:
        lines += [{"life": 1}, {"resumed": resumed}]
        lines += [{"step": step, "epoch": 0, "seeds": [step]} for step in steps]
    return lines


def ended(*lives: tuple[int, range], bit: float = 0.0) -> Ended:
    """A job of one epoch whose ranks did alike, but for the seeds: rank 0 had all of them."""
    logs = [log(*lives) for _ in range(NUM_RANKS)]
    for lines in logs[1:]:
        for line in lines:
            line.pop("seeds", None)
            if "step" in line:
                line["seeds"] = []
    ends = [{"model": {"weight": torch.tensor([1.0, bit])}} for _ in range(NUM_RANKS)]
    return Ended(Plan("", "", epochs=1), [0, 0], 1.0, "", logs, ends)


ALL = range(1, NUM_SEEDS + 1)


def test_what_was_rolled_back_and_done_again_counts_once():
    assert judge(ended((0, range(1, 8)), (5, range(6, NUM_SEEDS + 1))), ended((0, ALL))) == []


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (ended((0, range(1, 8)), (5, range(7, NUM_SEEDS + 1))), "lost or repeated steps"),
        (ended((0, range(1, 8)), (7, range(7, NUM_SEEDS + 1))), "lost or repeated steps"),
        (ended((0, range(1, NUM_SEEDS))), "epoch 0 had 218 seeds"),
        (ended((0, ALL), bit=-0.0), "rank 0 ended otherwise than in the unbroken job: /model/weight"),
    ],
)
def test_a_batch_lost_or_repeated_and_a_single_bit_are_noticed(broken, problem):
    assert any(problem in found for found in judge(broken, ended((0, ALL))))


def test_a_job_that_hangs_or_fails_and_a_fault_that_did_not_happen_are_noticed(tmp_path):
    job = ended((0, ALL))
    job.codes = [0, None]
    assert "hung" in whole(job)[0]
    job.codes = [0, 1]
    assert "ended with" in whole(job)[0]
    job = ended((0, ALL))
    job.plan = Plan("", str(tmp_path), (str(draw(0).faults[0]),), epochs=1)
    assert judge(job, ended((0, ALL))) == [f"this fault did not happen: {draw(0).faults[0]}"]


def test_values_are_compared_to_the_last_bit_and_by_their_types():
    one = {"a": [torch.tensor([0.0]), 1], "b": torch.ones(2, dtype=torch.bfloat16)}
    assert compare(one, {"a": [torch.tensor([0.0]), 1], "b": torch.ones(2, dtype=torch.bfloat16)}) == []
    assert compare(one, {"a": [torch.tensor([-0.0]), 1.0], "b": torch.ones(2)}) == ["/a/0", "/a/1", "/b"]
    nan = torch.tensor([float("nan")])
    assert compare(nan, nan.clone()) == []
