"""Clustering, contraction and refinement against plain counts, on graphs of every odd kind."""

import pytest
import torch

from gnnsys.ops import CSC
from gnnsys.ops.multilevel import Level, Neighbors32, both_directions, cluster_nodes, contract_clusters, refine_cut

KINDS = ["random", "loops and repeats", "star", "path", "isolated", "no edges", "two islands"]


def edges_of(kind: str, seed: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        return torch.randint(0, 300, (2, 2000), generator=generator), 300
    if kind == "loops and repeats":
        edges = torch.randint(0, 12, (2, 200), generator=generator)
        return torch.cat([edges, edges[:, :50], torch.arange(12).repeat(2, 1)], dim=1), 12
    if kind == "star":
        return torch.stack([torch.arange(1, 200), torch.zeros(199, dtype=torch.int64)]), 200
    if kind == "path":
        return torch.stack([torch.arange(0, 149), torch.arange(1, 150)]), 150
    if kind == "isolated":
        return torch.randint(0, 20, (2, 60), generator=generator), 100
    if kind == "no edges":
        return torch.empty(2, 0, dtype=torch.int64), 30
    left = torch.randint(0, 40, (2, 300), generator=generator)
    return torch.cat([left, left + 40], dim=1), 80


def level_of(edges: torch.Tensor, num_nodes: int) -> Level:
    csc = CSC.from_edge_index(edges, num_nodes, narrow=True)
    weights = torch.stack([torch.ones(num_nodes, dtype=torch.int64), csc.in_degrees()], dim=1).contiguous()
    return Level(both_directions(csc), weights)


def dense(edges: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Symmetric counts of edges, loops left out."""
    matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.int64)
    matrix.index_put_((edges[0], edges[1]), torch.ones(edges.shape[1], dtype=torch.int64), accumulate=True)
    return (matrix + matrix.T).fill_diagonal_(0)


def dense_of(level: Level) -> torch.Tensor:
    (neighbors,) = level.lists
    matrix = torch.zeros(level.num_nodes, level.num_nodes, dtype=torch.int64)
    rows = torch.repeat_interleave(torch.arange(level.num_nodes), neighbors.indptr.diff())
    return matrix.index_put_((rows, neighbors.indices.long()), neighbors.weight.long(), accumulate=True)


def cut_of(matrix: torch.Tensor, part: torch.Tensor) -> int:
    return int(matrix[part[:, None] != part[None, :]].sum()) // 2


def on_one_and_two_threads(call):
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(call())
        return results
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_is_over_a_limit_only_where_one_node_alone_is(kind):
    edges, num_nodes = edges_of(kind, 1)
    level = level_of(edges, num_nodes)
    limits = torch.tensor([5, 60])
    clusters, count = cluster_nodes(level, limits, key=3)
    assert clusters.unique().tolist() == list(range(count))
    weights = torch.zeros(count, 2, dtype=torch.int64).index_add_(0, clusters.long(), level.node_weights)
    heaviest = torch.zeros_like(weights).scatter_reduce_(
        0, clusters.long()[:, None].expand(-1, 2), level.node_weights, "amax"
    )
    assert bool((weights <= torch.maximum(limits, heaviest)).all())


def test_clusters_follow_heavy_edges():
    """Cliques joined by single edges: every cluster lies in one clique, and cliques are not left in pieces."""
    size, count = 8, 12
    inside = torch.combinations(torch.arange(size)).T
    cliques = torch.cat([inside + size * i for i in range(count)], dim=1)
    bridges = torch.stack([torch.arange(count - 1) * size, torch.arange(1, count) * size])
    level = level_of(torch.cat([cliques, bridges], dim=1), size * count)
    clusters, number = cluster_nodes(level, torch.tensor([size, 10_000]))
    assert number == count
    assert all(len(set(part)) == 1 for part in clusters.view(count, size).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_never_cross_given_parts(kind):
    edges, num_nodes = edges_of(kind, 2)
    level = level_of(edges, num_nodes)
    part = (torch.arange(num_nodes) % 3).int()
    clusters, count = cluster_nodes(level, torch.tensor([10, 1000]), part=part)
    for number in range(count):
        assert len(part[clusters == number].unique()) == 1


def test_leaves_of_a_hub_come_together_though_the_hub_is_full():
    edges, num_nodes = edges_of("star", 0)
    _, count = cluster_nodes(level_of(edges, num_nodes), torch.tensor([4, 1000]))
    assert count <= num_nodes // 3


@pytest.mark.parametrize("kind", KINDS)
def test_contraction_adds_up_what_a_dense_product_does(kind):
    edges, num_nodes = edges_of(kind, 3)
    level = level_of(edges, num_nodes)
    clusters, count = cluster_nodes(level, torch.tensor([4, 200]))
    coarse = contract_clusters(level, clusters, count, heaviest=False)
    member = torch.nn.functional.one_hot(clusters.long(), count)
    expected = (member.T @ dense(edges, num_nodes) @ member).fill_diagonal_(0)
    assert torch.equal(dense_of(coarse), expected)
    assert torch.equal(coarse.node_weights, member.T @ level.node_weights)


@pytest.mark.parametrize("kind", KINDS)
def test_the_heaviest_edges_are_kept_and_the_graph_stays_symmetric(kind):
    edges, num_nodes = edges_of(kind, 4)
    level = level_of(edges, num_nodes)
    clusters, count = cluster_nodes(level, torch.tensor([6, 400]))
    everything = dense_of(contract_clusters(level, clusters, count, heaviest=False))
    kept = dense_of(contract_clusters(level, clusters, count))
    assert torch.equal(kept, kept.T)
    assert bool(((kept == everything) | (kept == 0)).all())
    degree = torch.stack([dense_entries(edges, num_nodes)[clusters == c].double().mean() for c in range(count)])
    for c in range(count):
        keep = max(1, int(torch.ceil(degree[c])))
        row = everything[c][everything[c] > 0].sort(descending=True).values
        if len(row) > keep:  # a node keeps at least its heaviest edges, others may keep more of them for it
            assert int((kept[c] >= row[keep - 1]).sum()) >= keep or int((kept[c] > 0).sum()) >= keep
            assert int((kept[c] > row[keep - 1]).sum()) == int((row > row[keep - 1]).sum())
        else:
            assert torch.equal(kept[c], everything[c])


def dense_entries(edges: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Entries in a node's lists, loops twice."""
    return torch.bincount(edges[0], minlength=num_nodes) + torch.bincount(edges[1], minlength=num_nodes)


@pytest.mark.parametrize("num_parts", [2, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_refining_lowers_the_cut_within_the_limits_and_counts_it_right(kind, num_parts):
    edges, num_nodes = edges_of(kind, 5)
    level, matrix = level_of(edges, num_nodes), dense(edges, num_nodes)
    part = (torch.arange(num_nodes) * num_parts // num_nodes).int()
    before = cut_of(matrix, part)
    loads = torch.zeros(num_parts, 2, dtype=torch.int64).index_add_(0, part.long(), level.node_weights)
    limits = loads.max(0).values + 3
    result = refine_cut(level, part, num_parts, limits, work=100_000)
    assert result.cut == cut_of(matrix, part) <= before
    loads = torch.zeros(num_parts, 2, dtype=torch.int64).index_add_(0, part.long(), level.node_weights)
    assert result.excess == 0 and bool((loads <= limits).all())


@pytest.mark.parametrize("seed", range(5))
def test_refining_restores_balance_in_every_constraint(seed):
    edges, num_nodes = edges_of("random", seed)
    level = level_of(edges, num_nodes)
    part = torch.zeros(num_nodes, dtype=torch.int32)
    limits = (level.node_weights.sum(0) * 1.05 / 4).long() + 1
    result = refine_cut(level, part, 4, limits, work=100_000)
    loads = torch.zeros(4, 2, dtype=torch.int64).index_add_(0, part.long(), level.node_weights)
    assert result.excess == 0 and bool((loads <= limits).all())


def test_refining_finds_two_planted_halves_when_every_single_move_is_forbidden():
    """Two cliques, a node of each in the wrong half, and no room anywhere: only an exchange helps."""
    inside = torch.combinations(torch.arange(10)).T
    level = level_of(torch.cat([inside, inside + 10], dim=1), 20)
    level = Level(level.lists, torch.ones(20, 1, dtype=torch.int64))
    part = (torch.arange(20) // 10).int()
    part[3], part[14] = 1, 0
    assert refine_cut(level, part, 2, torch.tensor([10]), work=10_000).cut == 0


def test_excess_that_cannot_be_removed_is_reported():
    level = level_of(*edges_of("star", 0))
    part = torch.zeros(200, dtype=torch.int32)
    result = refine_cut(level, part, 2, torch.tensor([10, 10]), work=1000)
    assert result.excess > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_the_same_on_one_and_two_threads(kind):
    edges, num_nodes = edges_of(kind, 6)
    copies = 40 if kind == "random" else 1  # large enough for two threads to have work
    edges = torch.cat([edges + num_nodes * i for i in range(copies)] + [edges * copies % (num_nodes * copies)], dim=1)
    level = level_of(edges, num_nodes * copies)

    def steps():
        clusters, count = cluster_nodes(level, torch.tensor([8, 300]), key=1)
        coarse = contract_clusters(level, clusters, count)
        part = (torch.arange(level.num_nodes) % 7).int()
        refine_cut(level, part, 7, level.node_weights.sum(0) // 5, work=50_000)
        return [clusters, coarse.lists[0].indptr, coarse.lists[0].indices, coarse.lists[0].weight, part]

    for one, two in zip(*on_one_and_two_threads(steps), strict=True):
        assert torch.equal(one, two)


def test_bad_arguments_are_named():
    level = level_of(*edges_of("path", 0))
    part = torch.zeros(150, dtype=torch.int32)
    with pytest.raises(ValueError, match="part must be in"):
        refine_cut(level, part + 5, 2, torch.tensor([100, 100]))
    with pytest.raises(ValueError, match="limits"):
        refine_cut(level, part, 2, torch.tensor([100]))
    with pytest.raises(ValueError, match="part must have one entry per node"):
        refine_cut(level, part[:10].contiguous(), 2, torch.tensor([100, 100]))
    with pytest.raises(ValueError, match="cluster"):
        contract_clusters(level, torch.full((150,), 9, dtype=torch.int32), 3)


@pytest.mark.parametrize("stride", [1, 7])
def test_pairs_triangles_and_paths_are_clustered_whatever_their_numbering(stride):
    """Neighbours in one block choose each other: none may be left alone for it, and no cluster may be torn."""
    count = 3000
    number = torch.arange(count) * stride % (count + 1)  # stride 1: neighbours have neighbouring ids
    pairs = number.view(-1, 2).T
    clusters, found = cluster_nodes(level_of(pairs, count + 1), torch.tensor([2, 100]))
    assert found <= count // 2 + 1
    assert torch.equal(clusters[pairs[0]], clusters[pairs[1]])
    triangles = number.view(-1, 3).T
    edges = torch.cat([triangles[[0, 1]], triangles[[1, 2]], triangles[[2, 0]]], dim=1)
    _, found = cluster_nodes(level_of(edges, count + 1), torch.tensor([3, 100]))
    assert found <= 1.1 * count // 3
    path = torch.stack([number[:-1], number[1:]])
    _, found = cluster_nodes(level_of(path, count + 1), torch.tensor([8, 100]))
    assert found <= count // 3


def test_graphs_that_do_not_get_denser_keep_all_their_edges():
    edges = torch.stack([torch.arange(0, 2999), torch.arange(1, 3000)])
    level = level_of(edges, 3000)
    clusters, count = cluster_nodes(level, torch.tensor([8, 100]))
    assert (
        contract_clusters(level, clusters, count).num_entries
        == contract_clusters(level, clusters, count, heaviest=False).num_entries
    )


def test_weights_too_heavy_to_add_up_stay_the_heaviest():
    heavy = torch.full((4,), (1 << 30) + 5, dtype=torch.int32)
    indptr, indices = torch.tensor([0, 1, 2, 4]), torch.tensor([2, 2, 0, 1], dtype=torch.int32)
    lists = (Neighbors32(indptr, indices, 0, 0, 3, heavy),)
    level = Level(lists, torch.ones(3, 1, dtype=torch.int64))
    coarse = contract_clusters(level, torch.tensor([0, 0, 1], dtype=torch.int32), 2)
    assert coarse.lists[0].weight.tolist() == [1 << 30, 1 << 30]


def test_a_hub_that_nearly_fills_a_part_leaves_room_for_balance():
    """One node has two thirds of a part's in-edges: the others there must be light, which single moves do not find."""
    generator = torch.Generator().manual_seed(0)
    num_nodes, num_edges = 4000, 40_000
    hub = torch.stack([torch.randint(1, num_nodes, (3300,), generator=generator), torch.zeros(3300, dtype=torch.int64)])
    rest = torch.randint(1, num_nodes, (2, num_edges - 3300), generator=generator)
    level = level_of(torch.cat([hub, rest], dim=1), num_nodes)
    limits = (level.node_weights.sum(0) * 1.05 / 8).long()
    part = (torch.arange(num_nodes) * 8 // num_nodes).int()
    assert refine_cut(level, part, 8, limits, work=100_000).excess == 0
