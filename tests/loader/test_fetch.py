"""The fetch stage: rows from elsewhere are those that memory has, asked for ahead, once, and counted."""

from __future__ import annotations

import traceback
from itertools import islice

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph, save
from gnnsys.loader import Batch, LinkNeighborLoader, NeighborLoader, PipelineOptions
from gnnsys.observe import BatchTrace
from tests.loader.sources import BRINGING, Barrier, Fresh, Source

NUM_NODES, NUM_EDGES, DIM = 400, 4000, 70


def make_graph(**options) -> tuple[Graph, Source]:
    """x and the edges' attribute come from a source, y is in memory."""
    stream = torch.Generator().manual_seed(3)
    edge_index = torch.randint(NUM_NODES, (2, NUM_EDGES), generator=stream)
    x, y = torch.rand(NUM_NODES, DIM, generator=stream), torch.arange(NUM_NODES)
    graph = Graph.from_edge_index(edge_index, NUM_NODES, {"y": y})
    source = Source(x, **options)
    graph.set_node_data("x", source)
    weight = Source(torch.rand(NUM_EDGES, generator=stream), options.get("mutable"))
    graph.set_edge_data("w", weight)
    return graph, source


def in_memory(graph: Graph) -> Graph:
    """The same graph with all rows in memory: the oracle."""

    def rows(data: dict) -> dict:
        return {name: r.rows if isinstance(r, Source) else r for name, r in data.items()}

    nodes, edges = {NODE: rows(graph.node_data[NODE])}, {EDGE: rows(graph.edge_data[EDGE])}
    return Graph({NODE: NUM_NODES}, {EDGE: graph.csc()}, nodes, edges)


def assert_same(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected) > 0
    for batch, other in zip(batches, expected, strict=True):
        assert sorted(batch.keys()) == sorted(other.keys())
        for name in other.keys():  # noqa: SIM118
            same = torch.equal if isinstance(other[name], Tensor) else lambda a, b: a == b
            assert same(batch[name], other[name]), name


OPTIONS = {"batch_size": 32, "shuffle": True, "seed": 7}


@pytest.mark.parametrize("mutable", [None, False])
@pytest.mark.parametrize("num_threads", [0, 1, 3, None])
def test_rows_from_elsewhere_are_those_that_memory_has(num_threads: int | None, mutable: bool | None) -> None:
    graph, _ = make_graph(mutable=mutable)
    expected = list(NeighborLoader(in_memory(graph), [4, 3], num_threads=0, **OPTIONS))
    loader = NeighborLoader(graph, [4, 3], num_threads=num_threads, **OPTIONS)
    assert_same(list(loader), expected)
    assert list(expected[0].keys()) == list(next(iter(loader)).keys())


@pytest.mark.parametrize(
    "more", [{"disjoint": True}, {"replace": True}, {"subgraph_type": "induced"}, {"expand": "frontier"}]
)
def test_every_kind_of_sample_is_fetched_with_ids_that_repeat_or_not(more: dict) -> None:
    graph, source = make_graph(mutable=False)
    expected = list(NeighborLoader(in_memory(graph), [4, 3], num_threads=0, **more, **OPTIONS))
    assert_same(list(NeighborLoader(graph, [4, 3], **more, **OPTIONS)), expected)
    if "disjoint" in more:  # trees hold a node more than once: it is asked for once
        assert all(ids.unique().numel() == ids.numel() for ids in source.begun)


def test_link_batches_are_fetched_the_same_way() -> None:
    graph, _ = make_graph(mutable=False)
    options = {"batch_size": 100, "neg_sampling": "binary", "shuffle": True}
    expected = list(LinkNeighborLoader(in_memory(graph), [3], num_threads=0, **options))
    assert_same(list(LinkNeighborLoader(graph, [3], num_threads=2, **options)), expected)


def test_requests_of_later_batches_are_sent_before_the_rows_of_an_earlier_one_arrive() -> None:
    sent = Barrier(4)
    graph, source = make_graph(before_begin=sent.come, before_result=sent.wait)
    loader = NeighborLoader(graph, [4, 3], num_threads=2, pipeline=PipelineOptions(depths={"sample": 2}), **OPTIONS)
    batch = next(iter(loader))
    assert len(source.begun) >= 4  # or the barrier would not have let anything arrive
    assert torch.equal(batch.x, source.rows[batch.n_id])


def test_rows_that_a_batch_in_flight_has_asked_for_are_not_asked_for_again() -> None:
    sent = Barrier(4)
    graph, source = make_graph(mutable=False, before_begin=sent.come, before_result=sent.wait)
    loader = NeighborLoader(graph, [4, 3], num_threads=1, pipeline=PipelineOptions(depths={"sample": 3}), **OPTIONS)
    batches = list(islice(loader, 4))
    first = torch.cat(source.begun[:4])  # none of the four had arrived when the last was sent
    needed = torch.cat([batch.n_id for batch in batches])
    assert first.unique().numel() == first.numel()
    assert torch.equal(first.unique(), needed.unique())
    assert first.numel() < needed.numel() / 2
    counts = loader.counters()["fetch"].counts
    assert counts["rows_shared"] >= needed.numel() - first.numel()
    assert counts["bytes_shared"] > counts["bytes_remote"] > 0


def test_sharing_can_be_left_away_and_is_never_done_with_rows_that_may_change() -> None:
    for mutable, share in ((False, False), (None, True), (True, True)):
        graph, source = make_graph(mutable=mutable)
        options = {"fetch": ["x"], "num_threads": 1, "pipeline": PipelineOptions(share=share), **OPTIONS}
        loader = NeighborLoader(graph, [4, 3], **options)
        batches = list(islice(loader, 6))
        assert all(torch.equal(ids, batch.n_id) for ids, batch in zip(source.begun[:6], batches, strict=True))
        assert loader.counters()["fetch"].counts["rows_shared"] == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_batch_that_its_user_overwrites_leaves_other_batches_alone(num_threads: int) -> None:
    sent = Barrier(3)  # nothing arrives before three batches are in flight: some rows are shared for sure
    graph, source = make_graph(mutable=False, before_begin=sent.come, before_result=sent.wait)
    loader = NeighborLoader(graph, [4, 3], num_threads=num_threads, **OPTIONS)
    for _ in range(4):
        for batch in loader:
            assert torch.equal(batch.x, source.rows[batch.n_id])
            batch.x.fill_(float("nan"))
    assert loader.counters()["fetch"].counts["rows_shared"] > 0


@pytest.mark.parametrize("where", ["begin", "result"])
@pytest.mark.parametrize("mutable", [None, False])
def test_an_error_of_a_source_surfaces_in_its_turn_and_the_loader_can_go_on(where: str, mutable: bool | None) -> None:
    failing = True

    def lose_peer(number: int) -> None:
        if failing and number == 3:
            raise ConnectionError("machine 2 is gone")

    graph, _ = make_graph(mutable=mutable, **{f"before_{where}": lose_peer})
    loader = NeighborLoader(graph, [4, 3], num_threads=1, **OPTIONS)
    got = []
    with pytest.raises(ConnectionError, match="machine 2") as caught:
        for batch in loader:
            got.append(batch)
    text = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "lose_peer" in text and "stage 'fetch'" in text and "batch 3" in text
    failing = False
    loader.load_state_dict(loader.state_dict())
    rest = list(loader)
    assert_same(got + rest, list(NeighborLoader(in_memory(graph), [4, 3], num_threads=0, **OPTIONS)))


@pytest.mark.parametrize("seen", [1, 4, 12])
def test_an_iteration_left_early_and_resumed_elsewhere_repeats_and_loses_nothing(seen: int) -> None:
    graph, _ = make_graph(mutable=False)
    unbroken = NeighborLoader(in_memory(graph), [4, 3], **OPTIONS)
    whole = [batch for _ in range(2) for batch in unbroken]
    loader = NeighborLoader(graph, [4, 3], num_threads=2, **OPTIONS)
    head = list(islice(loader, seen))
    state = loader.state_dict()
    next(iter(loader))  # the next epoch begins: what was in flight is dropped
    loader.load_state_dict(state)
    tail = [batch for _ in range(2) for batch in loader]
    assert_same(head + tail, whole)


def test_tables_that_train_are_fetched_only_when_they_are_named() -> None:
    graph, source = make_graph(mutable=True)
    batch = next(iter(NeighborLoader(graph, [4, 3], **OPTIONS)))
    assert "x" not in batch and "w" not in batch and torch.equal(batch.y, batch.n_id)
    assert source.begun == []
    batch = next(iter(NeighborLoader(graph, [4, 3], fetch=["x"], **OPTIONS)))
    assert torch.equal(batch.x, source.rows[batch.n_id])
    assert "y" not in batch


def test_arrays_are_chosen_by_name_or_by_type_and_name() -> None:
    graph, _ = make_graph()
    by_name = next(iter(NeighborLoader(graph, [3], fetch=["y", "w"], **OPTIONS)))
    assert {"y", "w"} <= set(by_name.keys()) and "x" not in by_name
    by_type = next(iter(NeighborLoader(graph, [3], fetch={NODE: ["x"]}, **OPTIONS)))
    assert "x" in by_type and "y" not in by_type and "w" not in by_type
    assert "x" not in next(iter(NeighborLoader(graph, [3], fetch=[], **OPTIONS)))
    wrong = [("x", r"\['x'\]"), (["z"], "'z', only"), ({"a": []}, "type 'a'"), ({NODE: ["w"]}, "'w', only")]
    for fetch, message in wrong:
        with pytest.raises(ValueError, match=message):
            NeighborLoader(graph, [3], fetch=fetch)  # type: ignore[arg-type]


def test_counters_and_traces_tell_where_bytes_came_from_and_when_stages_ran() -> None:
    graph, _ = make_graph()
    loader = NeighborLoader(graph, [4, 3], num_threads=2, pipeline=PipelineOptions(trace=5), **OPTIONS)
    batches = list(loader)
    loader.close()
    counters = loader.counters()
    assert [name for name in counters if name not in BRINGING] == ["schedule", "sample", "fetch", "compact", "consumer"]
    assert counters["compact"].batches >= 13 and counters["sample"].waiting_most >= 1
    counts = counters["fetch"].counts
    assert counts["bytes_local"] >= sum(8 * b.num_nodes for b in batches)
    assert counts["bytes_remote"] >= sum(4 * DIM * b.num_nodes + 4 * b.num_edges for b in batches)
    traces = loader.trace()
    assert len(traces) == 5
    by_batch = {(t.epoch, t.batch): t for t in traces_of_an_epoch(graph)}
    for number, batch in enumerate(batches[:3]):
        record = by_batch[0, number]
        assert record.nodes == {NODE: batch.num_sampled_nodes}
        assert record.edges == {"node|to|node": batch.num_sampled_edges}
        assert record.num_seeds == batch.batch_size
        remote = 4 * DIM * batch.num_nodes + 4 * batch.num_edges
        assert record.bytes == {"local": 8 * batch.num_nodes, "remote": remote, "shared": 0}
        starts = [record.stages[s][0] for s in ("schedule", "sample", "fetch", "compact")]
        assert starts == sorted(starts) and all(a <= b for a, b in record.stages.values())
        assert record.as_dict()["device"] == "cpu"


def traces_of_an_epoch(graph: Graph) -> list[BatchTrace]:
    loader = NeighborLoader(graph, [4, 3], across_epochs=False, **OPTIONS)
    list(loader)
    return loader.trace()


@pytest.mark.parametrize("mutable", [None, False])
@pytest.mark.parametrize("disjoint", [False, True])
def test_rows_that_a_source_returns_are_the_batchs(mutable: bool | None, disjoint: bool) -> None:
    graph, source = make_graph()
    graph.set_node_data("x", Fresh(source.rows, mutable))
    loader = NeighborLoader(graph, [4, 3], disjoint=disjoint, **OPTIONS)
    for batch in loader:
        assert torch.equal(batch.x, source.rows[batch.n_id])


@pytest.mark.parametrize("change", [lambda rows: rows[1:], lambda rows: rows.double(), lambda rows: None])
def test_rows_of_another_shape_or_dtype_are_refused(change) -> None:
    graph, source = make_graph()
    graph.set_node_data("x", Fresh(source.rows, change=change))
    with pytest.raises(ValueError, match=r"source of 'x' must return rows \[\d+, 70\] torch.float32, got"):
        next(iter(NeighborLoader(graph, [4, 3], **OPTIONS)))


def test_arrays_are_settled_when_a_loader_is_made() -> None:
    graph, source = make_graph()
    loader = NeighborLoader(graph, [4, 3], **OPTIONS)
    for number, batch in enumerate(loader):
        if number == 3:
            graph.set_node_data("late", torch.arange(NUM_NODES))
            graph.set_node_data("x", torch.zeros(NUM_NODES, 1))
        assert "late" not in batch and torch.equal(batch.x, source.rows[batch.n_id])
    again = next(iter(NeighborLoader(graph, [4, 3], **OPTIONS)))
    assert torch.equal(again.late, again.n_id) and again.x.shape[1] == 1


def test_a_graph_takes_tensors_and_sources_and_nothing_else(tmp_path) -> None:
    graph, source = make_graph()
    for rows in (torch.rand(NUM_NODES, 2).numpy(), [1.0] * NUM_NODES, object()):
        with pytest.raises(
            ValueError, match=r"must be a torch.Tensor, got .* a source of rows with shape, dtype, read"
        ):
            graph.set_node_data("z", rows)
    with pytest.raises(ValueError, match="expected 4000 rows, one per edge"):
        graph.set_edge_data("z", source)
    with pytest.raises(ValueError, match="saving a graph needs rows in memory, and 'x' is a Source"):
        save(graph, tmp_path / "graph")
    with pytest.raises(ValueError, match="'w' is a Source: weights and times to draw by must be tensors"):
        NeighborLoader(graph, [2], weight_attr="w")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"wire_dtype": "bf16"}, "wire_dtype must be torch.float16, torch.bfloat16 or None"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be torch.float16, torch.bfloat16 or None"),
        ({"wire_dtype": torch.float64}, "wire_dtype must be torch.float16, torch.bfloat16 or None"),
        ({"stages": [len]}, r"stages must be gnnsys.pipeline.Stage, got builtin.*write Stage\("),
        ({"stages": len}, "stages must be a list of gnnsys.pipeline.Stage"),
        ({"pipeline": {}}, "pipeline must be a gnnsys.loader.PipelineOptions, got dict"),
        ({"sampler": 3}, r"or a function sampler\(graph, seeds, key\)"),
        ({"batch_size": 2.5}, "batch_size must be a whole number >= 1, got 2.5"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"num_threads": 1.5}, "num_threads must be a whole number >= 0"),
        ({"prefetch": 0}, "prefetch must be >= 1, got 0"),
        ({"device": "nope"}, "device must be one of torch's, such as 'cpu' or 'cuda:0', got 'nope'"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_what_can(argument: dict, message: str) -> None:
    graph, _ = make_graph()
    with pytest.raises(ValueError, match=message):
        NeighborLoader(graph, None if "sampler" in argument else [2], **argument)
