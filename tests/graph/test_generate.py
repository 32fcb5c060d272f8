"""Generators against the distributions they promise, and the expected accuracies against closed forms."""

from __future__ import annotations

import importlib

import pytest
import torch

from gnnsys.graph import dataset, expected_accuracy, planted_noise, rmat, sbm, typed_graph
from gnnsys.graph.generate import class_means
from gnnsys.ops import class_features, planted_edges, planted_labels, random_permutation, rmat_edges
from gnnsys.ops._library import native


@pytest.fixture(scope="module")
def stats():
    """scipy.stats, which takes a second to import: not in every process that imports this file."""
    return importlib.import_module("scipy.stats")


def assert_same_graph(left, right):
    assert left.info == right.info and left.edge_types == right.edge_types
    for edge_type in left.edge_types:
        assert torch.equal(left.edge_index(edge_type), right.edge_index(edge_type))
    for node_type in left.node_types:
        assert left.node_data[node_type].keys() == right.node_data[node_type].keys()
        for name, rows in left.node_data[node_type].items():
            assert torch.equal(rows, right.node_data[node_type][name]), (node_type, name)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: rmat(5000, 30_000, num_features=5, seed=seed),
        lambda seed: sbm(5000, seed=seed),
        lambda seed: typed_graph(4000, seed=seed),
        lambda seed: planted_noise(4000, seed=seed),
        lambda seed: planted_noise(4000, num_communities=20, seed=seed),
    ],
)
def test_a_graph_depends_on_its_seed_and_not_on_the_threads(make):
    before = torch.get_num_threads()
    try:
        graphs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            graphs.append(make(7))
    finally:
        torch.set_num_threads(before)
    assert_same_graph(graphs[0], graphs[1])
    assert_same_graph(graphs[0], graphs[2])
    edge_type = graphs[0].edge_types[0]
    assert not torch.equal(graphs[0].edge_index(edge_type), make(8).edge_index(edge_type))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 1000, 65_536, 100_003])
def test_random_permutation_is_a_permutation(size):
    order = random_permutation(size, key=3)
    assert torch.equal(order.sort().values, torch.arange(size, dtype=torch.int32))


def test_random_permutation_sends_every_id_everywhere(stats):
    places = torch.stack([random_permutation(10, key) for key in range(4000)])
    for column in places.t():
        assert stats.chisquare(torch.bincount(column, minlength=10)).pvalue > 1e-6


def test_rmat_edges_fall_into_each_levels_quadrants_as_asked(stats):
    a, b, c, d = 0.5, 0.25, 0.15, 0.1
    src, dst = rmat_edges(torch.arange(2**10, dtype=torch.int32), 200_000, a, b, c, key=11).long()
    for level in range(10):
        quadrant = 2 * ((src >> level) & 1) + ((dst >> level) & 1)
        counts = torch.bincount(quadrant, minlength=4)
        assert stats.chisquare(counts, 200_000 * torch.tensor([a, b, c, d])).pvalue > 1e-6, level


def test_rmat_of_any_size_uses_all_of_its_ids_and_hides_its_hubs():
    graph = rmat(1000, 400_000, seed=1)
    degree = graph.csc().in_degrees()
    assert graph.num_nodes() == 1000 and graph.num_edges() == 400_000
    assert int((degree > 0).sum()) > 980
    assert float(degree.max()) > 20 * float(degree.float().median())  # a power law
    hubs = degree.topk(50).indices.float()
    assert 300 < float(hubs.mean()) < 700  # spread over all ids, not the first ones


def test_planted_edges_follow_the_degree_law_and_the_homophily(stats):
    num_nodes, num_classes, num_edges = 600, 6, 300_000
    order = torch.arange(num_nodes, dtype=torch.int32)
    src, dst = planted_edges(
        order, order, num_edges, num_classes=num_classes, homophily=0.4, skew=(1, 3), loops=True, key=5
    ).long()
    grid = torch.linspace(0, 1, 101, dtype=torch.float64) ** (1 / 3)
    for side, share in ((src, torch.full((100,), 0.01, dtype=torch.float64)), (dst, grid.diff())):
        counts = torch.bincount(side % 100, minlength=100)
        assert stats.chisquare(counts, num_edges * share / share.sum()).pvalue > 1e-6
    classes = torch.bincount((src // 100) * 6 + dst // 100, minlength=36)
    expected = torch.full((6, 6), 0.6 / 5 / 6, dtype=torch.float64).fill_diagonal_(0.4 / 6).flatten()
    assert stats.chisquare(classes, num_edges * expected).pvalue > 1e-6


def test_planted_labels_are_equal_runs_of_the_order():
    order = random_permutation(103, key=1)
    labels = planted_labels(order, 4)
    for c in range(4):
        assert labels[order[103 * c // 4 : 103 * (c + 1) // 4].long()].unique().tolist() == [c]


def test_class_features_are_the_mean_plus_standard_normal_noise(stats):
    labels = torch.arange(3).repeat(20_000)
    means = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0, 5.0], [-1.0, 0.0, 0.0, 0.0, 9.0]])
    noise = (class_features(labels, means, 2.0, key=9) - means[labels]) / 2
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-6
    correlation = torch.corrcoef(noise.t()).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5 / 60_000**0.5


def test_sbm_is_what_it_says():
    graph = sbm(20_000, num_classes=5, avg_degree=12, homophily=0.6, train=0.3, val=0.2, seed=2)
    src, dst = graph.edge_index()
    half = graph.num_edges() // 2
    assert graph.num_edges() == 240_000
    assert torch.equal(src[:half], dst[half:]) and torch.equal(dst[:half], src[half:])
    assert not bool((src == dst).any())
    data = graph.node_data["node"]
    same = (data["y"][src[:half]] == data["y"][dst[:half]]).double().mean()
    assert abs(float(same) - 0.6) < 5 * (0.24 / half) ** 0.5 + 1e-3  # redrawn loops cost a little homophily
    assert torch.bincount(data["y"]).tolist() == [4000] * 5
    masks = torch.stack([data["train_mask"], data["val_mask"], data["test_mask"]])
    assert masks.sum(1).tolist() == [6000, 4000, 10_000] and bool((masks.sum(0) == 1).all())


def test_feature_accuracy_of_two_classes_is_the_normal_distribution_function(stats):
    graph = sbm(40_000, num_classes=2, avg_degree=2, separation=1.2, train=0.0, val=0.0, seed=4)
    means = class_means(2, 64, 1.2, 4)
    exact = stats.norm.cdf(float((means[0] - means[1]).norm()) / 2)
    expected = expected_accuracy(graph, max_nodes=40_000)
    assert abs(expected.features - exact) < 5 * expected.standard_error


def test_label_accuracy_without_features_is_a_majority_vote(stats):
    graph = sbm(40_000, num_classes=2, avg_degree=6, homophily=0.7, separation=0.0, train=0.0, val=0.0, seed=5)
    degree = graph.csc().in_degrees().numpy()
    lost = stats.binom.cdf((degree - 1) // 2, degree, 0.7)  # fewer than half agree
    drawn = (degree % 2 == 0) * stats.binom.pmf(degree // 2, degree, 0.7)
    expected = expected_accuracy(graph, max_nodes=40_000)
    assert abs(expected.neighbor_labels - (1 - lost - drawn / 2).mean()) < 5 * expected.standard_error
    assert abs(expected.features - 0.5) < 5 * expected.standard_error


def test_neighbours_help_only_where_there_is_homophily():
    blind = expected_accuracy(sbm(10_000, num_classes=4, homophily=0.25))
    assert blind.features == blind.neighbor_features == blind.neighbor_labels
    seeing = expected_accuracy(sbm(10_000, num_classes=4, homophily=0.6))
    assert seeing.features + 0.1 < seeing.neighbor_features < seeing.neighbor_labels


def test_typed_relations_come_with_their_reverse_and_cite_backwards_in_time():
    graph = typed_graph(3000, seed=3)
    for src, relation, dst in graph.edge_types[::2]:
        reverse = graph.edge_index((dst, f"rev_{relation}", src))
        assert torch.equal(graph.edge_index((src, relation, dst)).flip(0), reverse)
    paper = graph.node_data["paper"]
    citing, cited = graph.edge_index(("paper", "cites", "paper"))
    assert bool((paper["time"][citing] >= paper["time"][cited]).all())
    assert paper["time"].min() == 0 and 3600 < int(paper["time"].max()) < 3650
    assert paper["time"][paper["train_mask"]].max() <= paper["time"][paper["val_mask"]].min()
    assert paper["time"][paper["val_mask"]].max() <= paper["time"][paper["test_mask"]].min()


def test_typed_links_can_be_told_from_random_pairs_as_well_as_stated():
    graph = typed_graph(20_000, homophily=0.8, seed=6)
    papers = graph.node_data["paper"]["y"]
    author, paper = graph.edge_index(("author", "writes", "paper"))
    # The class an author's other papers vote for is nearly its own where it has many.
    votes = torch.zeros(10_000, 8).index_put_((author, papers[paper]), torch.ones(author.numel()), accumulate=True)
    busy = votes.sum(1) >= 30
    same = (votes.argmax(1)[author] == papers[paper])[busy[author]].double().mean()
    assert abs(0.5 + (float(same) - 1 / 8) / 2 - graph.info["link_auc"]) < 0.01


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: rmat(0, 10), "num_nodes must be at least 1"),
        (lambda: rmat(10, -1), "num_edges must be >= 0"),
        (lambda: rmat(10, 10, a=0.9), "add up to 1"),
        (lambda: sbm(5, num_classes=9), "num_nodes must be at least 9"),
        (lambda: sbm(50, homophily=1.5), "homophily"),
        (lambda: sbm(50, skew=0), "skew"),
        (lambda: sbm(50, num_classes=0), "num_classes"),
        (lambda: sbm(50, train=0.9, val=0.2), "train and val"),
        (lambda: typed_graph(3), "num_papers must be at least 16"),
        (lambda: expected_accuracy(rmat(10, 10)), "made by gnnsys.graph.sbm"),
    ],
)
def test_impossible_graphs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_generator_ops_have_schemas_and_fake_kernels():
    edges, order = torch.empty(2, 50, dtype=torch.int32), random_permutation(20, key=0)
    rows, label, mean = torch.empty(20, 3), torch.zeros(20, dtype=torch.int64), torch.zeros(1, 3)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(native.generate_permutation.default, (order.clone(), 1), test_utils=checks)
    torch.library.opcheck(
        native.generate_rmat.default, (edges[0], edges[1], order, 0.5, 0.2, 0.2, 1), test_utils=checks
    )
    torch.library.opcheck(
        native.generate_planted.default, (edges[0], edges[1], order, order, 2, 0.5, 1, 1, True, 1), test_utils=checks
    )
    torch.library.opcheck(native.generate_features.default, (rows, label, mean, 1.0, 1), test_utils=checks)


def test_planted_noise_is_a_block_model_with_columns_and_rows_that_say_nothing(stats):
    graph = planted_noise(
        6000, num_classes=3, num_features=8, noise_columns=5, noise_nodes=0.25, separation=4.0, seed=2
    )
    plain = sbm(6000, num_classes=3, num_features=8, separation=4.0, seed=2)
    data, noise = graph.node_data["node"], torch.tensor(graph.info["noise_columns"])
    signal = torch.tensor([column for column in range(13) if column not in graph.info["noise_columns"]])
    assert torch.equal(graph.edge_index(), plain.edge_index()) and torch.equal(data["y"], plain.node_data["node"]["y"])
    assert noise.numel() == 5 and int(data["is_noise"].sum()) == 1500
    assert torch.equal(data["x"][~data["is_noise"]][:, signal], plain.node_data["node"]["x"][~data["is_noise"]])
    of_noise = data["is_noise"]
    for rows, labels in ((data["x"][:, noise], data["y"]), (data["x"][of_noise], data["y"][of_noise])):
        by_class = torch.stack([rows[labels == c].mean(0) for c in range(3)])
        assert stats.kstest(rows.flatten().numpy(), "norm").pvalue > 1e-4 and by_class.abs().max() < 0.2
    assert torch.equal(
        dataset("planted-1k:noise_columns=3,seed=4").node_data["node"]["x"],
        planted_noise(1000, noise_columns=3, seed=4).node_data["node"]["x"],
    )
    with pytest.raises(ValueError, match="noise_nodes must be a fraction"):
        planted_noise(100, noise_nodes=1.0)
    with pytest.raises(ValueError, match=r"gnnsys\.graph\.sbm"):
        expected_accuracy(graph)


def test_planted_communities_hold_every_class_and_edges_keep_to_them():
    options = {"num_classes": 4, "avg_degree": 16, "homophily": 0.4, "num_features": 6, "noise_columns": 3, "seed": 5}
    graph = planted_noise(9600, num_communities=12, locality=0.6, homophily_between=0.8, **options)
    plain, data = planted_noise(9600, **options), graph.node_data["node"]
    for name in ("x", "y", "is_noise", "train_mask"):
        assert torch.equal(data[name], plain.node_data["node"][name])
    members = torch.bincount(data["community"] * 4 + data["y"], minlength=48)
    assert members.tolist() == [200] * 48
    src, dst = graph.edge_index().long()
    assert graph.num_edges() == plain.num_edges() and not bool((src == dst).any())
    is_home = data["community"][src] == data["community"][dst]
    is_same = (data["y"][src] == data["y"][dst]).double()
    count = graph.num_edges() / 2  # an edge and its reverse are one draw
    # Of the edges that join any two nodes, a twelfth or so meets in a community by chance.
    assert abs(float(is_home.double().mean()) - (0.6 + 0.4 / 12)) < 5 * (0.24 / count) ** 0.5 + 1e-3
    assert abs(float(is_same[~is_home].mean()) - 0.8) < 0.02 and abs(float(is_same[is_home].mean()) - 0.42) < 0.02
    alike = planted_noise(9600, num_communities=12, **options)
    assert alike.info["homophily_between"] == 0.4 and alike.info["locality"] == 0.75


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_communities": 3}, "a multiple of 30 nodes, got 1000"),
        ({"num_communities": 0}, "0 communities"),
        ({"num_communities": 10, "locality": 1.5}, "locality"),
        ({"num_communities": 10, "homophily_between": 2}, "homophily"),
    ],
)
def test_impossible_communities_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        planted_noise(1000, **options)
