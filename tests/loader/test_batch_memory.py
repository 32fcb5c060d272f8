"""What batches will take of a device, told before there are any."""

from __future__ import annotations

import pytest
import torch

from gnnsys.graph import Graph
from gnnsys.loader import NeighborLoader
from gnnsys.loader.batch_memory import batch_bytes, promise_batches, sampled_sizes, share_for_batches
from gnnsys.store import MemoryBudget
from tests.sampling.machines import REV_WRITES, WRITES, homogeneous, typed


@pytest.mark.parametrize("graph, start", [(homogeneous(num_edges=4000), "node"), (typed(), "paper")])
def test_no_batch_is_larger_than_was_told(graph: Graph, start: str) -> None:
    for fanouts in ([4, 3], [2], [3, 2, 2, 1], [0]):
        for size in (1, 7, 30):
            nodes, edges = sampled_sizes(graph, fanouts, {start: size})
            whole, sampling = batch_bytes(graph, fanouts, {start: size}, None)
            assert sampling > 0
            some = torch.arange(20) if size == 1 else None
            loader = NeighborLoader(graph, fanouts, input_nodes=(start, some), batch_size=size, num_threads=0)
            for batch in loader:
                for t, of in batch.nodes.items():
                    assert of["n_id"].numel() <= nodes[t]
                for edge_type, of in batch.edges.items():
                    assert of["edge_index"].shape[1] <= edges[edge_type]
                tensors = [t for of in (batch.nodes, batch.edges) for rows in of.values() for t in rows.values()]
                of_seeds = 8 * size  # which of the inputs they are
                assert sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)) <= whole + of_seeds
    assert list(sampled_sizes(graph, [4], {start: 3})[1]) == graph.edge_types


def test_no_batch_is_larger_than_was_told_whatever_its_shape() -> None:
    one, two = homogeneous(num_nodes=30, num_edges=4000), typed()
    pair = {t: two.edge_index(t) for t in (WRITES, REV_WRITES)}
    both = Graph.from_edge_indices(pair, {"paper": 90, "author": 40})
    times = {"paper": torch.full((90,), 20), "author": torch.full((40,), 20)}
    for graph, inputs, options in (
        (one, ("node", None), {"disjoint": True}),
        (one, ("node", None), {"time_attr": "t", "input_time": torch.full((30,), 30)}),
        (one, ("node", None), {"subgraph_type": "bidirectional"}),
        (one, ("node", None), {"subgraph_type": "bidirectional", "disjoint": True}),
        (one, ("node", None), {"expand": "frontier"}),
        (both, ("author", None), {"subgraph_type": "bidirectional"}),
        (two, {"paper": None, "author": torch.arange(9)}, {}),
        (two, {"paper": None, "author": None}, {"time_attr": "t", "input_time": times}),
    ):
        types = inputs if isinstance(inputs, dict) else [inputs[0]]
        seeds = {t: 8 if t != "node" else 25 for t in types}
        shape = {name: value for name, value in options.items() if name not in ("time_attr", "input_time")}
        if "time_attr" in options:
            shape["disjoint"] = True
        nodes, edges = sampled_sizes(graph, [4, 3], seeds, **shape)
        whole, _ = batch_bytes(graph, [4, 3], seeds, [], **shape)
        size = max(seeds.values())
        loader = NeighborLoader(
            graph, [4, 3], input_nodes=inputs, batch_size=size, shuffle=True, num_threads=0, fetch=[], **options
        )
        for batch in loader:
            assert all(of["n_id"].numel() <= nodes[t] for t, of in batch.nodes.items()), options
            for hops in zip(*[block.csc.items() for block in batch.blocks], strict=True) if batch.blocks else ():
                edge_type = hops[0][0]
                assert sum(csc.indices.numel() for _, csc in hops) <= edges[edge_type]
            for edge_type, of in batch.edges.items():
                assert of.get("edge_index", torch.empty(2, 0)).shape[1] <= edges[edge_type], options
            tensors = [t for of in (batch.nodes, batch.edges) for rows in of.values() for t in rows.values()]
            assert sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)) <= whole + 16 * sum(seeds.values())


def test_the_edges_of_an_induced_batch_are_those_that_its_nodes_have_on_average() -> None:
    graph = homogeneous(num_nodes=100, num_edges=500)
    nodes, edges = sampled_sizes(graph, [3], {"node": 10}, subgraph_type="induced")
    assert nodes == {"node": 40} and edges == {graph.edge_types[0]: 200}


def test_seeds_of_several_types_are_told_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        "gnnsys.loader.neighbor_loader.promise_batches", lambda *given, **options: told.append((given[3], options))
    )
    inputs = {"paper": None, "author": torch.arange(3)}
    NeighborLoader(typed(), [2], input_nodes=inputs, batch_size=8, disjoint=True)
    ((seeds, options),) = told
    assert seeds == {"paper": 8, "author": 3} and options["disjoint"]


def test_all_neighbours_are_as_many_as_nodes_have_on_average() -> None:
    graph = homogeneous(num_nodes=100, num_edges=500)
    assert sampled_sizes(graph, [-1], {"node": 10})[1] == {graph.edge_types[0]: 50}
    nodes, _ = sampled_sizes(graph, [-1, -1, -1, -1], {"node": 10})
    assert nodes == {"node": 100}


def test_arrays_that_are_not_fetched_take_nothing() -> None:
    graph = homogeneous()
    most, least = (batch_bytes(graph, [3], {"node": 10}, names)[0] for names in (None, []))
    some = batch_bytes(graph, [3], {"node": 10}, {"node": ["x"]})[0]
    assert some - least == 40 * 16 and most > some


def test_room_is_set_aside_for_as_many_batches_as_a_loader_has_at_most_half_of_what_is_left() -> None:
    budget = MemoryBudget("cpu", limit=10_000)
    with share_for_batches(budget, 100, 50, num_threads=3, prefetch=2) as promise:
        assert promise.bytes == (2 + 3 + 2) * 100 + 3 * 50 and budget.left() == 10_000 - promise.bytes
    with share_for_batches(budget, 5000, 0, num_threads=None, prefetch=2) as promise:
        assert promise.bytes == 5000
    assert budget.left() == 10_000


def test_on_the_host_nothing_is_promised_and_bad_fanouts_are_left_to_the_sampler() -> None:
    options = {"names": None, "num_threads": 1, "prefetch": 2}
    graph = homogeneous()
    assert promise_batches(graph, None, [3], {"node": 1}, **options) is None
    assert promise_batches(graph, torch.device("cpu"), [3], {"node": 1}, **options) is None
    for bad in (["many"], {("a", "b", "c"): [1]}, [None]):
        assert promise_batches(graph, torch.device("cuda", 0), bad, {"node": 1}, **options) is None
