"""A user's own stages and samplers, and how threads are laid out."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import Batch, Inputs, NeighborLoader, PipelineOptions, Sampled, TypeValues
from gnnsys.loader.device_copy import DeviceCopy, through
from gnnsys.loader.layout import StageLayout
from gnnsys.ops import sample_neighbors, stream_key
from gnnsys.pipeline import Stage
from gnnsys.sampling import NeighborSampler, Sample, SampleKey
from tests.loader.sources import BRINGING


@pytest.fixture(scope="module")
def graph() -> Graph:
    edge_index = torch.randint(200, (2, 1500), generator=torch.Generator().manual_seed(1))
    return Graph.from_edge_index(edge_index, 200, {"x": torch.rand(200, 8), "y": torch.arange(200)})


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_users_stages_see_what_flows_where_they_stand(graph: Graph, num_threads: int, threads: int) -> None:
    def halve(inputs: Inputs) -> Inputs:
        return inputs._replace(chosen=inputs.chosen[::2])

    def count(sampled: Sampled) -> Sampled:
        assert not sampled.rows
        sampled.values[NODE]["total"] = sampled.sample.node[NODE].numel()
        return sampled

    def scale(sampled: Sampled) -> Sampled:
        sampled.rows[NODE]["x"] *= 2
        return sampled

    def label(batch: Batch) -> Batch:
        batch.labels = batch.y[: batch.batch_size]
        return batch

    stages = [
        Stage("label", label, threads, after="compact"),
        Stage("halve", halve, threads, after="schedule"),
        Stage("count", count, threads, after="sample"),
        Stage("scale", scale, threads, after="fetch"),
    ]
    loader = NeighborLoader(graph, [4, 3], batch_size=20, stages=stages, num_threads=num_threads)
    batches = list(loader)
    assert len(batches) == 10
    for number, batch in enumerate(batches):
        assert batch.labels.tolist() == list(range(20 * number, 20 * number + 20, 2))
        assert batch.total == batch.num_nodes
        assert torch.equal(batch.x, 2 * graph.node_data[NODE]["x"][batch.n_id])
    expected = ["schedule", "halve", "sample", "count", "fetch", "scale", "compact", "label", "consumer"]
    assert [name for name in loader.counters() if name not in BRINGING] == expected
    assert loader([4, 5]).labels.tolist() == [4]


def test_stages_of_one_place_keep_their_order_and_the_transform_is_last(graph: Graph) -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        return lambda item: seen.append(name) or item

    stages = [Stage(name, note(name), threads=0, after="compact") for name in ("first", "second")]
    list(NeighborLoader(graph, [2], batch_size=200, stages=stages, transform=note("last"), across_epochs=False))
    assert seen == ["first", "second", "last"]


def test_stages_that_do_not_fit_are_refused(graph: Graph) -> None:
    for stage, message in (
        (Stage("mine", int), "after must be one of schedule, sample, fetch, compact, got None"),
        (Stage("mine", int, after="copy"), "after must be one of"),
        (Stage("sample", int, after="fetch"), "name of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            NeighborLoader(graph, [2], stages=[stage])
    twice = [Stage("mine", int, after="sample"), Stage("mine", int, after="fetch")]
    with pytest.raises(ValueError, match="different names"):
        next(iter(NeighborLoader(graph, [2], stages=twice)))


@pytest.mark.parametrize("options", [{"threads": {"gather": 1}}, {"depths": {"sample": -1}}, {"trace": -1}])
def test_layouts_that_do_not_fit_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"gather|sample must be >= 0|trace"):
        PipelineOptions(**options)


def test_stages_get_the_threads_that_were_asked_for(graph: Graph, request: pytest.FixtureRequest) -> None:
    before, names = set(threading.enumerate()), set()

    def note(batch: Batch) -> Batch:
        names.update(thread.name for thread in set(threading.enumerate()) - before)
        return batch

    options = PipelineOptions(threads={"sample": 3, "fetch": 2}, depths={"sample": 4})
    expected = [b.x for b in NeighborLoader(graph, [4, 3], batch_size=9, num_threads=0)]
    batches = list(NeighborLoader(graph, [4, 3], batch_size=9, transform=note, pipeline=options))
    assert all(torch.equal(a, b.x) for a, b in zip(expected, batches, strict=True))
    expected_names = {"gnnsys-sample-0", "gnnsys-sample-1", "gnnsys-sample-2", "gnnsys-fetch-0", "gnnsys-fetch-1"}
    last = "transform" if request.config.getoption("--device") == "cpu" else "copy"
    assert names == {*expected_names, f"gnnsys-{last}-0"}


def one_hop(graph: Graph, seeds: dict[str, Tensor], key: SampleKey) -> Sample:
    """A sampler that a user might write: one hop of three neighbours, every node of the sample listed once."""
    ids = seeds[NODE]
    csc = graph.csc()
    found = sample_neighbors(csc, ids.to(csc.indices.dtype), 3, key=stream_key(*key, 0))
    node, local = torch.cat([ids, found.ids.long()]).unique(return_inverse=True)
    col = torch.repeat_interleave(local[: ids.numel()], found.indptr.diff())
    return Sample({NODE: node}, {EDGE: local[ids.numel() :]}, {EDGE: col}, {}, {}, {})


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_users_sampler_takes_the_place_of_ours(graph: Graph, num_threads: int) -> None:
    loader = NeighborLoader(graph, sampler=one_hop, batch_size=30, shuffle=True, num_threads=num_threads)
    seen = []
    for batch in loader:
        assert torch.equal(batch.y, batch.n_id)
        assert int(torch.bincount(batch.edge_index[1]).max()) <= 3
        seen.append(batch.input_id)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(200))


def test_our_sampler_given_as_a_users_gives_the_same_batches(graph: Graph) -> None:
    ours = NeighborSampler(graph, [4, 3])
    options = {"batch_size": 30, "shuffle": True, "seed": 9}
    expected = NeighborLoader(graph, [4, 3], **options)
    got = NeighborLoader(graph, sampler=lambda graph, seeds, key: ours.sample(seeds, key=key), **options)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.edge_index, b.edge_index) and torch.equal(a.x, b.x)


def test_samplers_and_options_that_contradict_each_other_are_refused(graph: Graph) -> None:
    for arguments, message in (
        ({}, "num_neighbors must be given"),
        ({"num_neighbors": [3], "sampler": one_hop}, "leave num_neighbors"),
        ({"disjoint": True, "sampler": one_hop}, "leave num_neighbors"),
    ):
        with pytest.raises(ValueError, match=message):
            NeighborLoader(graph, **arguments)
    with pytest.raises(ValueError, match=r"must return a gnnsys\.sampling\.Sample, got int"):
        next(iter(NeighborLoader(graph, sampler=lambda graph, seeds, key: 3)))


def test_what_a_sampler_knows_of_its_edges_is_forgotten_behind_a_users_stage(graph: Graph) -> None:
    kept: list[bool] = []

    def turn(sampled: Sampled) -> Sampled:
        sample = sampled.sample
        sample.row, sample.col = sample.col, sample.row
        return sampled

    def look(sampled: Sampled) -> Sampled:
        kept.append(sampled.sample.by_destination)
        return sampled

    for stages in ([Stage("look", look, after="sample")], [Stage("turn", turn, after="sample")]):
        loader = NeighborLoader(graph, [4, 3], batch_size=200, num_threads=0, stages=stages)
        make = next(stage.run for stage in loader._stages if stage.name == "sample")
        run = next(stage.run for stage in loader._stages if stage.name == stages[0].name)
        made = make(loader._stages[0].run(next(loader._schedule.tickets(0))))
        assert made.sample.by_destination
        assert not run(made).sample.by_destination
    assert kept == [True]


@pytest.mark.parametrize(
    ("threads", "waits", "user", "handed_over"),
    [
        ({}, False, False, False),
        ({}, True, False, True),
        ({}, True, True, None),
        ({"sample": 2, "copy": 0}, False, False, True),
        ({"fetch": 1}, False, False, None),
    ],
)
def test_threads_have_streams_of_their_own_where_one_makes_a_batch_or_samples_it_for_another(
    threads: dict[str, int], waits: bool, user: bool, handed_over: bool | None
) -> None:
    """None: all threads share a stream."""

    class Recorded(DeviceCopy):
        def __init__(self) -> None:
            self.handed_over: bool | None = None

        def use_own_streams(self, *, hand_over: bool) -> None:
            self.handed_over = hand_over

        def on_stream(self, stage: Stage) -> Stage:
            return stage

    copy = Recorded()
    layout = StageLayout(
        num_threads=2, prefetch=2, waits=waits, options=PipelineOptions(threads=threads), on_device=True
    )
    ours = [Stage(name, lambda item: item, threads=0) for name in ("schedule", "sample", "fetch", "compact")]
    users = [Stage("mine", lambda item: item, after="sample")] if user else []
    layout.arrange(ours, None, users, copy)
    assert copy.handed_over is handed_over


def test_tensors_in_lists_and_dicts_of_a_batch_move_with_it(graph: Graph) -> None:
    batch = next(iter(NeighborLoader(graph, [4], batch_size=8)))
    batch.pairs = [(torch.ones(2), "a"), {"b": torch.ones(3), "c": 4}]
    moved = batch.apply(lambda t: t.double())
    assert moved.pairs[0][0].dtype == moved.pairs[1]["b"].dtype == torch.float64
    assert moved.pairs[0][1] == "a" and moved.pairs[1]["c"] == 4
    assert moved.num_sampled_nodes == batch.num_sampled_nodes


def test_what_a_transform_returns_is_reached_whatever_holds_its_tensors() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: int

    batch = Batch({"node": TypeValues(x=torch.ones(2))}, {}, is_homogeneous=True)
    item = (torch.ones(1), [batch, Pair(torch.ones(1), 3)], {"y": torch.ones(1), "name": "z"}, None, 2.5)
    out = through(item, lambda tensor: tensor * 2)
    assert out[0].item() == 2 and out[1][0].x.tolist() == [2, 2] and out[1][1] == Pair(torch.tensor([2.0]), 3)
    assert out[2]["y"].item() == 2 and out[2]["name"] == "z" and out[3:] == (None, 2.5)
    with pytest.raises(ValueError, match=r"object.*transform must return"):
        through((object(),), lambda tensor: tensor)
