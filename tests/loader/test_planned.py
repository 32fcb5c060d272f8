"""A loader that plans: the same batches to the last bit, the fastest way stays, and who resumes keeps the plan."""

import gc
import threading

import pytest
import torch

import gnnsys
from gnnsys.graph import sbm
from gnnsys.loader import planned
from gnnsys.planning import ExecutionPlan, Way

GRAPH = sbm(1500, avg_degree=8, num_features=8)
WAYS = [Way(), Way(loading_threads=2), Way(loading_threads=0, compute_threads=1)]


def _loader(**options):
    base = {"input_nodes": torch.arange(1200), "batch_size": 8, "shuffle": True, "seed": 3}
    return gnnsys.NeighborLoader(GRAPH, [4, 3], **{**base, **options})


def _with_ways(ways=WAYS, **options):
    """A loader that tries these ways, on whatever machine the test runs."""
    made_for = _loader(**options, execution="auto").plan.made_for
    return _loader(**options, execution=ExecutionPlan(ways, made_for=made_for))


def _told(batch):
    return [batch.x, batch.edge_index, batch.n_id, batch.e_id, batch.y]


def _same(batches, others):
    return all(
        torch.equal(a, b) for one, other in zip(batches, others, strict=True) for a, b in zip(one, other, strict=True)
    )


class Clock:
    """In the place of time: training on a batch takes as long as the way says that made it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(planned.time, "perf_counter", lambda: self.now)

    def train(self, loader, seconds):
        self.now += seconds[loader._execution._current]


def test_batches_are_those_of_a_loader_without_a_plan_during_and_after_the_trial():
    plain, planning = _loader(), _with_ways()
    for _ in range(2):
        assert _same([_told(batch) for batch in planning], [_told(batch) for batch in plain])
    assert planning.plan.chosen is not None
    planning.close()


@pytest.mark.parametrize("fastest", range(len(WAYS)))
def test_the_fastest_way_stays(monkeypatch, fastest):
    clock, loader = Clock(monkeypatch), _with_ways()
    seconds = {way: 1.0 if way == fastest else 2.0 + way for way in range(len(WAYS))}
    used = []
    for _ in loader:
        used.append(loader._execution._current)
        clock.train(loader, seconds)
    trial = loader.plan.trial
    assert used[: trial.num_batches] == [trial.way_of(n) for n in range(trial.num_batches)]
    assert set(used[trial.num_batches :]) == {fastest} and loader.plan.chosen == fastest
    assert {way: trial.median(way) for way in range(len(WAYS))} == pytest.approx(seconds)
    assert f"chosen: {WAYS[fastest].name}" in loader.plan.report()
    loader.close()


def test_what_happens_between_epochs_is_not_measured(monkeypatch):
    clock, loader = Clock(monkeypatch), _with_ways(input_nodes=torch.arange(72))  # 9 batches an epoch
    while loader.plan.chosen is None:
        for _ in loader:
            clock.train(loader, {0: 3.0, 1: 1.0, 2: 2.0})
        clock.now += 1000.0  # validation
    trial = loader.plan.trial
    assert [trial.median(way) for way in range(3)] == pytest.approx([3.0, 1.0, 2.0])
    loader.close()


def test_a_way_that_cannot_be_gone_is_named_and_others_make_its_batches(monkeypatch):
    clock, loader = Clock(monkeypatch), _with_ways()
    make = loader._execution._make

    def refusing(way):
        if way.loading_threads == 2:
            raise RuntimeError("out of memory: tried to allocate\nmore")
        return make(way)

    monkeypatch.setattr(loader._execution, "_make", refusing)
    told = []
    for batch in loader:
        told.append(_told(batch))
        clock.train(loader, {0: 2.0, 2: 1.0})
    assert _same(told, [_told(batch) for batch in _loader()])
    assert loader.plan.trial.refused == {1: "out of memory: tried to allocate"} and loader.plan.chosen == 2
    loader.close()


@pytest.mark.parametrize("stop", [1, 20, 60, 140])
def test_a_run_that_resumes_goes_on_with_its_plan(monkeypatch, stop):
    """In the middle of a turn, between turns, and after the trial."""
    clock, loader = Clock(monkeypatch), _with_ways()
    seconds = {0: 3.0, 1: 1.0, 2: 2.0}
    epoch = iter(loader)
    for _ in range(stop):
        next(epoch)
        clock.train(loader, seconds)
    state = loader.state_dict()
    rest = []
    for batch in epoch:
        rest.append(_told(batch))
        clock.train(loader, seconds)
    resumed = _with_ways()
    resumed.load_state_dict(state)
    assert resumed.plan.to_json() == ExecutionPlan.from_json(state["execution"]["plan"]).to_json()
    told = []
    for batch in resumed:
        told.append(_told(batch))
        clock.train(resumed, seconds)
    assert _same(told, rest)
    assert resumed.plan.chosen == 1
    loader.close()
    resumed.close()


def test_threads_of_torch_are_given_back():
    before, loader = torch.get_num_threads(), _with_ways([Way(), Way(compute_threads=3)])
    during = set()
    for _ in loader:
        during.add(torch.get_num_threads())
    assert during == {before, 3}
    loader.close()
    assert torch.get_num_threads() == before


def test_nothing_of_the_other_ways_is_left():
    loader = _with_ways()
    for _ in loader:
        pass
    loader.close()
    left = [t for t in threading.enumerate() if t.name.startswith("gnnsys-") and "compact" in t.name]
    assert len(loader._execution._loaders) == 1
    del loader
    gc.collect()
    assert not [t for t in left if t.is_alive()]


def test_a_plan_that_was_made_is_repeated_without_a_trial(tmp_path):
    loader = _with_ways()
    for _ in loader:
        pass
    loader.plan.save(str(tmp_path / "plan.json"))
    again = _loader(execution=ExecutionPlan.load(str(tmp_path / "plan.json")))
    next(iter(again))
    assert again._execution._current == loader.plan.chosen
    loader.close()
    again.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 16}, "another loader"),
        ({"seed": 4}, "another loader"),
        ({"input_nodes": torch.arange(1100)}, "another loader"),
    ],
)
def test_a_plan_of_another_loader_is_refused(options, told):
    plan = _loader(execution="auto").plan
    with pytest.raises(ValueError, match=told):
        _loader(execution=plan, **options)


def test_a_plan_of_other_hardware_is_refused():
    plan = _loader(execution="auto").plan
    plan.made_for["device"] = "NVIDIA A100"
    with pytest.raises(ValueError, match=r"another device: 'NVIDIA A100', here it is 'cpu'"):
        _loader(execution=plan)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"execution": "fast"}, "execution must be None"), ({"execution": "auto", "pad": True}, "pad")],
)
def test_what_is_no_execution_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        _loader(**options)


def test_a_loader_without_a_plan_has_none():
    loader = _loader()
    assert loader.plan is None and "execution" not in loader.state_dict()
    loader.load_state_dict(_with_ways().state_dict())
