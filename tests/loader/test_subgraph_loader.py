"""Batches of clusters and of GraphSAINT's subgraphs: what is in them, on one graph and on parts, and resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gnnsys
from gnnsys.graph import EDGE, NODE, Graph, sbm, write_manifest
from gnnsys.loader import Batch, SubgraphLoader
from gnnsys.partition import Clustering, Placement, open_parts, partition_graph, verify_parts
from gnnsys.sampling import (
    ClusterSampler,
    DistGraph,
    NeighborSampler,
    SaintEdgeSampler,
    SaintNodeSampler,
    SaintWalkSampler,
    SampleKey,
    SubgraphSampler,
    cluster,
)
from gnnsys.store import Shard, Store
from tests.sampling.machines import copies, homogeneous, typed

KEY = SampleKey(seed=3, epoch=1, batch=4)


def opened(folder: Path) -> DistGraph:
    parts = open_parts(folder)
    here = [0] * parts.num_parts
    return DistGraph(parts, Store(machine_of_part=here, local=Shard(0)), None, 0, here)


def clusters_of(graph: DistGraph) -> Clustering:
    """The clusters of parts, as those of the graph that they were made of."""
    book = graph.parts.clusters
    assert book is not None
    cluster = {}
    for node_type, offsets in book.node_offsets.items():
        of_global = torch.repeat_interleave(torch.arange(book.num_clusters), offsets.diff()).int()
        cluster[node_type] = of_global[graph.global_ids(torch.arange(graph.num_nodes(node_type)), node_type)]
    return Clustering(cluster, book.bounds)


def assert_same(ours: Batch, theirs: Batch, graph: DistGraph) -> None:
    assert torch.equal(graph.original_ids(ours.n_id), theirs.n_id)
    assert torch.equal(ours.edge_index, theirs.edge_index)
    assert torch.equal(graph.original_edge_ids(ours.e_id), theirs.e_id)
    assert torch.equal(ours.x, theirs.x) and torch.equal(ours.input_id, theirs.input_id)
    for name in ("edge_weight", "node_weight"):
        assert (name in ours) == (name in theirs)
        assert name not in ours or torch.equal(getattr(ours, name), getattr(theirs, name))


def assert_induced(batch: Batch, graph: Graph) -> None:
    edges = graph.edge_index()
    inside = torch.isin(edges, batch.n_id).all(0).nonzero().view(-1)
    assert sorted(batch.e_id.tolist()) == inside.tolist()
    assert torch.equal(batch.n_id[batch.edge_index], edges[:, batch.e_id])
    assert batch.n_id.unique().numel() == batch.n_id.numel()
    assert torch.equal(batch.x, graph.node_data[NODE]["x"][batch.n_id])


LONG = [pytest.param(number, marks=pytest.mark.long) for number in (2, 3)]  # of parts


@pytest.fixture(scope="module", params=[1, *LONG, 4])
def parted(request, tmp_path_factory) -> tuple[Graph, DistGraph]:
    graph, folder = homogeneous(), tmp_path_factory.mktemp("parts") / "p"
    partition_graph(graph, request.param, folder, clusters=14, balance=[])
    return graph, opened(folder)


SAMPLERS = {
    "nodes": lambda graph: SaintNodeSampler(graph, 20, num_subgraphs=6, coverage=2),
    "edges": lambda graph: SaintEdgeSampler(graph, 12, num_subgraphs=6, coverage=2),
    "walks": lambda graph: SaintWalkSampler(graph, 6, 3, num_subgraphs=6, coverage=2),
}


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_an_epoch_of_clusters_has_every_node_once_and_every_edge_inside_a_batch() -> None:
    graph = homogeneous()
    sampler = ClusterSampler(graph, cluster(graph, 10))
    seen = []
    for batch in SubgraphLoader(graph, sampler, batch_size=3, shuffle=True):
        assert_induced(batch, graph)
        seen.append(batch.n_id)
    assert len(seen) == 4 and torch.equal(torch.cat(seen).sort().values, torch.arange(120))


def test_clusters_have_few_edges_between_them_and_about_equal_sizes() -> None:
    graph = sbm(600, num_classes=6, seed=0)
    cut = cluster(graph, 6)
    sizes = torch.bincount(cut.cluster[NODE], minlength=6)
    assert int(sizes.min()) > 0 and int(sizes.max()) <= 1.3 * graph.num_nodes() / 6
    at_random = Clustering({NODE: cut.cluster[NODE][torch.randperm(graph.num_nodes())]}, cut.bounds)
    assert cut.num_cut(graph) < 0.9 * at_random.num_cut(graph)


def test_batches_of_clusters_of_parts_are_those_of_the_whole_graph(parted) -> None:
    graph, mine = parted
    whole = ClusterSampler(graph, clusters_of(mine))
    ours = ClusterSampler(mine)
    assert ours.num_inputs == whole.num_inputs == 14
    theirs = list(SubgraphLoader(graph, whole, batch_size=4, shuffle=True, seed=5))
    for a, b in zip(SubgraphLoader(mine, ours, batch_size=4, shuffle=True, seed=5), theirs, strict=True):
        assert b.edge_index.numel()
        assert_same(a, b, mine)


def test_clusters_of_a_typed_graph_hold_nodes_of_all_types(tmp_path: Path) -> None:
    graph = typed()
    partition_graph(graph, 2, tmp_path / "p", clusters=6)
    mine = opened(tmp_path / "p")
    whole = ClusterSampler(graph, clusters_of(mine))
    ours = ClusterSampler(mine)
    num_nodes = 0
    for inputs in torch.arange(6).split(2):
        a, b = ours.sample(inputs, key=KEY), whole.sample(inputs, key=KEY)
        assert all(torch.equal(mine.original_ids(a.node[t], t), b.node[t]) for t in b.node)
        assert all(torch.equal(a.row[t], b.row[t]) and torch.equal(a.col[t], b.col[t]) for t in b.row)
        num_nodes += sum(ids.numel() for ids in b.node.values())
    assert num_nodes == 130


def test_parts_with_clusters_are_verified_and_merged_as_others_are(tmp_path: Path) -> None:
    graph = homogeneous()
    done = partition_graph(graph, 2, tmp_path / "p", trainers_per_part=2, clusters=9)
    assert verify_parts(tmp_path / "p", against=graph).ok
    parts = open_parts(tmp_path / "p")
    assert parts.clusters is not None and parts.clusters.bounds.tolist() == [0, 2, 4, 6, 9]
    assert torch.equal(parts.merge().csc().indices, graph.csc().indices)
    assert done.info["clusters"]["cut"] == clusters_of(opened(tmp_path / "p")).num_cut(graph)


def test_clusters_that_do_not_fit_their_subparts_are_refused_at_open(tmp_path: Path) -> None:
    partition_graph(homogeneous(), 2, tmp_path / "p", clusters=6)
    manifest = tmp_path / "p" / "manifest.json"
    values = json.loads(manifest.read_text())
    values = {name: value for name, value in values.items() if name != "crc32"}
    values["clusters"]["nodes"][0][1][3] += 1
    manifest.unlink()
    write_manifest(tmp_path / "p", values)
    with pytest.raises(ValueError, match="do not end where the subparts do"):
        open_parts(tmp_path / "p")


def test_ranks_get_the_clusters_of_their_own_part_and_equal_numbers_of_batches(tmp_path: Path) -> None:
    partition_graph(homogeneous(), 3, tmp_path / "p", clusters=11)
    taken, lengths = [], []
    for rank in range(3):
        mine = opened(tmp_path / "p")
        mine.placement = Placement(rank, (0, 1, 2), (0, 1, 2))
        loader = SubgraphLoader(mine, ClusterSampler(mine), batch_size=2)
        own = mine.book.part_range(rank)
        lengths.append(len(loader))
        for batch in loader:
            assert not batch.n_id.numel() or (own.start <= int(batch.n_id.min()) and int(batch.n_id.max()) < own.stop)
            taken.append(batch.n_id)
        loader.close()
    assert lengths == [2, 2, 2]
    assert torch.equal(torch.cat(taken).sort().values, torch.arange(120))


# -- GraphSAINT --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_subgraph_has_every_edge_among_its_nodes(kind: str) -> None:
    graph = homogeneous()
    batches = list(SubgraphLoader(graph, SAMPLERS[kind](graph)))
    assert len(batches) == 6
    for batch in batches:
        assert_induced(batch, graph)
        assert batch.edge_weight.shape == (batch.e_id.numel(),) and batch.edge_weight.dtype == torch.float32
        assert batch.node_weight.shape == (batch.n_id.numel(),) and bool((batch.node_weight >= 1).all())
    assert not torch.equal(batches[0].n_id, batches[1].n_id)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_subgraphs_of_parts_are_those_of_the_whole_graph_with_the_same_weights(parted, kind: str) -> None:
    graph, mine = parted
    theirs = list(SubgraphLoader(graph, SAMPLERS[kind](graph), seed=2, shuffle=True))
    for a, b in zip(SubgraphLoader(mine, SAMPLERS[kind](mine), seed=2, shuffle=True), theirs, strict=True):
        assert_same(a, b, mine)


def dense(graph: Graph) -> Tensor:
    """out[v] is the sum of what in-neighbours of v hold, for x = 1, 2, ..."""
    x = torch.arange(1.0, graph.num_nodes() + 1, dtype=torch.float64)
    src, dst = graph.edge_index()
    return torch.zeros_like(x).index_add_(0, dst, x[src])


@pytest.mark.parametrize("kind", ["nodes", "edges", "walks"])
def test_the_normalised_aggregate_is_exact_in_expectation(kind: str) -> None:
    """2000 subgraphs of a small graph, ten at a time: a subgraph of ten copies of it has one of each."""
    g = torch.Generator().manual_seed(4)
    half = torch.randint(0, 16, (2, 24), generator=g)
    graph = Graph.from_edge_index(torch.cat([half, half.flip(0)], dim=1), 16)
    beside, options = copies(graph, 10), {"num_subgraphs": 200, "coverage": 250}
    made: dict[str, SubgraphSampler] = {
        "nodes": SaintNodeSampler(beside, 60, **options),
        "edges": SaintEdgeSampler(beside, 40, **options),
        "walks": SaintWalkSampler(beside, 30, 2, **options),
    }
    sampler, sums = made[kind], []
    for i in range(200):
        sample = sampler.sample(torch.tensor([i]), key=KEY)
        assert sample.edge_weight is not None and sample.node_weight is not None
        nodes, row, col = sample.node[NODE], sample.row[EDGE], sample.col[EDGE]
        messages = sample.edge_weight[EDGE].double() * (nodes[row] % 16 + 1.0) * sample.node_weight[NODE].double()[col]
        sums.append(torch.zeros(160, dtype=torch.float64).index_add_(0, nodes[col], messages).view(10, 16))
    found = torch.cat(sums)
    total, expected = found.sum(1), dense(graph)
    assert abs(float(total.mean() - expected.sum())) < 4 * float(total.std()) / 2000**0.5
    error = (found.mean(0) - expected).abs() / (found.std(0) / 2000**0.5).clamp(min=1e-9)
    assert found.shape[0] == 2000 and float((error * (expected > 0)).max()) < 4.5  # the largest of sixteen


def test_nodes_are_drawn_in_proportion_to_their_in_degrees() -> None:
    graph = homogeneous()
    drawn = SaintNodeSampler(graph, 20_000)._draw(key=7)
    expected = 20_000 * graph.csc().in_degrees().double() / 900
    found = torch.bincount(drawn, minlength=120).double()
    chi = ((found - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum()
    assert float(chi) < 190 and int(found[expected == 0].sum()) == 0  # 114 degrees of freedom: 5 deviations


# -- the loader --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_loader_goes_on_where_its_state_was_taken(num_threads: int) -> None:
    graph = homogeneous()
    sampler = ClusterSampler(graph, cluster(graph, 12))

    def make() -> SubgraphLoader:
        return SubgraphLoader(graph, sampler, batch_size=2, shuffle=True, seed=1, num_threads=num_threads)

    first = make()
    unbroken = [batch.n_id for _ in range(2) for batch in first]
    second, seen = make(), []
    for batch in second:
        seen.append(batch.n_id)
        if len(seen) == 4:
            break
    third = make()
    third.load_state_dict(second.state_dict())
    seen += [batch.n_id for batch in third]
    seen += [batch.n_id for batch in third]
    assert len(unbroken) == 12 and all(torch.equal(a, b) for a, b in zip(seen, unbroken, strict=True))


def test_the_state_of_a_loader_with_another_sampler_is_refused() -> None:
    graph = homogeneous()
    state = SubgraphLoader(graph, SAMPLERS["nodes"](graph)).state_dict()
    with pytest.raises(ValueError, match="this state is of a loader with"):
        SubgraphLoader(graph, SAMPLERS["edges"](graph)).load_state_dict(state)
    other = SaintNodeSampler(graph, 21, num_subgraphs=6, coverage=2)
    with pytest.raises(ValueError, match="this state is of a loader with size=20, here it is 21"):
        SubgraphLoader(graph, other).load_state_dict(state)


def test_a_users_own_sampler_of_subgraphs_is_taken() -> None:
    graph = homogeneous()

    class Evens(SubgraphSampler):
        """Subgraphs of nodes with equal remainders."""

        def __init__(self) -> None:
            self.graph = graph
            self._sampler = NeighborSampler(graph, [0])

        @property
        def num_inputs(self) -> int:
            return 7

        def sample(self, inputs: Tensor, *, key: SampleKey):
            return self._sampler.sample({NODE: torch.arange(int(inputs[0]), 120, 7)}, key=key)

    batches = list(gnnsys.SubgraphLoader(graph, Evens()))
    assert [int(batch.n_id[0]) for batch in batches] == list(range(7))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda g: SubgraphLoader(g, NeighborSampler(g, [2])), "samplers of seeds go with NeighborLoader"),
        (lambda g: SubgraphLoader(homogeneous(), ClusterSampler(g, cluster(g, 3))), "another graph"),
        (lambda g: SubgraphLoader(g, SaintNodeSampler(g, 5), batch_size=2), "batch_size must be 1"),
        (lambda g: SubgraphLoader(g, ClusterSampler(g, cluster(g, 3)), inputs=[3]), "inputs"),
        (lambda g: SubgraphLoader(g, ClusterSampler(g, cluster(g, 3)), inputs=[]), "inputs is empty"),
        (lambda g: ClusterSampler(g), r"gnnsys.sampling.cluster\(graph, N\)"),
        (lambda g: cluster(g, 0), "at least so many"),
        (lambda g: SaintNodeSampler(g, 0), "size must be in"),
        (lambda g: SaintWalkSampler(g, 5, 0), "length must be at least 1"),
        (lambda g: SaintEdgeSampler(g, 5, coverage=-1), "coverage"),
        (lambda g: SaintEdgeSampler(typed(), 5), "one node and edge type"),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(homogeneous())


def test_parts_without_clusters_say_how_to_make_them(tmp_path: Path) -> None:
    partition_graph(homogeneous(), 2, tmp_path / "p")
    with pytest.raises(ValueError, match=r"gnnsys partition \.\.\. --clusters N"):
        ClusterSampler(opened(tmp_path / "p"))
    with pytest.raises(ValueError, match="of which there are 2: at least so many, got 1"):
        partition_graph(homogeneous(), 2, tmp_path / "q", clusters=1)
