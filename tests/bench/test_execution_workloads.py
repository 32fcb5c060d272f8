"""The 24 workloads of `gnnsys bench execution`: on the host, where they mean nothing, every line but the GPU's runs."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch

from gnnsys.bench.case import OURS, NotHere
from gnnsys.bench.execution import BENCHMARKS
from gnnsys.bench.execution import workloads as of_workloads
from gnnsys.bench.execution.workloads import (
    BEST,
    DEFAULT,
    NEVER_SLOWER,
    OF_THE_BEST,
    WORKLOADS,
    PlannedWorkload,
    WorkloadOutcome,
    WorkloadRun,
    run_workload,
    sized_graph,
    summary_cases,
    workloads,
)
from gnnsys.bench.gpu.inputs import NUM_FEATURES
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.workload import FULL, Sizes, Workload
from gnnsys.graph import NODE
from gnnsys.planning import CACHED, DEVICE, GIVEN, PINNED, Way, WayTrial
from gnnsys.store import DeviceCache, MemoryBudget
from tests.bench.verdicts import judged

TINY = Sizes(500, 5_000, num_seeds=8)
SETTINGS = {"device": "cpu"}
FEW_TURNS = partial(WayTrial, warm=1, measured=1, rounds=1)


def test_there_are_24_and_all_graphs_models_widths_and_caps_are_among_them():
    assert len({each.name for each in WORKLOADS}) == len(WORKLOADS) == 24
    assert {each.graph for each in WORKLOADS} == {"arxiv", "products", "reddit"}
    for graph in ("arxiv", "products", "reddit"):
        assert {each.model for each in WORKLOADS if each.graph == graph} == {"SAGE", "GCN", "GAT"}
        assert {each.cap for each in WORKLOADS if each.graph == graph} == {None, 4, 1}
    assert {each.width for each in WORKLOADS} >= {NUM_FEATURES, 1024}
    assert workloads in BENCHMARKS
    names = {case.name for case in workloads(Workload(TINY))}
    assert {f"execution/workloads/{each.name}" for each in WORKLOADS} <= names


def test_workloads_of_one_graph_and_width_follow_each_other():
    keys = [(each.graph, each.width) for each in WORKLOADS]
    changes = [key for before, key in zip([None, *keys], keys, strict=False) if before != key]
    assert len(changes) == len(set(keys))


@pytest.mark.parametrize("name", ["arxiv SAGE 128 1GB pinned", "products GCN 100 free pinned", "reddit GAT 602 1GB"])
def test_what_was_chosen_is_timed_beside_every_way(name, monkeypatch, capsys):
    monkeypatch.setattr("gnnsys.planning.execution.plan.WayTrial", FEW_TURNS)
    monkeypatch.setattr(of_workloads, "_FAR", 1.0)  # all but the fastest are timed once
    before = MemoryBudget.of("cpu").limit
    with Workload(TINY, settings=SETTINGS) as work:
        (case,) = [case for case in workloads(work) if case.name == f"execution/workloads/{name}"]
        found = measure(case, RoundLimits())
    assert found.samples.keys() == {OURS, DEFAULT, BEST}
    assert all(found.samples[side][0] > 0 for side in (OURS, DEFAULT, BEST))
    assert MemoryBudget.of("cpu").limit == before
    told = capsys.readouterr().err
    assert f"{name}: as given" in told and "by hand" in told


@pytest.mark.parametrize("sums", [(), (False, True)])
@pytest.mark.parametrize("place", [GIVEN, DEVICE, PINNED, CACHED])
def test_a_graph_that_was_placed_by_hand_gives_the_same_batches(place, sums):
    with Workload(TINY, settings=SETTINGS) as work:
        one = WorkloadRun(work, PlannedWorkload("arxiv", "SAGE", 128, 1))
        with one.room():
            auto = one.loader(one.graph(), execution="auto", model=one.model)
            loader = one.by_hand(Way(place=place, sums=sums, device_bytes=20_000), auto.plan.made_for)
        assert isinstance(loader.graph.node_data[NODE]["x"], DeviceCache) == (place == CACHED)
        for ours, theirs in zip(islice(loader, 4), islice(one.loader(one.graph()), 4), strict=True):
            assert torch.equal(ours.n_id, theirs.n_id) and torch.equal(ours.x, theirs.x)
            one.step(ours)
        loader.close()


def test_memory_that_others_have_taken_is_not_of_the_cap():
    with Workload(TINY, settings=SETTINGS) as work:
        one, budget = WorkloadRun(work, PlannedWorkload("arxiv", "SAGE", 128, 1)), MemoryBudget.of("cpu")
        with budget.promise(1000, "others"), one.room():
            assert budget.limit - sum(use.bytes for use in budget.uses()) == 1 << 30


def test_wide_rows_repeat_narrow_ones_and_those_of_the_last_graph_alone_are_kept():
    with Workload(TINY, settings=SETTINGS) as work:
        narrow, wide = (sized_graph(work, "arxiv", width).node_data[NODE]["x"] for width in (NUM_FEATURES, 256))
        assert torch.equal(wide, torch.cat([narrow, narrow, narrow[:, :56]], 1))
        again = sized_graph(work, "arxiv", 256)
        assert again.node_data[NODE]["x"] is wide and again is not sized_graph(work, "arxiv", 256)
        sized_graph(work, "reddit", 256)
        assert sized_graph(work, "arxiv", 256).node_data[NODE]["x"] is not wide


@pytest.mark.parametrize(("name", "num_nodes", "num_edges"), [("arxiv", 1_693, 11_662), ("reddit", 2_329, 1_146_158)])
def test_graphs_have_a_share_of_what_the_paper_has(name, num_nodes, num_edges):
    with Workload(Sizes(FULL.num_nodes // 100, 1), settings=SETTINGS) as work:
        graph = sized_graph(work, name, NUM_FEATURES)
    assert graph.num_nodes() == num_nodes and graph.num_edges() == pytest.approx(num_edges, rel=0.01)


def test_what_was_chosen_is_counted_and_targets_are_judged():
    def of(way, ours, default, best):
        return WorkloadOutcome(way, {OURS: ours, DEFAULT: default, BEST: best}, 2.0)

    mix = Way(place=CACHED, sums=(False, True))
    found = {
        "a": of(Way(place=DEVICE, sums=(True,)), 1.0, 1.0, 1.0),
        "b": of(Way(place=CACHED), 1.0, 0.9, 0.9),
        "c": of(mix, 1.0, 0.97, 0.96),
        "d": of(mix, 1.0, 2.0, 0.99),
        "e": of(Way(), 1.0, 1.0, 1.0),
    }
    cases = {case.name.removeprefix("execution/workloads/"): case for case in summary_cases(lambda: found)}
    counted = {name: case.sides()[OURS].call() for name, case in cases.items()}
    assert counted == {
        "chose device": 1, "chose cache": 1, "chose mix": 2, f"met 0.98 beside {DEFAULT}": 3,
        f"met 0.95 beside {BEST}": 4, "all of it": 10.0,
    }  # fmt: skip
    all_judged = judged([*workloads(Workload(TINY)), *cases.values()])
    assert {(f"execution/workloads/chose {kind}", 1.0) for kind in ("device", "cache", "mix")} <= all_judged
    for each in WORKLOADS:
        assert {(f"execution/workloads/{each.name}", t) for t in (NEVER_SLOWER, OF_THE_BEST)} <= all_judged


def test_without_a_workload_nothing_is_counted():
    case = next(iter(summary_cases(dict)))
    with pytest.raises(NotHere, match="no workload was run"):
        case.sides()[OURS].call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_missing():
    with Workload(TINY) as work, pytest.raises(NotHere, match="it needs a GPU"):
        run_workload(work, WORKLOADS[0])
