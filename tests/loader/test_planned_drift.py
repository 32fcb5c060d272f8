"""A loader whose batches drift from what its plan measured tries again, says so, and makes the same batches."""

import pytest
import torch

from gnnsys.planning import DriftWatch, ExecutionPlan, TurnClock
from tests.loader.planned_ways import WAYS, Clock, are_same, node_loader, short, tensors_of, with_ways

BEFORE, AFTER = {0: 3.0, 1: 1.0, 2: 2.0}, {0: 3.0, 1: 4.0, 2: 2.0}  # way 1 turns slow


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(DriftWatch, "window", 2)


def _loader(**options):
    return node_loader(**{"input_nodes": torch.arange(8 * 12), **options})


def _ways():
    return short(with_ways(make=_loader))


def _chosen(clock, loader, way=1):
    clock.epochs(loader, BEFORE, 9, until=lambda: loader.plan.chosen is not None)
    assert loader.plan.chosen == way
    return loader


def _drifted(clock, loader):
    """A loader whose next epoch tries again."""
    clock.epochs(_chosen(clock, loader), BEFORE, 2)
    clock.epochs(loader, AFTER, 1)
    assert loader.plan.chosen == 1 and not loader.plan.drifts
    return loader


def _tried_again(clock, loader):
    clock.epochs(_drifted(clock, loader), AFTER, 9, until=lambda: loader.plan.chosen is not None)
    return loader


def test_ways_are_tried_again_at_the_next_epoch_and_another_one_stays(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _tried_again(clock, _ways())
    plan = loader.plan
    assert plan.chosen == 2 and [(drift.epoch, drift.way) for drift in plan.drifts] == [(4, 1)]
    assert {way: plan.trial.median(way) for way in range(3)} == pytest.approx(AFTER)
    told = "tried again from epoch 4 on: as given, threads: 2 loading took 4000.0 ms a batch in place of 1000.0"
    assert told in plan.report().splitlines()
    assert ExecutionPlan.from_json(plan.to_json()).report() == plan.report()
    assert set(loader._execution._loaders) == {2}
    loader.close()


def test_batches_are_the_same_before_during_and_after(monkeypatch):
    clock, plain = Clock(monkeypatch), _loader()
    loader = _drifted(clock, _ways())
    for _ in range(loader.epoch):
        for _ in plain:
            pass
    for _ in range(4):
        ours = []
        for batch in loader:
            ours.append(tensors_of(batch))
            clock.train(loader, AFTER)
        assert are_same(ours, [tensors_of(batch) for batch in plain])
    assert loader.plan.chosen == 2
    loader.close()


def test_what_happens_between_epochs_is_no_drift(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _chosen(clock, _ways())
    for _ in range(6):
        clock.epochs(loader, BEFORE, 1)
        clock.now += 1e6
    assert not loader.plan.drifts
    loader.close()


def test_a_model_that_got_bigger_is_tried_once(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _chosen(clock, _ways())
    clock.epochs(loader, BEFORE, 3)
    clock.epochs(loader, {way: 10 * seconds for way, seconds in BEFORE.items()}, 12)
    assert loader.plan.chosen == 1 and len(loader.plan.drifts) == 1
    loader.close()


def test_a_plan_that_was_given_is_the_users_word(monkeypatch):
    clock, tried = Clock(monkeypatch), _ways()
    tried.plan.chosen = 1
    loader = _loader(execution=tried.plan)
    clock.epochs(loader, BEFORE, 2)
    clock.epochs(loader, AFTER, 3)
    assert loader.plan.chosen == 1 and not loader.plan.drifts
    loader.close()


def test_nothing_is_tried_again_where_no_other_way_can_be_gone(monkeypatch):
    clock, loader = Clock(monkeypatch), _ways()
    for way in (1, 2):
        loader.plan.refuse(way, "out of memory")
    clock.epochs(loader, BEFORE, 5)
    clock.epochs(loader, {0: 30.0}, 3)
    assert loader.plan.chosen == 0 and not loader.plan.drifts
    loader.close()


def test_epochs_that_are_always_broken_off_are_watched_too(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _chosen(clock, _ways())
    for level in (BEFORE, AFTER):
        for _ in range(9):
            for number, _ in enumerate(loader):
                clock.train(loader, level)
                if number == 6:
                    break
            clock.now += 1e6
    assert [drift.way for drift in loader.plan.drifts] == [1]
    assert loader.plan.drifts[0].found == pytest.approx(4.0)
    loader.close()


def test_no_device_is_waited_for_while_a_chosen_way_is_watched(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _chosen(clock, _ways())
    by_host = []
    monkeypatch.setattr(TurnClock, "_mark", lambda one: by_host.append(one._by_host) or clock.now)
    loader._execution._clock._is_gpu = True
    clock.epochs(loader, BEFORE, 3)
    assert all(by_host) and by_host and not loader.plan.drifts
    clock.epochs(loader, AFTER, 4)
    assert not all(by_host), "turns are measured by the device"
    loader.close()


@pytest.mark.parametrize("stop", [0, 5])
def test_a_run_that_is_killed_while_it_tries_again_goes_on_as_it_was(monkeypatch, stop):
    clock = Clock(monkeypatch)
    loader = _drifted(clock, _ways())
    epoch = iter(loader)
    for _ in range(stop):
        next(epoch)
        clock.train(loader, AFTER)
    state = loader.state_dict()
    rest = []
    for batch in epoch:
        rest.append(tensors_of(batch))
        clock.train(loader, AFTER)
    resumed = _ways()
    resumed.load_state_dict(state)
    ours = []
    for batch in resumed:
        ours.append(tensors_of(batch))
        clock.train(resumed, AFTER)
    assert are_same(ours, rest)
    clock.epochs(resumed, AFTER, 3)
    assert resumed.plan.chosen == 2 and resumed.plan.drifts == loader.plan.drifts
    loader.close()
    resumed.close()


def test_who_resumes_knows_what_batches_took_and_how_long_to_wait(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _tried_again(clock, _ways())
    resumed = _ways()
    resumed.load_state_dict(loader.state_dict())
    assert resumed._execution._watch == loader._execution._watch
    assert resumed._execution._watch.rest == 1
    loader.close()


def test_a_state_of_a_version_without_drift_is_gone_on_with(monkeypatch):
    clock = Clock(monkeypatch)
    loader = _chosen(clock, _ways())
    state = loader.state_dict()
    del state["execution"]["watch"], state["execution"]["plan"]["drifts"]
    resumed = _ways()
    resumed.load_state_dict(state)
    assert resumed.plan.chosen == 1 and resumed._execution._watch.high == pytest.approx(1.0)
    clock.epochs(resumed, BEFORE, 2)
    clock.epochs(resumed, AFTER, 5)
    assert resumed.plan.chosen == 2
    loader.close()
    resumed.close()


def test_a_way_that_was_refused_is_not_tried_again(monkeypatch):
    clock, loader = Clock(monkeypatch), _ways()
    loader.plan.refuse(2, "out of memory")
    loader = _tried_again(clock, loader)
    assert loader.plan.chosen == 0 and list(loader.plan.trial.seconds) == [0, 1] and len(WAYS) == 3
    loader.close()


def test_ways_that_were_far_slower_are_not_tried_again(monkeypatch):
    clock, loader = Clock(monkeypatch), _ways()
    seconds = {0: 50.0, 1: 1.0, 2: 1.9}
    clock.epochs(loader, seconds, 3)
    clock.epochs(loader, seconds | {1: 3.0}, 5)
    plan = loader.plan
    assert plan.chosen == 2 and plan.trial.tried == [1, 2] and plan.trial.median(0) == pytest.approx(50.0)
    lines = plan.report().splitlines()
    assert lines[0].endswith("measured 50000.0 ms a batch, loading and training, not tried again")
    assert lines[-1].endswith("1.58 times as fast as before, as given, threads: 2 loading")
    loader.close()


def test_where_no_other_way_is_near_what_batches_take_is_what_is_expected(monkeypatch):
    clock, loader = Clock(monkeypatch), _ways()
    seconds = {0: 50.0, 1: 1.0, 2: 40.0}
    clock.epochs(loader, seconds, 3)
    clock.epochs(loader, seconds | {1: 1.5}, 4)
    assert loader.plan.chosen == 1 and not loader.plan.drifts
    assert loader._execution._watch.high == pytest.approx(1.5)
    loader.close()


def test_a_state_of_a_version_that_counted_batches_over_all_rounds_is_gone_on_with(monkeypatch):
    clock = Clock(monkeypatch)
    loader = with_ways()
    epoch = iter(loader)
    for _ in range(66):  # in the first turn of the second round
        next(epoch)
        clock.train(loader, {0: 1.5, 1: 1.0, 2: 1.2})
    state = loader.state_dict()
    execution = state["execution"]
    assert execution["plan"]["trial"]["round"] == 1 and execution["num_tried"] == 6
    del execution["plan"]["trial"], execution["watch"], execution["plan"]["drifts"]
    execution["num_tried"] = 66
    resumed = with_ways()
    resumed.load_state_dict(state)
    assert resumed.plan.trial.round == 1 and resumed._execution._num_tried == 0
    loader.close()
