"""gnnsys.NeighborLoader: what its batches hold, and that they are a function of (seed, epoch, batch) alone."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import Batch, NeighborLoader

NUM_NODES, NUM_EDGES = 300, 2400


@pytest.fixture(scope="module")
def edge_index() -> Tensor:
    return torch.randint(NUM_NODES, (2, NUM_EDGES), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def graph(edge_index: Tensor) -> Graph:
    """Rows tell which node or edge they belong to, so that a batch can be checked against the graph."""
    nodes = torch.arange(NUM_NODES)
    node_data = {"x": nodes[:, None].float().expand(-1, 700).contiguous(), "y": nodes.clone(), "odd": nodes % 2 == 1}
    edge_data = {"edge_attr": torch.arange(NUM_EDGES)[:, None].double(), "w": torch.rand(NUM_EDGES)}
    return Graph.from_edge_index(edge_index, NUM_NODES, node_data, edge_data)


def check(batch: Batch, edge_index: Tensor) -> None:
    assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.e_id])
    assert torch.equal(batch.x, batch.n_id[:, None].float().expand(-1, 700))
    assert torch.equal(batch.y, batch.n_id)
    assert torch.equal(batch.odd, batch.n_id % 2 == 1)
    assert torch.equal(batch.edge_attr[:, 0], batch.e_id.double())


def same(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k]
        for k in a.keys()  # noqa: SIM118
    )


def test_batches_agree_with_the_graph_in_every_row(graph: Graph, edge_index: Tensor) -> None:
    loader = NeighborLoader(graph, [4, 3], batch_size=64, shuffle=True)
    seen = []
    for batch in loader:
        check(batch, edge_index)
        assert batch.batch_size == batch.input_id.numel() == batch.num_sampled_nodes[0]
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert sum(batch.num_sampled_nodes) == batch.num_nodes == batch.n_id.numel()
        assert sum(batch.num_sampled_edges) == batch.num_edges
        seen.append(batch.n_id[: batch.batch_size])
    assert len(seen) == len(loader) == 5
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NUM_NODES))


def test_no_node_gets_more_than_its_fanout_and_no_edge_comes_twice(graph: Graph) -> None:
    for batch in NeighborLoader(graph, [4, 3], batch_size=50):
        first_hop = batch.num_sampled_edges[0]
        assert batch.e_id.unique().numel() == batch.e_id.numel()
        assert int(torch.bincount(batch.edge_index[1, :first_hop]).max()) <= 4
        assert int(torch.bincount(batch.edge_index[1, first_hop:]).max()) <= 3
        assert bool((batch.edge_index[1].diff() >= 0).all())


def test_full_fanout_reaches_exactly_what_a_breadth_first_search_reaches(graph: Graph, edge_index: Tensor) -> None:
    seeds = torch.tensor([5, 17])
    batch = next(iter(NeighborLoader(graph, [-1, -1], input_nodes=seeds, batch_size=2)))
    reached, edges = set(seeds.tolist()), set()
    frontier = set(reached)
    for _ in range(2):
        hop = [e for e in range(NUM_EDGES) if int(edge_index[1, e]) in frontier]
        edges |= set(hop)
        frontier = {int(edge_index[0, e]) for e in hop} - reached
        reached |= frontier
    assert set(batch.n_id.tolist()) == reached and batch.n_id.numel() == len(reached)
    assert set(batch.e_id.tolist()) == edges and batch.e_id.numel() == len(edges)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_what_is_loaded_does_not_depend_on_threads_or_prefetch(graph: Graph, num_threads: int) -> None:
    options = {"batch_size": 32, "shuffle": True, "seed": 5}
    expected = list(NeighborLoader(graph, [4, 3], num_threads=0, **options))
    got = list(NeighborLoader(graph, [4, 3], num_threads=num_threads, prefetch=1 + num_threads, **options))
    assert len(got) == len(expected)
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_epochs_differ_and_are_repeated_by_a_loader_made_alike(graph: Graph) -> None:
    first, second = (NeighborLoader(graph, [4], batch_size=300, shuffle=True, seed=3) for _ in range(2))
    epochs = [next(iter(first)) for _ in range(3)]
    again = [next(iter(second)) for _ in range(3)]
    assert all(same(a, b) for a, b in zip(epochs, again, strict=True))
    assert not torch.equal(epochs[0].input_id, epochs[1].input_id)
    other = next(iter(NeighborLoader(graph, [4], batch_size=300, shuffle=True, seed=4)))
    assert not torch.equal(epochs[0].input_id, other.input_id)


def test_every_seed_is_equally_likely_to_come_first(graph: Graph) -> None:
    loader = NeighborLoader(graph, [1], input_nodes=range(6), batch_size=6, shuffle=True, num_threads=0)
    first = Counter(int(next(iter(loader)).input_id[0]) for _ in range(600))
    chi_square = sum((first[i] - 100) ** 2 / 100 for i in range(6))
    assert chi_square < 20.5  # 99.9% of chi-square with 5 degrees of freedom


@pytest.mark.parametrize("across_epochs", [True, False])
@pytest.mark.parametrize("seen", [0, 1, 4, 5, 7, 10])
def test_a_state_saved_in_mid_epoch_resumes_at_the_next_batch(graph: Graph, seen: int, across_epochs: bool) -> None:
    def make() -> NeighborLoader:
        return NeighborLoader(graph, [4, 3], batch_size=64, shuffle=True, across_epochs=across_epochs)

    unbroken = make()
    whole = [batch for _ in range(3) for batch in unbroken]

    first = make()
    batches = (batch for _ in range(3) for batch in first)
    head = [next(batches) for _ in range(seen)]
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    tail = [batch for _ in range(second.epoch, 3) for batch in second]
    assert len(head) + len(tail) == len(whole) == 15
    assert all(same(a, b) for a, b in zip(head + tail, whole, strict=True))


def test_a_state_of_another_schedule_is_refused(graph: Graph) -> None:
    state = NeighborLoader(graph, [4], batch_size=64).state_dict()
    with pytest.raises(ValueError, match="batch_size=64, here it is 32"):
        NeighborLoader(graph, [4], batch_size=32).load_state_dict(state)


def test_loading_runs_on_into_the_next_epoch_or_stops_at_the_end_of_this_one(graph: Graph) -> None:
    for across_epochs in (True, False):
        loaded: list[Batch] = []
        beyond = threading.Event()

        def note(batch: Batch, loaded: list[Batch] = loaded, beyond: threading.Event = beyond) -> Batch:
            loaded.append(batch)
            if len(loaded) > 5:
                beyond.set()
            return batch

        loader = NeighborLoader(graph, [3], batch_size=64, transform=note, across_epochs=across_epochs)
        assert len(list(loader)) == 5
        assert beyond.wait(120) if across_epochs else len(loaded) == 5
        assert len(list(loader)) == 5


def test_an_epoch_left_early_is_over(graph: Graph) -> None:
    loader = NeighborLoader(graph, [4], batch_size=64, shuffle=True)
    for _ in loader:
        break
    assert loader.epoch == 0
    second = [b.input_id for b in loader]
    reference = NeighborLoader(graph, [4], batch_size=64, shuffle=True)
    list(reference)
    assert all(torch.equal(a, b.input_id) for a, b in zip(second, reference, strict=True))
    assert len(second) == 5


def test_a_second_iteration_ends_the_first_with_an_error(graph: Graph) -> None:
    loader = NeighborLoader(graph, [4], batch_size=64)
    first, second = iter(loader), iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="another iteration"):
        next(first)


def test_no_threads_are_left_behind(graph: Graph) -> None:
    others = set(threading.enumerate())

    def names() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("gnnsys-") and t not in others]

    loader = NeighborLoader(graph, [4], batch_size=64, num_threads=2)
    for _ in loader:
        break
    del loader
    gc.collect()
    assert names() == []
    for batch in NeighborLoader(graph, [4], batch_size=64, across_epochs=False):
        assert batch.num_nodes
    assert names() == []


def test_calling_the_loader_gives_the_batch_of_these_inputs(graph: Graph, edge_index: Tensor) -> None:
    loader = NeighborLoader(graph, [4, 3], input_nodes=torch.arange(100, 200))
    batch = loader([3, 0, 99])
    check(batch, edge_index)
    assert batch.n_id[:3].tolist() == [103, 100, 199]
    assert same(batch, loader(torch.tensor([3, 0, 99])))
    with pytest.raises(ValueError, match="index must"):
        loader([100])


def test_the_last_batch_is_dropped_on_demand(graph: Graph) -> None:
    loader = NeighborLoader(graph, [2], batch_size=64, drop_last=True)
    assert [b.batch_size for b in loader] == [64] * len(loader) == [64] * 4
    assert list(NeighborLoader(graph, [2], batch_size=301, drop_last=True)) == []


@pytest.mark.parametrize("nodes", [[7, 3, 7], range(4, 9), torch.tensor([9, 8], dtype=torch.int32)])
def test_seeds_may_be_a_list_a_range_or_int32_and_may_repeat(graph: Graph, edge_index: Tensor, nodes) -> None:
    batch = next(iter(NeighborLoader(graph, [3, 2], input_nodes=nodes, batch_size=10)))
    assert batch.n_id[: batch.batch_size].tolist() == [int(n) for n in nodes]
    check(batch, edge_index)


def test_a_mask_selects_seeds(graph: Graph) -> None:
    batch = next(iter(NeighborLoader(graph, [3], input_nodes=graph.node_data[NODE]["odd"], batch_size=500)))
    assert batch.n_id[: batch.batch_size].tolist() == list(range(1, NUM_NODES, 2))


def test_induced_batches_have_every_edge_among_their_nodes(graph: Graph, edge_index: Tensor) -> None:
    for batch in NeighborLoader(graph, [3, 2], batch_size=20, subgraph_type="induced"):
        check(batch, edge_index)
        inside = torch.isin(edge_index, batch.n_id).all(0).nonzero().view(-1)
        assert torch.equal(batch.e_id.sort().values, inside)
        assert "num_sampled_nodes" not in batch


def test_bidirectional_batches_are_symmetric_and_coalesced(graph: Graph) -> None:
    options = {"batch_size": 20, "seed": 2}
    directional = NeighborLoader(graph, [3, 2], **options)
    for batch, plain in zip(
        NeighborLoader(graph, [3, 2], subgraph_type="bidirectional", **options), directional, strict=True
    ):
        pairs = set(map(tuple, plain.edge_index.t().tolist()))
        expected = pairs | {(b, a) for a, b in pairs}
        got = [tuple(p) for p in batch.edge_index.t().tolist()]
        assert len(got) == len(expected) and set(got) == expected
        assert got == sorted(got, key=lambda p: (p[1], p[0]))
        assert torch.equal(batch.n_id, plain.n_id)
        assert set(batch.e_id.tolist()) <= set(plain.e_id.tolist())


def test_disjoint_batches_keep_trees_apart(graph: Graph, edge_index: Tensor) -> None:
    for batch in NeighborLoader(graph, [3, 3], batch_size=30, disjoint=True):
        check(batch, edge_index)
        src, dst = batch.batch[batch.edge_index]
        assert torch.equal(src, dst)
        assert torch.equal(batch.batch[: batch.batch_size], torch.arange(batch.batch_size))


def test_weights_of_zero_are_never_sampled(graph: Graph, edge_index: Tensor) -> None:
    weight = (torch.arange(NUM_EDGES) % 3 == 0).float()
    weighted = Graph.from_edge_index(edge_index, NUM_NODES, edge_data={"w": weight})
    for batch in NeighborLoader(weighted, [5, 5], batch_size=64, weight_attr="w"):
        assert bool((batch.e_id % 3 == 0).all())
        assert batch.num_edges > 0


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_neighbours_are_not_later_than_their_seed(edge_index: Tensor, strategy: str) -> None:
    time = torch.randint(100, (NUM_NODES,), generator=torch.Generator().manual_seed(2))
    graph = Graph.from_edge_index(edge_index, NUM_NODES, node_data={"time": time})
    options = {"batch_size": 40, "time_attr": "time", "temporal_strategy": strategy}
    for batch in NeighborLoader(graph, [4, 4], **options):
        assert bool((batch.time <= batch.time[batch.batch]).all())
        assert "seed_time" not in batch
    later = torch.full((NUM_NODES,), 50)
    for batch in NeighborLoader(graph, [4, 4], input_time=later, **options):
        assert bool((batch.time[batch.batch_size :] <= 50).all())
        assert torch.equal(batch.seed_time, torch.full((batch.batch_size,), 50))


def test_edge_times_need_the_time_of_the_seeds_and_respect_it(edge_index: Tensor) -> None:
    time = torch.arange(NUM_EDGES).flip(0)
    graph = Graph.from_edge_index(edge_index, NUM_NODES, edge_data={"time": time})
    with pytest.raises(ValueError, match="input_time must be given"):
        NeighborLoader(graph, [4], time_attr="time")
    batch = next(
        iter(NeighborLoader(graph, [4, 4], input_time=torch.full((300,), 1000), time_attr="time", batch_size=99))
    )
    assert batch.num_edges > 0
    assert bool((batch.time <= 1000).all())


def test_blocks_are_offered_in_dgls_way(graph: Graph) -> None:
    batch = next(iter(NeighborLoader(graph, [4, 3], batch_size=16, expand="frontier")))
    assert [b.num_dst[NODE] for b in batch.blocks][-1] == 16
    assert batch.blocks[0].num_src[NODE] == batch.n_id.numel()
    assert int(batch.blocks[-1].csc[EDGE].in_degrees().max()) <= 4
    assert batch.x.shape[0] == batch.n_id.numel()


def test_the_transform_is_the_last_step(graph: Graph) -> None:
    def add(batch: Batch) -> Batch:
        batch.total = batch.y.sum()
        batch.y = batch.y + 1
        return batch

    for num_threads in (0, 2):
        for batch in NeighborLoader(graph, [3], batch_size=100, transform=add, num_threads=num_threads):
            assert torch.equal(batch.y, batch.n_id + 1)
            assert int(batch.total) == int(batch.n_id.sum())


def test_features_that_need_a_gradient_get_one(edge_index: Tensor) -> None:
    x = torch.randn(NUM_NODES, 4, requires_grad=True)
    graph = Graph.from_edge_index(edge_index, NUM_NODES, node_data={"x": x})
    batch = next(iter(NeighborLoader(graph, [3], input_nodes=[0, 1], batch_size=2)))
    batch.x.sum().backward()
    assert x.grad is not None
    assert torch.equal((x.grad[:, 0] > 0).nonzero().view(-1), batch.n_id.sort().values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"input_nodes": []}, "input_nodes is empty"),
        ({"input_nodes": [300]}, "input_nodes"),
        ({"input_nodes": torch.zeros(3, dtype=torch.bool)}, "mask must have 300"),
        ({"input_nodes": "paper"}, "paper"),
        ({"num_neighbors": [-2]}, "num_neighbors"),
        ({"num_neighbors": []}, "num_neighbors"),
        ({"subgraph_type": "ego"}, "subgraph_type"),
        ({"subgraph_type": "induced", "time_attr": "y"}, "induced"),
        ({"temporal_strategy": "first"}, "temporal_strategy"),
        ({"input_time": torch.zeros(300, dtype=torch.int64)}, "time_attr"),
        ({"input_time": torch.zeros(300), "time_attr": "y"}, "input_time must hold integers"),
        ({"weight_attr": "nope"}, "nope"),
        ({"time_attr": "nope"}, "nope"),
        ({"time_attr": "x"}, "must hold integers"),
        ({"num_threads": -1}, "num_threads"),
        ({"prefetch": 0}, "prefetch"),
        ({"device": "cuda:0"} if not torch.cuda.is_available() else {"device": "mps"}, "device"),
    ],
)
def test_bad_arguments_are_refused_by_name(graph: Graph, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborLoader(graph, **{"num_neighbors": [3], **arguments})


def test_blocks_do_not_go_with_subgraphs_of_another_kind(graph: Graph) -> None:
    for subgraph_type in ("induced", "bidirectional"):
        with pytest.raises(ValueError, match="expand='frontier'"):
            NeighborLoader(graph, [2], expand="frontier", subgraph_type=subgraph_type)


def test_fanouts_that_are_no_list_of_whole_numbers_are_refused(graph: Graph) -> None:
    for fanouts in (3, [2.7], [1 << 40]):
        with pytest.raises(ValueError, match="num_neighbors"):
            NeighborLoader(graph, fanouts)  # type: ignore[arg-type]


@pytest.mark.parametrize("across_epochs", [True, False])
def test_an_iterator_that_is_not_asked_for_its_end_leaves_the_next_epoch_whole(
    graph: Graph, across_epochs: bool
) -> None:
    loader = NeighborLoader(graph, [4], batch_size=64, shuffle=True, across_epochs=across_epochs)
    plain = NeighborLoader(graph, [4], batch_size=64, shuffle=True)
    for _ in range(3):
        epoch = iter(loader)  # the one before lives until here
        ours = [next(epoch).n_id for _ in range(len(loader))]
        assert all(torch.equal(a, batch.n_id) for a, batch in zip(ours, plain, strict=True))
    loader.close()
