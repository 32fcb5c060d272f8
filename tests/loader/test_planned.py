"""A loader that plans: the same batches to the last bit, the fastest way stays, and who resumes keeps the plan."""

import gc
import threading
from collections import Counter
from itertools import islice

import pytest
import torch

import gnnsys
from gnnsys.graph import NODE, sbm
from gnnsys.partition import Placement
from gnnsys.pipeline import Pipeline
from gnnsys.planning import CACHED, ExecutionPlan, Way
from tests.loader.planned_ways import (
    GRAPH,
    WAYS,
    Clock,
    are_same,
    node_loader,
    short,
    tensors_of,
    until_chosen,
    with_ways,
)

WIDE = sbm(3000, avg_degree=8, num_features=64)


def test_batches_are_those_of_a_loader_without_a_plan_during_and_after_the_trial():
    plain, planning = node_loader(), with_ways()
    for _ in range(4):  # a trial that is hard to decide takes longer
        assert are_same([tensors_of(batch) for batch in planning], [tensors_of(batch) for batch in plain])
    assert planning.plan.chosen is not None
    planning.close()


@pytest.mark.parametrize("fastest", range(len(WAYS)))
def test_the_fastest_way_stays(monkeypatch, fastest):
    clock, loader = Clock(monkeypatch), with_ways()
    seconds = {way: 1.0 if way == fastest else 1.2 + way / 10 for way in range(len(WAYS))}
    used = []
    for _ in range(2):
        for _ in loader:
            used.append(loader._execution._current)
            clock.train(loader, seconds)
    trial = loader.plan.trial
    turns = [way for _ in range(trial.rounds) for way in range(len(WAYS)) for _ in range(trial.turn)]
    assert used[: len(turns)] == turns
    assert set(used[len(turns) :]) == {fastest} and loader.plan.chosen == fastest
    assert {way: trial.median(way) for way in range(len(WAYS))} == pytest.approx(seconds)
    assert f"chosen: {WAYS[fastest].name}" in loader.plan.report()
    loader.close()


def test_ways_that_are_far_behind_have_no_more_turns_and_give_back_what_they_have(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    seconds = {0: 3.0, 1: 9.0, 2: 1.0}
    used, held = [], []
    for _ in loader:
        used.append(loader._execution._current)
        held.append(set(loader._execution._loaders))
        clock.train(loader, seconds)
    turn = loader.plan.trial.turn
    assert used[: 5 * turn] == [0] * turn + [1] * turn + [2] * turn + [0] * turn + [2] * turn
    assert set(used[5 * turn :]) == {2} and loader.plan.chosen == 2
    assert held[2 * turn] == {0, 1, 2} and held[3 * turn] == {0, 2} and held[-1] == {2}
    assert [len(loader.plan.trial.seconds[way]) for way in range(3)] == [2, 1, 2]
    loader.close()


def test_what_happens_between_epochs_is_not_measured(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways(input_nodes=torch.arange(72))  # 9 batches an epoch
    while loader.plan.chosen is None:
        for _ in loader:
            clock.train(loader, {0: 3.0, 1: 1.0, 2: 2.0})
        clock.now += 1000.0  # validation
    trial = loader.plan.trial
    assert [trial.median(way) for way in range(3)] == pytest.approx([3.0, 1.0, 2.0])
    loader.close()


def test_a_way_that_cannot_be_gone_is_named_and_others_make_its_batches(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    make = loader._execution._make

    def refusing(way):
        if way.loading_threads == 2:
            raise RuntimeError("out of memory: tried to allocate\nmore")
        return make(way)

    monkeypatch.setattr(loader._execution, "_make", refusing)
    told = []
    for batch in loader:
        told.append(tensors_of(batch))
        clock.train(loader, {0: 2.0, 2: 1.0})
    assert are_same(told, [tensors_of(batch) for batch in node_loader()])
    assert loader.plan.trial.refused == {1: "out of memory: tried to allocate"} and loader.plan.chosen == 2
    loader.close()


@pytest.mark.parametrize("stop", [1, 20, 60, 140])
def test_a_run_that_resumes_goes_on_with_its_plan(monkeypatch, stop):
    """In the middle of a turn, between turns, and after the trial."""
    clock, loader = Clock(monkeypatch), with_ways()
    seconds = {0: 3.0, 1: 1.0, 2: 2.0}
    epoch = iter(loader)
    for _ in range(stop):
        next(epoch)
        clock.train(loader, seconds)
    state = loader.state_dict()
    rest = []
    for batch in epoch:
        rest.append(tensors_of(batch))
        clock.train(loader, seconds)
    resumed = with_ways()
    resumed.load_state_dict(state)
    assert resumed.plan.to_json() == ExecutionPlan.from_json(state["execution"]["plan"]).to_json()
    told = []
    for batch in resumed:
        told.append(tensors_of(batch))
        clock.train(resumed, seconds)
    assert are_same(told, rest)
    assert resumed.plan.chosen == 1
    loader.close()
    resumed.close()


def train_on_the_host(loader, epochs, job=None, after_step=lambda: None):
    """(model, optimizer) after training, and the numbers of torch's threads that steps had."""
    if job is None:
        torch.manual_seed(0)
        model = gnnsys.nn.GraphSAGE(WIDE.node_data[NODE]["x"].shape[1], 32, 2, 4)
        job = model, torch.optim.Adam(model.parameters())
    model, optimizer = job
    threads = set()
    for _ in range(epochs):
        for batch in loader:
            threads.add(torch.get_num_threads())
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            torch.nn.functional.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size] % 4).backward()
            optimizer.step()
            after_step()
    return job, threads


@pytest.mark.parametrize("num_threads", [1, 2])
def test_auto_on_the_host_trains_the_weights_of_the_plain_run_and_resumes_with_its_choice(monkeypatch, num_threads):
    """Whichever way wins: the clock has the last one win, and the resumed run would have the first."""
    monkeypatch.setattr("gnnsys.loader.planned.num_usable_cores", lambda: 8)
    options = {"input_nodes": torch.arange(12 * 200), "batch_size": 200, "shuffle": True, "seed": 3}
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        (plain, _), _ = train_on_the_host(gnnsys.NeighborLoader(WIDE, [10, 10], **options), 4)
        clock = Clock(monkeypatch)
        loader = short(gnnsys.NeighborLoader(WIDE, [10, 10], **options, execution="auto"))
        last = len(loader.plan.ways) - 1
        seconds = {way: 3.0 - way for way in range(last + 1)}
        job, used = train_on_the_host(loader, 2, after_step=lambda: clock.train(loader, seconds))
        assert loader.plan.chosen == last > 0 and used == {num_threads}
        busier = ExecutionPlan([Way(), Way(loading_threads=5)], made_for=loader.plan.made_for)
        resumed = gnnsys.NeighborLoader(WIDE, [10, 10], **options, execution=busier)
        resumed.load_state_dict(loader.state_dict())
        assert (resumed.plan.ways, resumed.plan.chosen) == (loader.plan.ways, last), "no new trial"
        loader.close()
        job, used = train_on_the_host(resumed, 2, job)
        assert used == {num_threads} and resumed.plan.chosen == last
        resumed.close()
        assert all(torch.equal(*pair) for pair in zip(plain.parameters(), job[0].parameters(), strict=True))
    finally:
        torch.set_num_threads(before)


def test_threads_of_torch_are_given_back():
    before, loader = torch.get_num_threads(), short(with_ways([Way(), Way(compute_threads=3)]))
    during = set()
    for _ in loader:
        during.add(torch.get_num_threads())
    assert during == {before, 3}
    loader.close()
    assert torch.get_num_threads() == before


def test_nothing_of_the_other_ways_is_left():
    loader = with_ways()
    until_chosen(loader)
    loader.close()
    left = [t for t in threading.enumerate() if t.name.startswith("gnnsys-") and "compact" in t.name]
    assert len(loader._execution._loaders) == 1
    del loader
    gc.collect()
    assert not [t for t in left if t.is_alive()]


def test_a_plan_that_was_made_is_repeated_without_a_trial(tmp_path):
    loader = with_ways()
    until_chosen(loader)
    loader.plan.save(str(tmp_path / "plan.json"))
    again = node_loader(execution=ExecutionPlan.load(str(tmp_path / "plan.json")))
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
    plan = node_loader(execution="auto").plan
    with pytest.raises(ValueError, match=told):
        node_loader(execution=plan, **options)


def test_a_plan_of_other_hardware_is_refused():
    plan = node_loader(execution="auto").plan
    plan.made_for["device"] = "NVIDIA A100"
    with pytest.raises(ValueError, match=r"another device: 'NVIDIA A100', here it is 'cpu'"):
        node_loader(execution=plan)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"execution": "fast"}, "execution must be None"), ({"execution": "auto", "pad": True}, "pad")],
)
def test_what_is_no_execution_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        node_loader(**options)


def test_a_loader_without_a_plan_has_none():
    loader = node_loader()
    assert loader.plan is None and "execution" not in loader.state_dict()
    loader.load_state_dict(with_ways().state_dict())


# What a loader may be asked to do in the middle of a trial


def _train_epochs(clock, loader, seconds, num_epochs=20):
    for _ in range(num_epochs):
        for _ in loader:
            clock.train(loader, seconds)
        if loader.plan.chosen is not None:
            return


def test_a_look_at_one_batch_before_training_does_not_end_the_trial(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    next(iter(loader))
    _train_epochs(clock, loader, {0: 2.9, 1: 1.0, 2: 1.4})
    assert loader.plan.chosen == 1 and [len(loader.plan.trial.seconds[way]) for way in range(3)] == [2, 3, 3]
    loader.close()


@pytest.mark.parametrize("across_epochs", [False, True])
def test_epochs_that_are_broken_off_leave_turns_to_be_measured_again(monkeypatch, across_epochs):
    clock, loader = Clock(monkeypatch), with_ways(across_epochs=across_epochs)
    seconds = {0: 10.0, 1: 1.0, 2: 5.0}
    for _ in range(60):
        for number, _ in enumerate(loader):
            clock.train(loader, seconds)
            if number == 23:
                break
    trial = loader.plan.trial
    assert loader.plan.chosen == 1
    assert {way: trial.median(way) for way in range(3)} == pytest.approx(seconds)
    loader.close()


def test_batches_that_are_always_left_before_a_turn_ends_stay_with_what_was_given(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways()
    for _ in range(40):
        for number, _ in enumerate(loader):
            clock.train(loader, {0: 10.0, 1: 1.0, 2: 5.0})
            if number == 8:
                break
    assert loader.plan.chosen is None and loader._execution._current == 0
    loader.close()


@pytest.mark.parametrize("per_epoch", [2, 3, 4, 13])
def test_loading_and_training_are_measured_apart_from_ends_of_epochs(monkeypatch, per_epoch):
    clock, loader = (
        Clock(monkeypatch),
        with_ways([Way(), Way(loading_threads=0)], input_nodes=torch.arange(8 * per_epoch)),
    )
    loading, training = {0: 3.0, 1: 1.0}, {0: 1.0, 1: 6.0}
    enter = loader._execution._next_by

    def next_by(way):
        clock.now += loading[way]
        return enter(way)

    monkeypatch.setattr(loader._execution, "_next_by", next_by)
    while loader.plan.chosen is None:
        for _ in loader:
            clock.train(loader, training)
        clock.now += 500.0
    assert [loader.plan.trial.median(way) for way in (0, 1)] == pytest.approx([4.0, 7.0]) and loader.plan.chosen == 0
    loader.close()


def test_one_batch_an_epoch_says_nothing_of_training_and_changes_nothing(monkeypatch):
    clock, loader = Clock(monkeypatch), with_ways(input_nodes=torch.arange(8))
    for _ in range(200):
        for _ in loader:
            clock.train(loader, {0: 3.0, 1: 1.0, 2: 2.0})
    assert loader.plan.chosen == 0 and "nothing was measured" in loader.plan.report()
    loader.close()


def _rank(rank, world, planned):
    share = gnnsys.split(GRAPH, torch.arange(1200), type=NODE, placement=Placement(rank, (0,) * world, ()))
    return with_ways(input_nodes=share) if planned else node_loader(input_nodes=share)


@pytest.mark.parametrize("chosen", [None, 1])
def test_another_number_of_ranks_goes_on_with_what_is_left_whichever_way(chosen):
    """Every seed of the epoch once; and the epochs behind it are those of loaders without a plan."""
    two = [_rank(rank, 2, True) for rank in range(2)]
    seen = [loader.input_ids(batch.input_id) for loader in two for batch in islice(loader, 15)]
    states = [loader.state_dict() for loader in two]
    three, plain = [_rank(rank, 3, True) for rank in range(3)], [_rank(rank, 3, False) for rank in range(3)]
    for loader, other in zip(three, plain, strict=True):
        loader.plan.chosen = chosen
        loader.load_state_dicts(states)
        other.load_state_dicts([{k: v for k, v in state.items() if k != "execution"} for state in states])
        for batch in loader:
            seen.append(loader.input_ids(batch.input_id))
        assert len(list(other)) > 0
        for _ in range(2):
            assert are_same([tensors_of(batch) for batch in loader], [tensors_of(batch) for batch in other])
    counts = Counter(torch.cat(seen).tolist())
    assert sorted(counts) == list(range(1200)) and set(counts.values()) == {1}
    for loader in two + three:
        loader.close()


def test_a_checkpoint_holds_a_plan_and_brings_it_back(tmp_path):
    for begins_at in (0, 10):
        loader = with_ways()
        saver = gnnsys.resume(str(tmp_path), every=5, loader=loader, asynchronous=False)
        assert loader.state_dict()["batch"] == begins_at
        for _ in islice(loader, 12 - begins_at):
            saver.step()
        loader.close()
        saver.close()
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt") == loader.state_dict()


def test_a_plan_is_gone_on_with_though_other_patterns_would_be_made_now():
    ways = [Way(), Way(loading_threads=0, by_host=(True, False))]
    saved = ExecutionPlan(ways, made_for={"loader": 1}, chosen=1)
    here = ExecutionPlan(
        [Way(), Way(loading_threads=0), Way(loading_threads=0, by_host=(True,))], made_for={"loader": 1}
    )
    assert here.take_ways(saved) and here.ways == saved.ways and here.trial.num_ways == 2
    assert not here.take_ways(ExecutionPlan([Way(), Way(place=CACHED)], made_for={"loader": 1}))


def test_a_plan_is_gone_on_with_though_other_memory_is_left_now():
    loader = with_ways()
    until_chosen(loader)
    state = loader.state_dict()
    state["execution"]["plan"]["ways"][1] |= {"predicted": 0.5, "device_bytes": 77}
    resumed = with_ways()
    resumed.load_state_dict(state)
    assert resumed.plan.chosen == loader.plan.chosen is not None
    assert resumed.plan.ways[1].device_bytes == 0, "what it takes is that of here and now"
    assert Way(place=CACHED, device_bytes=5) == Way(place=CACHED, predicted=1.0)


def test_a_state_does_not_change_when_training_goes_on():
    loader = with_ways()
    epoch = iter(loader)
    for _ in range(30):
        next(epoch)
    state = loader.state_dict()
    told = repr(state["execution"])
    for _ in epoch:
        pass
    assert repr(state["execution"]) == told


def test_a_state_whose_plan_is_chosen_gives_back_what_other_ways_have():
    loader = with_ways()
    epoch = iter(loader)
    for _ in range(60):
        next(epoch)
    state = loader.state_dict()
    state["execution"]["plan"]["chosen"] = 2
    assert len(loader._execution._loaders) == 3
    loader.load_state_dict(state)
    assert set(loader._execution._loaders) == {2}
    loader.close()


def test_functions_of_the_users_own_see_batches_as_without_a_plan():
    def transform(batch):
        return batch

    for options in ({"transform": transform}, {"num_threads": 0}, {"num_threads": 2}):
        plan = node_loader(execution="auto", **options).plan
        assert plan.chosen == 0 and len(plan.ways) == 1, options
        assert "in order" in plan.report() or "num_threads was given" in plan.report()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_way_that_runs_out_of_memory_while_it_makes_a_batch_is_left(monkeypatch, error):
    loader = with_ways([Way(), Way(loading_threads=2)])
    make = loader._execution._make
    of_way_1 = []
    real = Pipeline.__next__
    monkeypatch.setattr(Pipeline, "__next__", lambda self: _raise(error) if self in of_way_1 else real(self))

    def failing(way):
        made = make(way)

        def open_at(position):
            of_way_1.append(made.open(position))
            return of_way_1[-1]

        return made if way.loading_threads is None else made._replace(open=open_at)

    monkeypatch.setattr(loader._execution, "_make", failing)
    assert are_same([tensors_of(batch) for batch in loader], [tensors_of(batch) for batch in node_loader()])
    assert list(loader.plan.trial.refused) == [1] and loader.plan.chosen == 0
    loader.close()


def _raise(error):
    raise error


def test_records_of_all_ways_are_shown():
    loader = with_ways()
    until_chosen(loader)
    chosen = loader.plan.chosen
    numbers = [record.batch for record in loader.trace()]
    assert numbers == sorted(numbers) and chosen is not None and len(numbers) > 10
    assert max(numbers) >= len(loader) - 1
    loader.close()


class TestThreadsOfTorch:
    """As they were before, whatever loaders come and go."""

    @pytest.fixture(autouse=True)
    def one_thread(self):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def test_ways_that_say_nothing_of_them_leave_them_alone(self):
        loader = with_ways([Way(), Way(loading_threads=1)])
        torch.set_num_threads(2)
        next(iter(loader))
        assert torch.get_num_threads() == 2
        loader.close()
        assert torch.get_num_threads() == 2

    def test_a_loader_that_is_collected_gives_them_back(self):
        loader = with_ways([Way(compute_threads=2)])
        next(iter(loader))
        assert torch.get_num_threads() == 2
        del loader
        gc.collect()
        assert torch.get_num_threads() == 1

    def test_two_loaders_have_their_own_and_give_back_the_first_ones(self):
        training, validation = with_ways([Way(compute_threads=2)]), with_ways([Way(compute_threads=3)])
        epoch = iter(training)
        next(epoch)
        next(iter(validation))
        assert torch.get_num_threads() == 3
        next(epoch)
        assert torch.get_num_threads() == 2
        training.close()
        validation.close()
        assert torch.get_num_threads() == 1
