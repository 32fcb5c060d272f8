"""Shares from parts on disk: the losses and gradients of the graph in memory, and errors that say what to do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing, share_of
from gnnsys.graph import Graph
from gnnsys.nn import GCNConv, SAGEConv
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph
from gnnsys.session.open_parts import open_alone
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.thread_ranks import run_ranks

TOLERANCE = 1e-10
N, WIDTH, OUT = 90, 5, 3


def make_graph() -> Graph:
    """Directed, with loops, repeated edges and isolated nodes."""
    draws = torch.Generator().manual_seed(5)
    rows = {
        "x": torch.randn(N, WIDTH, dtype=torch.float64, generator=draws),
        "y": torch.randn(N, OUT, dtype=torch.float64, generator=draws),
        "id": torch.arange(N),
    }
    return Graph.from_edge_index(random_graph(N, 500, 1).edge_index(), N, rows)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function from (parts, trainers per part) to the opened graph, made once each."""
    made: dict[tuple[int, int], DistGraph] = {}

    def get(num_parts: int, trainers_per_part: int) -> DistGraph:
        key = num_parts, trainers_per_part
        if key not in made:
            folder = tmp_path_factory.mktemp("parts") / "parts"
            partition_graph(
                make_graph(), num_parts, folder, trainers_per_part=trainers_per_part, objective="communication"
            )
            made[key] = open_alone(folder, verify=True)
        return made[key]

    return get


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    return [layer.double() for layer in (SAGEConv(WIDTH, 6), nn.ReLU(), nn.Dropout(0.3), GCNConv(6, OUT))]


def step(model: HybridParallel) -> tuple[float, Tensor, Tensor, list[Tensor]]:
    """The whole loss, this rank's nodes, the gradient of their rows, and those of the parameters."""
    x = model.share.rows("x").clone().requires_grad_()
    loss = (model(x) - model.share.rows("y")).square().sum()
    loss.backward()
    return model.total(loss.detach()), model.nodes, x.grad, [p.grad for p in model.parameters()]


def close(got: Tensor, want: Tensor) -> bool:
    return float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())


@pytest.fixture(scope="module")
def in_memory(layers):
    return step(HybridParallel(copy.deepcopy(layers), make_graph(), seed=3))


SHAPES = [
    (parts, trainers, ranks)
    for parts, trainers in [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (4, 2), (3, 2)]
    for ranks in (1, 2, 4)
    if parts * trainers % ranks == 0
]
SHORT = ((1, 1, 1), (2, 1, 2), (4, 1, 2), (1, 4, 4), (2, 2, 4), (4, 2, 4), (3, 2, 2), (3, 2, 1))


@pytest.mark.parametrize(
    ("num_parts", "trainers_per_part", "world_size"),
    [pytest.param(*shape, marks=[] if shape in SHORT else [pytest.mark.long]) for shape in SHAPES],
)
def test_ranks_on_parts_give_what_one_gives_on_the_graph_in_memory(
    num_parts, trainers_per_part, world_size, opened, layers, in_memory
):
    graph = opened(num_parts, trainers_per_part)

    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), graph, group=group, timeout=60, seed=3)
        assert model.share.world_size == world_size
        return step(model)

    loss, _, x_grad, grads = in_memory
    found = run_ranks(world_size, work)
    assert torch.equal(torch.cat([nodes for _, nodes, _, _ in found]).sort().values, torch.arange(N))
    for total, nodes, own_grad, of_parameters in found:
        assert abs(total - loss) <= TOLERANCE * loss
        assert close(own_grad, x_grad[nodes])
        assert all(map(close, of_parameters, grads))


def test_the_graph_in_memory_gives_what_a_dense_computation_does(layers):
    """What the tests above lean on, without dropout."""
    kept = [layer for layer in layers if not isinstance(layer, nn.Dropout)]
    graph = make_graph()
    rows = graph.node_data["node"]
    want = (dense_forward(kept, rows["x"], adjacency(graph)) - rows["y"]).square().sum()
    assert abs(step(HybridParallel(copy.deepcopy(kept), graph))[0] - want.item()) <= TOLERANCE * want.item()


@pytest.mark.parametrize("num_bins", [1, 7, 40])
def test_one_process_trains_on_four_parts_in_any_number_of_bins(num_bins, opened, layers, in_memory):
    schedule = BinSchedule(packing=Packing(num_bins=num_bins))
    model = HybridParallel(copy.deepcopy(layers), opened(4, 1), schedule=schedule, seed=3)
    assert model.plan.num_core == N and model.plan.num_halo == 0
    total, nodes, x_grad, grads = step(model)
    assert abs(total - in_memory[0]) <= TOLERANCE * in_memory[0]
    assert close(x_grad, in_memory[2][nodes]) and all(map(close, grads, in_memory[3]))


def test_a_share_has_the_rows_and_in_edges_of_its_nodes(opened):
    graph, whole = opened(2, 2), make_graph()
    sources = whole.csc()
    for rank in range(4):
        share = share_of(graph, rank, 4)
        assert torch.equal(share.rows("id"), share.original_ids)
        assert torch.equal(share.rows("x"), whole.node_data["node"]["x"][share.original_ids])
        names = torch.cat([share_of(graph, each, 4).original_ids for each in range(4)])  # by global id
        for column, node in enumerate(share.original_ids.tolist()):
            here = share.csc.indices[int(share.csc.indptr[column]) : int(share.csc.indptr[column + 1])]
            there = sources.indices[int(sources.indptr[node]) : int(sources.indptr[node + 1])]
            assert names[here.long()].tolist() == there.tolist(), "in the order of the user's edges"


@pytest.mark.parametrize("world_size", [3, 8])
def test_parts_that_cannot_be_dealt_alike_say_how_to_partition(world_size, opened):
    with pytest.raises(ValueError, match=rf"4 parts of 1 subparts .* {world_size} ranks alike: partition with --parts"):
        share_of(opened(4, 1), 0, world_size)


def test_a_rank_whose_parts_are_elsewhere_says_which_it_needs(opened):
    graph = copy.copy(opened(4, 1))
    graph.parts_here = [0, 1]
    share_of(graph, 0, 2)
    with pytest.raises(
        ValueError, match=r"rank 1 trains on parts \[2, 3\].*has \[0, 1\]: put the folders of parts \[2, 3\]"
    ):
        share_of(graph, 1, 2)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (None, "2 ranks share a graph in memory: pass ranks, the rank of every node, or open parts"),
        (
            torch.zeros(N - 1, dtype=torch.int64),
            rf"ranks must be int \[{N}\], a rank per node, got torch.int64 \[{N - 1}\]",
        ),
        (torch.zeros(N), "ranks must be int .* got torch.float32"),
        (torch.full((N,), 2), r"ranks must be in \[0, 2\), got 2 to 2"),
        (torch.arange(N) - 1, r"ranks must be in \[0, 2\), got -1 to"),
    ],
    ids=["none", "too few", "of floats", "too large", "negative"],
)
def test_wrong_ranks_are_refused(ranks, says):
    with pytest.raises(ValueError, match=says):
        share_of(make_graph(), 0, 2, ranks)


def test_ranks_beside_parts_are_refused(opened):
    with pytest.raises(ValueError, match="parts say themselves which nodes a rank has: leave ranks away"):
        share_of(opened(2, 1), 0, 2, torch.zeros(N, dtype=torch.int64))


def test_the_share_of_another_rank_is_refused(opened):
    share = share_of(opened(2, 1), 1, 2)
    assert share_of(share, 1, 2) is share
    with pytest.raises(ValueError, match="share of rank 1 of 2, and this process is rank 0 of 1"):
        HybridParallel([SAGEConv(WIDTH, 2)], share)


def test_rows_that_are_not_there_are_named(opened):
    for graph in (opened(2, 1), make_graph()):
        with pytest.raises(ValueError, match=r"the nodes have no 'z', they have .*'x'"):
            share_of(graph, 0, 1).rows("z")


RANKS = {
    "nothing on the first": [1, 1, 1, 2, 2, 2],
    "nothing on the first two": [2] * 6,
    "nothing in the middle": [0, 0, 2, 2, 2, 2],
    "nothing on the last": [0, 0, 0, 1, 1, 1],
    "nothing but on the first": [0] * 6,
    "one node each": [0, 1, 2, 2, 2, 2],
}


@pytest.mark.parametrize("name", RANKS)
def test_parts_without_nodes_without_edges_and_without_labels_take_part(name, tmp_path):
    """Node 5 has no in-edge, node 0 is a source alone; the loss is that of nodes 2 and 3."""
    edges = torch.tensor([[0, 0, 1, 2, 5, 3, 4, 4, 4], [1, 2, 2, 3, 3, 4, 4, 4, 3]])
    draws = torch.Generator().manual_seed(5)
    rows = {"x": torch.randn(6, WIDTH, dtype=torch.float64, generator=draws), "y": torch.arange(6)}
    graph, assignment = Graph.from_edge_index(edges, 6, rows), tmp_path / "ranks.npy"
    np.save(assignment, np.array(RANKS[name]))
    partition_graph(graph, 3, tmp_path / "parts", method=f"assignment={assignment}")
    torch.manual_seed(0)
    made = [layer.double() for layer in (SAGEConv(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU(), GCNConv(6, OUT))]

    def train(layers, source, group, **options):
        model = HybridParallel(layers, source, group=group, timeout=60, **options)
        x = model.share.rows("x").requires_grad_()
        loss = model(x)[torch.isin(model.share.rows("y"), torch.tensor([2, 3]))].square().sum()
        loss.backward()
        return model.total(loss.detach()), [p.grad for p in model.parameters()], model.nodes, x.grad

    whole = copy.deepcopy(made)
    x = rows["x"].clone().requires_grad_()
    out = dense_forward(whole, x, adjacency(graph))
    loss = out[2:4].square().sum()
    loss.backward()
    opened = open_alone(tmp_path / "parts", verify=True)
    for options in ({}, {"recompute": True, "schedule": BinSchedule(packing=Packing(bin_nodes=1))}):
        for world_size in (1, 3):
            work = lambda rank, group: train(copy.deepcopy(made), opened, group, **options)  # noqa: E731, B023
            for total, grads, nodes, x_grad in run_ranks(world_size, work):
                assert abs(total - loss.item()) <= TOLERANCE * loss.item()
                assert torch.allclose(x_grad, x.grad[nodes], atol=1e-12)
                wanted = [p.grad for layer in whole for p in layer.parameters()]
                for got, want in zip(grads, wanted, strict=True):
                    assert torch.allclose(got, want, atol=1e-12)
