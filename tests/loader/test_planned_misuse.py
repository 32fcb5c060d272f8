"""Plans under a user's hands: errors in the loop, loaders that are closed or shared, states that are damaged."""

import os
import random
import signal
from itertools import islice

import pytest
import torch

from gnnsys.loader.planned import check_room
from gnnsys.pipeline import Pipeline
from gnnsys.planning import CACHED, DriftWatch, ExecutionPlan, Way
from tests.loader.planned_ways import WAYS, Clock, are_same, node_loader, short, tensors_of, until_chosen, with_ways

SECONDS = {0: 3.0, 1: 1.0, 2: 2.0}


def test_an_error_in_the_users_loop_costs_a_turn_and_nothing_else(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    for fails_at in (3, 9, 30, 70):
        with pytest.raises(ZeroDivisionError):
            for number, _ in enumerate(loader):
                clock.train(loader, SECONDS)
                if number == fails_at:
                    clock.now += 1e6  # until somebody has seen it
                    raise ZeroDivisionError
    clock.epochs(loader, SECONDS, 3)
    trial = loader.plan.trial
    assert loader.plan.chosen == 1 and {way: trial.median(way) for way in range(3)} == pytest.approx(SECONDS)
    loader.close()


def test_an_error_while_a_batch_is_made_is_the_users_to_see_and_the_turn_begins_anew(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    real, fails = Pipeline.__next__, [8]

    def failing(pipeline):
        if fails and pipeline.position == fails[0]:
            fails.clear()
            raise OSError("a disk is gone")
        return real(pipeline)

    monkeypatch.setattr(Pipeline, "__next__", failing)
    with pytest.raises(OSError, match="a disk is gone"):
        for _ in loader:
            clock.train(loader, SECONDS)
    assert loader._execution._num_tried == 0
    clock.epochs(loader, SECONDS, 1)
    assert loader.plan.chosen == 1
    loader.close()


def test_a_second_iteration_ends_the_first_and_costs_a_turn(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    first = iter(loader)
    for _ in range(20):
        next(first)
        clock.train(loader, SECONDS)
    second = iter(loader)
    assert next(first, None) is None
    told = [tensors_of(batch) for batch in second]
    plain = node_loader()
    next(iter(plain))
    assert are_same(told, [tensors_of(batch) for batch in plain])
    loader.close()


def test_iterators_that_are_dropped_in_mid_turn_leave_the_batches_of_a_loader_without_a_plan():
    planning, plain = with_ways(), node_loader()
    for count in (1, 14, 27, 2, 50):
        ours = [tensors_of(batch) for batch in islice(planning, count)]
        assert are_same(ours, [tensors_of(batch) for batch in islice(plain, count)])
    planning.close()


def test_an_iteration_over_a_loader_that_was_closed_says_so():
    loader = with_ways()
    epoch = iter(loader)
    for _ in range(20):
        next(epoch)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(epoch)
    assert len(list(loader)) == len(loader)
    loader.close()


def test_inputs_that_are_asked_for_by_hand_are_no_batches_of_the_trial():
    loader, plain = with_ways(), node_loader()
    epoch = iter(loader)
    for _ in range(20):
        next(epoch)
    tried = loader._execution._num_tried
    ids = torch.tensor([5, 3])
    assert are_same([tensors_of(loader(ids))], [tensors_of(plain(ids))])
    assert loader._execution._num_tried == tried == 20
    loader.close()


def test_no_batches_at_all_are_no_trial():
    loader = node_loader(input_nodes=torch.arange(5), drop_last=True, execution="auto")
    assert len(loader) == 0 and list(loader) == []
    loader.load_state_dict(loader.state_dict())
    loader.close()


def test_two_loaders_of_one_plan_do_not_write_into_it():
    plan = with_ways().plan
    one, other = node_loader(execution=plan), node_loader(execution=plan)
    until_chosen(one)
    assert other.plan.chosen is None
    assert not plan.trial.seconds and not other.plan.trial.seconds
    one.close()


def test_a_trial_that_was_not_over_when_its_plan_was_saved_begins_anew():
    loader = with_ways()
    for _ in islice(loader, 40):
        pass
    again = node_loader(execution=loader.plan)
    for _ in again:
        pass
    assert all(len(turns) <= again.plan.trial.round for turns in again.plan.trial.seconds.values())
    loader.close()
    again.close()


@pytest.mark.parametrize("is_making", [True, False])
def test_a_chosen_way_that_runs_out_of_memory_is_left_and_the_report_says_so(monkeypatch, is_making):
    given = with_ways().plan
    loader = node_loader(execution=ExecutionPlan(WAYS, made_for=given.made_for, chosen=1))
    error, real = MemoryError("no room\nat all"), Pipeline.__next__
    if is_making:
        monkeypatch.setattr(loader._execution, "_make", _failing(loader._execution._make, error))
    else:
        monkeypatch.setattr(
            Pipeline,
            "__next__",
            lambda self: _raise(error) if loader._execution._current == 1 and self.position > 3 else real(self),
        )
    assert are_same([tensors_of(batch) for batch in loader], [tensors_of(batch) for batch in node_loader()])
    lines = loader.plan.report().splitlines()
    assert "not possible: no room" in lines[1]
    assert lines[-1] == "chosen: as given, as given, threads: 2 loading was chosen, and cannot be gone any more"
    loader.close()


def _failing(make, error):
    return lambda way: _raise(error) if way.loading_threads == 2 else make(way)


def _raise(error):
    raise error


def test_memory_that_is_not_even_there_without_a_plan_is_the_users_to_hear_of(monkeypatch):
    loader = with_ways([Way(), Way(loading_threads=2)])
    monkeypatch.setattr(Pipeline, "__next__", lambda self: _raise(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        next(iter(loader))
    loader.close()


def test_a_plan_of_the_users_is_not_overruled_by_a_state():
    loader = with_ways()
    for _ in islice(loader, 40):
        pass
    state = loader.state_dict()
    chosen = node_loader(execution=ExecutionPlan(WAYS, made_for=loader.plan.made_for, chosen=2))
    chosen.load_state_dict(state)
    rest = [tensors_of(batch) for batch in chosen]
    assert chosen.plan.chosen == 2 and chosen._execution._current == 2
    plain = node_loader()
    assert are_same(rest, [tensors_of(batch) for batch in plain][40:])
    loader.close()
    chosen.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: None,
        lambda state: [],
        lambda state: {},
        lambda state: state | {"plan": None},
        lambda state: state | {"plan": "x" * 5000},
        lambda state: state | {"plan": state["plan"] | {"chosen": 99}},
        lambda state: state | {"plan": state["plan"] | {"chosen": "1"}},
        lambda state: state | {"plan": state["plan"] | {"chosen": True}},
        lambda state: state | {"plan": state["plan"] | {"seconds": {"7": [1.0]}}},
        lambda state: state | {"plan": state["plan"] | {"seconds": {"0": ["slow"]}}},
        lambda state: state | {"plan": state["plan"] | {"seconds": {"0": [float("nan")]}}},
        lambda state: state | {"plan": state["plan"] | {"seconds": {"first": [1.0]}}},
        lambda state: state | {"plan": state["plan"] | {"refused": {"-1": "no"}}},
        lambda state: state | {"plan": state["plan"] | {"refused": {"0": "no"}}},
        lambda state: state | {"plan": state["plan"] | {"drifts": [{}]}},
        lambda state: state | {"plan": state["plan"] | {"drifts": 3}},
        lambda state: state | {"plan": state["plan"] | {"made_for": 3}},
        lambda state: state | {"plan": state["plan"] | {"trial": None}},
        lambda state: state | {"plan": state["plan"] | {"trial": {"tried": [0, 7], "playing": [0], "round": 1}}},
        lambda state: state | {"plan": state["plan"] | {"trial": {"tried": [0, 1], "playing": [2], "round": 1}}},
        lambda state: state | {"plan": state["plan"] | {"trial": {"tried": [], "playing": [], "round": 1}}},
        lambda state: state | {"plan": state["plan"] | {"trial": {"tried": [0], "playing": [0], "round": 9}}},
        lambda state: state | {"num_tried": -13},
        lambda state: state | {"num_tried": "13"},
        lambda state: state | {"num_tried": None},
        lambda state: state | {"watch": {}},
        lambda state: state | {"watch": state["watch"] | {"rest": -1}},
        lambda state: state | {"watch": state["watch"] | {"high": "high"}},
    ],
)
def test_a_damaged_state_is_refused_in_one_line_and_changes_nothing(damage):
    loader = with_ways()
    state = loader.state_dict()
    with pytest.raises(ValueError) as error:
        loader.load_state_dict(state | {"batch": 5, "execution": damage(state["execution"])})
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500
    assert loader.state_dict() == state


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b'{"version": 1}', b'{"version": 9}'])
def test_a_file_that_is_no_plan_is_refused_in_one_line_that_names_it(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json: ") as error:
        ExecutionPlan.load(str(path))
    assert len(str(error.value).splitlines()) == 1


def test_an_epoch_that_is_shorter_than_a_turn_is_tried_over_several(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways(input_nodes=torch.arange(8 * 5))
    clock.epochs(loader, SECONDS, 30, until=lambda: loader.plan.chosen is not None)
    assert loader.plan.chosen == 1
    loader.close()


def test_a_forked_process_has_threads_of_its_own():
    loader, expected = with_ways(), [tensors_of(batch) for batch in node_loader()]
    epoch = iter(loader)
    for _ in range(20):
        next(epoch)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if are_same([tensors_of(next(epoch))], expected[20:21]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert are_same([tensors_of(batch) for batch in epoch], expected[20:])
    loader.close()


def test_a_way_for_which_a_device_has_no_room_any_more_is_not_begun(monkeypatch):
    way, device = Way(place=CACHED, device_bytes=1000), torch.device("cpu")
    monkeypatch.setattr("gnnsys.store.memory_budget.free_device_memory", lambda device: 1000)
    check_room(way, device)
    monkeypatch.setattr("gnnsys.store.memory_budget.free_device_memory", lambda device: 999)
    check_room(way, None)
    with pytest.raises(MemoryError, match="takes 1,000 bytes of the device, and 999 are free now"):
        check_room(way, device)


@pytest.mark.parametrize(("num_ranks", "cores"), [("1", 8), ("2", 4), ("8", 1)])
def test_ranks_of_a_machine_share_its_cores(monkeypatch, num_ranks, cores):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr("gnnsys.loader.planned.num_usable_cores", lambda: 8)
    ways = node_loader(execution="auto").plan.ways[1:]
    assert ways and all(way.loading_threads <= cores and way.compute_threads is None for way in ways)


def test_a_state_of_ways_that_are_not_possible_here_has_the_trial_begin_anew(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    for _ in islice(loader, 60):
        clock.train(loader, SECONDS)
    other = with_ways([Way(), Way(place=CACHED)])
    loader.load_state_dict(other.state_dict())
    clock.epochs(loader, SECONDS, 2)
    assert loader.plan.chosen == 1 and [len(loader.plan.trial.seconds[way]) for way in range(3)] == [2, 2, 2]
    loader.close()


@pytest.mark.parametrize("across_epochs", [True, False])
def test_batches_are_the_same_whatever_happens_in_whatever_order(monkeypatch, across_epochs):
    """Epochs that are left, states that are loaded, loaders that are closed, batches that turn slow and fast."""
    monkeypatch.setattr(DriftWatch, "window", 2)
    chance, clock, nodes = random.Random(7), Clock(monkeypatch), torch.arange(8 * 12)
    plain = node_loader(input_nodes=nodes)
    expected = [[tensors_of(batch) for batch in plain] for _ in range(41)]

    def make():
        return short(with_ways(input_nodes=nodes, across_epochs=across_epochs), rounds=2)

    loader, num_drifts = make(), 0
    for _ in range(40):
        if chance.random() < 0.1:
            state = loader.state_dict()
            if chance.random() < 0.5:
                loader.close()
            loader = make()
            loader.load_state_dict(state)
        level = chance.choice([1.0, 1.0, 2.0, 8.0])
        seconds = {0: 3.0, 1: level, 2: 2.0}
        epoch = iter(loader)
        at = loader.state_dict()["batch"]
        for number, batch in zip(range(at, at + chance.choice([4, 12, 12, 12])), epoch, strict=False):
            assert are_same([tensors_of(batch)], [expected[loader.epoch][number]])
            clock.train(loader, seconds)
        num_drifts = max(num_drifts, len(loader.plan.drifts))
    assert num_drifts > 0, "ways were tried again"
    loader.close()
