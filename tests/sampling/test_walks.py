"""Walks, what is built on them, and samplers of subgraphs on parts over real connections, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind, Request
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader, SubgraphLoader
from gnnsys.sampling import (
    ClusterSampler,
    PinSAGESampler,
    SaintEdgeSampler,
    SaintNodeSampler,
    SaintWalkSampler,
    SampleKey,
    ShadowSampler,
    random_walks,
)
from tests.sampling.machines import assert_same_sample, homogeneous, machines, to_global, typed

KEY = SampleKey(seed=3, epoch=1, batch=4)
ROOTS = torch.tensor([7, 11, 80, 7, 118, 3])


LONG = [pytest.param(number, marks=pytest.mark.long) for number in (2, 3)]  # of parts


@pytest.fixture(scope="module", params=[1, *LONG, 4])
def parted(request, tmp_path_factory) -> Iterator[tuple]:
    graph, seen = homogeneous(), list[Request]()
    folder = tmp_path_factory.mktemp("parts") / "p"
    with machines(graph, folder, request.param, clusters=12, seen=seen) as graphs:
        yield graph, graphs, seen


def adjacency(graph: Graph) -> Tensor:
    """Edges from column to row, counted."""
    dense = torch.zeros(graph.num_nodes(), graph.num_nodes(), dtype=torch.float64)
    src, dst = graph.edge_index()
    return dense.index_put_((dst, src), torch.ones(src.numel(), dtype=torch.float64), accumulate=True)


def test_every_step_is_an_in_edge_and_a_walk_ends_where_there_is_none() -> None:
    graph = homogeneous()
    dense, walks = adjacency(graph), random_walks(graph, torch.arange(120), 12, key=5)
    assert torch.equal(walks[:, 0], torch.arange(120))
    for walk in walks.tolist():
        for here, there in pairwise(walk):
            if here < 0:
                assert there < 0
            elif there < 0:
                assert dense[here].sum() == 0
            else:
                assert dense[here, there] > 0


def test_the_end_of_a_walk_is_distributed_as_the_power_of_the_transition_matrix() -> None:
    graph = homogeneous()
    dense = adjacency(graph)
    transition = dense / dense.sum(1, keepdim=True).clamp(min=1)
    num_walks = 40_000
    walks = random_walks(graph, torch.full((num_walks,), 7), 3, key=9)
    expected = num_walks * torch.linalg.matrix_power(transition, 3)[7]
    found = torch.bincount(walks[:, 3][walks[:, 3] >= 0], minlength=120).double()
    seen = expected > 0
    chi = float(((found - expected)[seen] ** 2 / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    assert int(found[~seen].sum()) == 0 and abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


def test_walks_restart_with_the_probability_that_was_asked_for() -> None:
    graph = homogeneous()
    alone = torch.full((20_000,), 118)  # a node without in-edges: every step leads back
    assert bool((random_walks(graph, alone, 3, key=1, restart_prob=0.2) == 118).all())
    dense = adjacency(graph)
    root = int((dense.diagonal() == 0).nonzero()[0])
    stays = (random_walks(graph, torch.full((20_000,), root), 1, key=1, restart_prob=0.3)[:, 1] == root).double().mean()
    assert abs(float(stays) - 0.3) < 5 * (0.3 * 0.7 / 20_000) ** 0.5


@pytest.mark.parametrize("restart_prob", [0.0, 0.3])
def test_walks_on_parts_are_those_of_one_process_with_a_message_per_machine_and_step(parted, restart_prob) -> None:
    graph, graphs, seen = parted
    expected = random_walks(graph, ROOTS, 8, key=3, restart_prob=restart_prob)
    for mine in graphs:
        roots = mine.global_ids(ROOTS)
        seen.clear()
        walks = random_walks(mine, roots, 8, key=3, restart_prob=restart_prob)
        asked = [request for request in seen if request.kind == Kind.SAMPLE]
        assert len(asked) <= 8 * (len(graphs) - 1) and len(asked) == len(seen)
        named = torch.where(walks >= 0, mine.original_ids(walks.clamp(min=0).view(-1)).view(walks.shape), -1)
        assert torch.equal(named, expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": -1}, "length must be >= 0"),
        ({"restart_prob": 1.0}, "restart_prob in"),
        ({"roots": torch.tensor([120])}, r"roots must be in \[0, 120\)"),
    ],
)
def test_walks_that_cannot_be_are_refused(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        random_walks(homogeneous(), **{"roots": ROOTS, "length": 2, "key": 1, **arguments})
    with pytest.raises(ValueError, match="edge_type must be named"):
        random_walks(typed(), ROOTS, 2, key=1)


# -- PinSAGE -----------------------------------------------------------------------------------------------------------


def test_pinsage_takes_the_nodes_that_walks_visit_most() -> None:
    graph = homogeneous()
    sampler = PinSAGESampler(graph, [4], num_walks=30, length=3, restart_prob=0.2)
    seeds = torch.tensor([7, 118, 50])
    visited = sampler.visited(seeds, 4, key=11)
    walks = random_walks(graph, seeds.repeat_interleave(30), 3, key=11, restart_prob=0.2)
    for number, seed in enumerate(seeds.tolist()):
        visits = walks[30 * number : 30 * number + 30, 1:].reshape(-1).tolist()
        counts = {node: visits.count(node) for node in dict.fromkeys(visits) if node not in (-1, seed)}
        best = sorted(counts, key=lambda node: -counts[node])[:4]  # a stable sort: ties as they were first seen
        assert visited.ids[visited.root == number].tolist() == best
        total = sum(counts[node] for node in best)
        share = [counts[node] / total for node in best]
        assert visited.share(3)[visited.root == number].tolist() == pytest.approx(share)


def test_pinsage_without_seeds_of_its_type_says_what_to_write() -> None:
    sampler = PinSAGESampler(homogeneous(), [4], num_walks=3, length=2)
    with pytest.raises(ValueError, match=r"seeds must be given as \{'node': ids\}, got node types \[\]"):
        sampler.sample({}, key=KEY)


def test_pinsage_on_parts_is_that_of_one_process(parted) -> None:
    graph, graphs, _ = parted
    options = {"num_walks": 10, "length": 3, "restart_prob": 0.3}
    expected = PinSAGESampler(graph, [5, 3], **options).sample({NODE: ROOTS}, key=KEY)
    assert sum(expected.num_sampled_edges[EDGE]) > 30
    for mine in graphs:
        ours = PinSAGESampler(mine, [5, 3], **options).sample(to_global(mine, {NODE: ROOTS}), key=KEY)
        assert_same_sample(ours, expected, mine)
        assert ours.edge_weight is not None and expected.edge_weight is not None
        assert torch.equal(ours.edge_weight[EDGE], expected.edge_weight[EDGE])
    (batch,) = NeighborLoader(graph, sampler=PinSAGESampler(graph, [5, 3], **options), input_nodes=ROOTS, batch_size=6)
    assert batch.edge_weight.shape == (batch.edge_index.shape[1],) and "e_id" not in batch


# -- subgraphs on machines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disjoint", [True, False])
def test_shadow_samples_of_parts_are_those_of_one_process(parted, disjoint: bool) -> None:
    graph, graphs, _ = parted
    expected = ShadowSampler(graph, [4, 3], disjoint=disjoint).sample({NODE: ROOTS}, key=KEY)
    for mine in graphs:
        ours = ShadowSampler(mine, [4, 3], disjoint=disjoint).sample(to_global(mine, {NODE: ROOTS}), key=KEY)
        assert_same_sample(ours, expected, mine)


def test_a_loader_with_a_shadow_sampler_gives_what_the_options_of_a_loader_give() -> None:
    graph = homogeneous()
    ours = NeighborLoader(graph, sampler=ShadowSampler(graph, [4, 3]), input_nodes=ROOTS, batch_size=3)
    theirs = NeighborLoader(graph, [4, 3], subgraph_type="induced", disjoint=True, input_nodes=ROOTS, batch_size=3)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index)
        assert torch.equal(a.batch, b.batch) and torch.equal(a.e_id, b.e_id)


@pytest.mark.usefixtures("one_epoch")
@pytest.mark.parametrize("kind", ["nodes", "edges", "walks"])
def test_saint_subgraphs_of_machines_are_those_of_one_process(parted, kind: str) -> None:
    graph, graphs, _ = parted
    make = {
        "nodes": lambda g: SaintNodeSampler(g, 20, num_subgraphs=3, coverage=1),
        "edges": lambda g: SaintEdgeSampler(g, 12, num_subgraphs=3, coverage=1),
        "walks": lambda g: SaintWalkSampler(g, 6, 3, num_subgraphs=3, coverage=1),
    }[kind]
    whole, number = make(graph), torch.tensor([2])
    expected = whole.sample(number, key=KEY)
    for mine in graphs:
        ours = make(mine).sample(number, key=KEY)
        assert_same_sample(ours, expected, mine)
        for name, key in (("edge_weight", EDGE), ("node_weight", NODE)):
            assert torch.equal(getattr(ours, name)[key], getattr(expected, name)[key])


def test_batches_of_a_parts_own_clusters_ask_no_other_machine(parted) -> None:
    _, graphs, seen = parted
    for part, mine in enumerate(graphs):
        sampler = ClusterSampler(mine)
        bounds = mine.parts.clusters.bounds.tolist()
        seen.clear()
        loader = SubgraphLoader(mine, sampler, inputs=range(bounds[part], bounds[part + 1]), batch_size=2, shuffle=True)
        nodes = torch.cat([batch.n_id for batch in loader])
        loader.close()
        assert torch.equal(nodes.sort().values, torch.tensor(mine.book.part_range(part)))
        assert not [r for r in seen if r.loader == loader._context.loader], "structure and rows are here"


def test_a_batch_of_clusters_of_several_parts_is_the_same_on_every_machine(parted) -> None:
    _, graphs, _ = parted
    inputs = torch.tensor([11, 0, 5])
    samples = [ClusterSampler(mine).sample(inputs, key=KEY) for mine in graphs]
    for sample in samples:
        assert torch.equal(sample.node[NODE], samples[0].node[NODE])
        assert torch.equal(sample.row[EDGE], samples[0].row[EDGE])
        assert torch.equal(sample.edge[EDGE], samples[0].edge[EDGE])
