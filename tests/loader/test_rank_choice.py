"""Ranks choose together by what the slowest took, and nobody waits for anybody."""

import threading

import pytest
import torch
import torch.distributed as dist

from gnnsys.loader.rank_choice import RankChoice, numbered
from gnnsys.planning import ExecutionPlan, Way, WayTrial
from tests.loader.planned_ways import Clock, are_same, node_loader, short, tensors_of, with_ways
from tests.support.processes import run_ranks

SHORT = {"input_nodes": torch.arange(8 * 12)}  # a trial is an epoch
OWN = [{0: 3.0, 1: 1.0, 2: 2.0}, {0: 3.0, 1: 5.0, 2: 2.0}]  # by rank: way 1 is the best of one, and bad for the other


@pytest.fixture
def two_ranks(monkeypatch):
    """Ranks of this process: the one whose number is in the list is who speaks now."""
    store, speaks = dist.HashStore(), [0]
    monkeypatch.setattr(
        RankChoice, "of_process_group", lambda name, told: RankChoice(store, speaks[0], 2, name[-3:], told)
    )
    return speaks


def test_ranks_go_the_way_whose_slowest_rank_is_the_fastest(monkeypatch, two_ranks):
    clock, loaders = Clock(monkeypatch), [short(with_ways(**SHORT)) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        two_ranks[0] = rank
        clock.epochs(loader, OWN[rank], 1)
    assert [loader.plan.chosen for loader in loaders] == [1, 2], "each for itself, while the other has said nothing"
    plain = node_loader(**SHORT)
    for _ in plain:
        pass
    expected = [tensors_of(batch) for batch in plain]
    for loader in loaders:
        assert are_same([tensors_of(batch) for batch in loader], expected)
        assert loader.plan.chosen == 2 and set(loader._execution._loaders) == {2}
        assert loader.plan.reason == "1.50 times as fast as without a plan, by the slowest of 2 ranks"
        loader.close()


def test_a_rank_that_says_nothing_is_not_waited_for(monkeypatch, two_ranks):
    clock, loader = Clock(monkeypatch), short(with_ways(**SHORT))
    clock.epochs(loader, OWN[0], 2)
    assert loader.plan.chosen == 1 and not loader._execution._ranks.is_over
    for _ in range(20):
        loader._execution._agree()
    assert loader._execution._ranks.is_over, "it is not asked for ever"
    loader.close()


def test_all_read_the_same_once_the_last_has_written():
    store = dist.HashStore()
    first = RankChoice(store, 0, 3, "trial", [0])
    second = RankChoice(store, 1, 3, "trial", [1])
    assert first.look() is None and second.look() is None
    third = RankChoice(store, 2, 3, "trial", [2])
    for rank in (third, second, first):
        assert rank.look() == [[0], [1], [2]] and rank.is_over and rank.look() is None


def test_trials_are_told_apart():
    store = dist.HashStore()
    one, other = RankChoice(store, 0, 2, "a", 1), RankChoice(store, 1, 2, "b", 2)
    assert one.look() is None and other.look() is None
    assert numbered("like this") != numbered("like this")
    one.close()
    other.close()


def test_a_store_that_is_gone_or_does_not_answer_is_not_asked_again(monkeypatch):
    monkeypatch.setattr("gnnsys.loader.rank_choice._SECONDS", 0.05)
    gone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", gone.port, is_master=False)
    choice = RankChoice(client, 0, 2, "trial", [])
    del gone
    while not choice.is_over:
        assert choice.look() is None
    choice, stuck = RankChoice(_Stuck(), 0, 2, "trial", []), _Stuck.answers
    assert choice.look() is None and choice.is_over and choice.look() is None
    stuck.set()


class _Stuck(dist.HashStore):
    answers = threading.Event()

    def check(self, keys):
        return self.answers.wait()


def test_a_process_alone_has_nobody_to_choose_with():
    assert RankChoice.of_process_group("trial", []) is None


# By which rule


def _plan(seconds, ways=3, refused=()):
    plan = ExecutionPlan([Way(loading_threads=number or None) for number in range(ways)])
    plan.trial.seconds = {way: list(turns) for way, turns in seconds.items()}
    for way in refused:
        plan.refuse(way, "out of memory")
    plan.choose()
    return plan


def _together(*plans):
    told = [plan.to_json() for plan in plans]
    changed = [plan.choose_together(told) for plan in plans]
    return [plan.chosen for plan in plans], changed


def test_the_slowest_counts_turn_by_turn():
    trials = [WayTrial(2), WayTrial(2)]
    trials[0].seconds = {0: [1.0, 5.0, 3.0], 1: [2.0, 2.0]}
    trials[1].seconds = {0: [4.0, 2.0], 1: [1.0, 3.0, 9.0]}
    assert WayTrial.slowest(trials).seconds == {0: [4.0, 5.0], 1: [2.0, 3.0]}


def test_all_ranks_come_to_the_same_choice():
    one, other = _plan({0: [3.0] * 3, 1: [1.0] * 3, 2: [2.0] * 3}), _plan({0: [3.0] * 3, 1: [2.9] * 3, 2: [2.0] * 3})
    assert (one.chosen, other.chosen) == (1, 2)
    assert _together(one, other) == ([2, 2], [True, False])


def test_without_a_plan_stays_where_that_is_best_for_the_slowest():
    one, other = _plan({0: [3.0] * 3, 1: [1.0] * 3}, 2), _plan({0: [3.0] * 3, 1: [3.5] * 3}, 2)
    assert _together(one, other) == ([0, 0], [True, False])
    assert one.reason == "no other way is faster: the best of them takes 1.17 of its time, by the slowest of 2 ranks"


@pytest.mark.parametrize(
    "other", [_plan({0: [3.0], 1: [9.0]}, ways=2), _plan({0: [3.0], 1: [9.0], 2: [9.0]}, refused=[2])]
)
def test_ranks_with_other_ways_keep_what_they_have_chosen(other):
    one = _plan({0: [3.0], 1: [1.0], 2: [2.0]})
    chosen = other.chosen
    assert _together(one, other) == ([1, chosen], [False, False])
    assert "slowest" not in one.reason


def test_what_is_no_plan_changes_nothing():
    one = _plan({0: [3.0], 1: [1.0], 2: [2.0]})
    assert not one.choose_together([one.to_json(), {"version": 99}]) and one.chosen == 1


PROGRAM = """
import torch
import torch.distributed as dist
from tests.loader.planned_ways import short, with_ways
from gnnsys.planning.execution import turn_clock

class Time:
    now = 0.0
    def perf_counter(self):
        return self.now

turn_clock.time = Time()
dist.init_process_group("gloo")
rank = dist.get_rank()
seconds = [{0: 3.0, 1: 1.0, 2: 2.0}, {0: 3.0, 1: 5.0, 2: 2.0}][rank]
loader = short(with_ways(input_nodes=torch.arange(8 * 12)))
chosen = []
for epoch in range(2 + rank):  # not as many on each
    for batch in loader:
        turn_clock.time.now += seconds[loader._execution._current]
    chosen.append(loader.plan.chosen)
    if epoch == 0:
        dist.barrier()
loader.close()
print(*chosen)
dist.destroy_process_group()
"""


def test_processes_choose_together_by_the_store_of_their_group():
    ranks = run_ranks(PROGRAM, 2)
    assert [rank.stdout.split() for rank in ranks] == [["1", "2"], ["2", "2", "2"]]
