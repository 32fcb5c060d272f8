"""Graphs that need no download: RMAT, block models with planted labels and noise, and a typed graph for RGCN and links.

A graph is a pure function of its arguments, whatever the number of threads. How it was made is in `graph.info`, from
which `gnnsys.graph.expected_accuracy` computes what a classifier can reach on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.graph.graph import Graph
from gnnsys.graph.schema import EdgeType
from gnnsys.ops import (
    class_features,
    planted_edges,
    planted_labels,
    random_permutation,
    rmat_edges,
    stream_key,
)

# What a random stream is for; part of its key, so that no two uses share one.
_ORDER, _EDGES, _FEATURES, _MEANS, _SPLIT, _TIME, _NOISE = range(7)


def rmat(
    num_nodes: int = 1_000_000,
    num_edges: int = 20_000_000,
    *,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    d: float = 0.05,
    num_features: int = 0,
    seed: int = 0,
) -> Graph:
    """Directed RMAT (Chakrabarti et al., SDM 2004): power-law degrees, many nodes without any edge.

    Any number of nodes; node ids are shuffled, so that hubs are not the first ones; repeated edges and loops are kept,
    so that there are exactly `num_edges`. With `num_features`, `x` is standard normal and says nothing.
    """
    _check_count("num_nodes", num_nodes, 1)
    if min(a, b, c, d) < 0 or abs(a + b + c + d - 1) > 1e-6:
        raise ValueError(f"a, b, c and d must be >= 0 and add up to 1, got {a}, {b}, {c} and {d}")
    order = random_permutation(num_nodes, stream_key(seed, _ORDER))
    edges = rmat_edges(order, num_edges, a, b, c, stream_key(seed, _EDGES))
    node_data: dict[str, Tensor] = {}
    if num_features:
        zeros = torch.zeros(num_nodes, dtype=torch.int64, device="cpu")
        node_data["x"] = class_features(
            zeros, torch.zeros(1, num_features, device="cpu"), 1.0, stream_key(seed, _FEATURES)
        )
    info = {"generator": "rmat", "a": a, "b": b, "c": c, "d": d, "seed": seed}
    return Graph.from_edge_index(edges, num_nodes, node_data, info=info)


def sbm(
    num_nodes: int = 100_000,
    *,
    num_classes: int = 10,
    avg_degree: float = 20.0,
    homophily: float = 0.5,
    skew: int = 2,
    num_features: int = 64,
    separation: float = 1.5,
    train: float = 0.1,
    val: float = 0.1,
    seed: int = 0,
) -> Graph:
    """Degree-corrected stochastic block model (Karrer and Newman 2011) with labels to be learned.

    `num_classes` communities of equal size; an edge joins one class with probability `homophily`, and expected degrees
    follow a power law with exponent 1 + skew/(skew-1): 3 by default, `skew=1` for equal ones. Edge i and edge
    i + num_edges/2 are the two directions of one. `x` is the mean of the node's class, a random vector of length
    about `separation`, plus standard normal noise: one node's features say little, its neighbourhood's say a lot
    (`expected_accuracy` computes both). `y`, `train_mask`, `val_mask` and `test_mask` (the rest) are node data.
    """
    _check_count("num_nodes", num_nodes, num_classes)
    if avg_degree < 0:
        raise ValueError(f"avg_degree must be >= 0, got {avg_degree}")
    order = random_permutation(num_nodes, stream_key(seed, _ORDER))
    labels = planted_labels(order, num_classes)
    half = planted_edges(
        order,
        order,
        round(num_nodes * avg_degree / 2),
        num_classes=num_classes,
        homophily=homophily,
        skew=(skew, skew),
        loops=False,
        key=stream_key(seed, _EDGES),
    )
    means = class_means(num_classes, num_features, separation, seed)
    node_data = {"x": class_features(labels, means, 1.0, stream_key(seed, _FEATURES)), "y": labels}
    node_data |= _random_split(num_nodes, train, val, seed)
    info = {
        "generator": "sbm",
        "num_classes": num_classes,
        "homophily": homophily,
        "separation": separation,
        "skew": skew,
        "seed": seed,
    }
    return Graph.from_edge_index(torch.cat([half, half.flip(0)], dim=1), num_nodes, node_data, info=info)


def planted_noise(
    num_nodes: int = 20_000,
    *,
    num_classes: int = 10,
    avg_degree: float = 20.0,
    homophily: float = 0.5,
    skew: int = 2,
    num_features: int = 64,
    noise_columns: int = 64,
    noise_nodes: float = 0.3,
    separation: float = 3.0,
    train: float = 0.1,
    val: float = 0.1,
    num_communities: int | None = None,
    locality: float = 0.75,
    homophily_between: float | None = None,
    seed: int = 0,
) -> Graph:
    """`sbm`, with columns and rows of `x` that say nothing: what a guide of samplers is to find.

    `noise_columns` columns of standard normal noise stand among the `num_features` of the block model, in an order
    that the seed decides: `info["noise_columns"]` lists them. The rows of a share `noise_nodes` of all nodes are noise
    from end to end: their class mean is left out, whatever their label; `is_noise` in the node data marks them.

    By default communities are classes, so that parts with few edges between them are classes too, and what lies in
    another part says little. With `num_communities`, each of them has as many nodes of every class: `community` in the
    node data. A share `locality` of the edges lies inside communities; of the others, which join any two nodes, a
    share `homophily_between` joins one class (by default `homophily`, as inside).
    """
    if not 0 <= noise_nodes < 1:
        raise ValueError(f"noise_nodes must be a fraction in [0, 1), got {noise_nodes}")
    _check_count("noise_columns", noise_columns, 0)
    graph = sbm(
        num_nodes, num_classes=num_classes, avg_degree=avg_degree, homophily=homophily, skew=skew,
        num_features=num_features, separation=separation, train=train, val=val, seed=seed,
    )  # fmt: skip
    if num_communities is not None:
        between = homophily if homophily_between is None else homophily_between
        graph = _with_communities(graph, num_communities, locality, homophily, between, skew, seed)
    zeros = torch.zeros(num_nodes, dtype=torch.int64, device="cpu")
    width = num_features + noise_columns
    x = class_features(zeros, torch.zeros(1, width, device="cpu"), 1.0, stream_key(seed, _NOISE))
    order = random_permutation(width, stream_key(seed, _NOISE, 1)).long()
    is_noise = random_permutation(num_nodes, stream_key(seed, _NOISE, 2)) < round(num_nodes * noise_nodes)
    signal = order[:num_features].sort().values
    x[:, signal] = torch.where(is_noise[:, None], x[:, signal], graph.node_data["node"]["x"])
    graph.set_node_data("x", x)
    graph.set_node_data("is_noise", is_noise)
    graph.info |= {"generator": "planted", "noise_columns": order[num_features:].sort().values.tolist()}
    return graph


def _with_communities(
    graph: Graph, num_communities: int, locality: float, homophily: float, between: float, skew: int, seed: int
) -> Graph:
    """The nodes of a graph that `sbm` made, with as many edges, inside communities and between them.

    A node's rank in its class decides its community, in turns, and its expected degree, inside and between.
    """
    num_classes, num_nodes = graph.info["num_classes"], graph.num_nodes()
    if num_communities < 1 or num_nodes % (num_classes * num_communities):
        raise ValueError(
            f"{num_communities} communities of {num_classes} classes need a multiple of "
            f"{num_classes * max(num_communities, 1)} nodes, got {num_nodes}"
        )
    if not 0 <= locality <= 1:
        raise ValueError(f"locality must be a fraction in [0, 1], got {locality}")
    order = random_permutation(num_nodes, stream_key(seed, _ORDER))
    members = order.view(num_classes, -1, num_communities).permute(2, 0, 1).reshape(num_communities, -1)
    total = graph.num_edges() // 2
    inside = round(total * locality)
    bounds = [inside * c // num_communities for c in range(num_communities + 1)]
    homes = [(each, end - first, homophily) for each, first, end in zip(members, bounds, bounds[1:], strict=False)]
    half = torch.cat(
        [
            planted_edges(
                nodes.contiguous(),
                nodes.contiguous(),
                count,
                num_classes=num_classes,
                homophily=share,
                skew=(skew, skew),
                loops=False,
                key=stream_key(seed, _EDGES, number + 1),
            )
            for number, (nodes, count, share) in enumerate([(order, total - inside, between), *homes])
        ],
        dim=1,
    )
    community = torch.empty(num_nodes, dtype=torch.int64, device="cpu")
    community[members.long()] = torch.arange(num_communities, device="cpu")[:, None].expand(members.shape)
    node_data = {**graph.node_data["node"], "community": community}
    info = graph.info | {"num_communities": num_communities, "locality": locality, "homophily_between": between}
    return Graph.from_edge_index(torch.cat([half, half.flip(0)], dim=1), num_nodes, node_data, info=info)


def typed_graph(
    num_papers: int = 50_000,
    *,
    num_classes: int = 8,
    num_features: int = 64,
    separation: float = 1.0,
    homophily: float = 0.7,
    num_days: int = 3650,
    seed: int = 0,
) -> Graph:
    """Papers, authors and institutions, every relation with its reverse.

    Each type has communities like `sbm`; `y` on papers is to be learned. A paper has a `time` in days; it cites
    only papers that are not newer; the split is by time, the oldest 60% to train, the newest 20% to test. There is one
    author per two papers with about four authors a paper, and an institution per 200 papers. `writes` is the relation
    to predict: an author's papers are of its class with probability `homophily`, so that a scorer which knows just the
    classes tells an edge from a random pair with AUC 1/2 + (homophily - 1/num_classes)/2 (`info["link_auc"]`).
    """
    counts = {"paper": num_papers, "author": num_papers // 2, "institution": max(num_papers // 200, num_classes)}
    _check_count("num_papers", num_papers, 2 * num_classes)
    order = {t: random_permutation(n, stream_key(seed, _ORDER, i)) for i, (t, n) in enumerate(counts.items())}
    means = class_means(num_classes, num_features, separation, seed)
    node_data: dict[str, dict[str, Tensor]] = {}
    for i, node_type in enumerate(counts):
        labels = planted_labels(order[node_type], num_classes)
        node_data[node_type] = {"x": class_features(labels, means, 1.0, stream_key(seed, _FEATURES, i))}
        if node_type == "paper":
            node_data[node_type]["y"] = labels
    day = random_permutation(num_papers, stream_key(seed, _TIME)).long()  # papers by age, spread over the days
    node_data["paper"] |= _split_by_rank(day, 0.6, 0.2)
    time = node_data["paper"]["time"] = day * num_days // num_papers

    edges: dict[EdgeType, Tensor] = {}
    for i, (src, relation, dst, per_source, skews) in enumerate(_RELATIONS):
        forward = planted_edges(
            order[src],
            order[dst],
            int(counts[src] * per_source),
            num_classes=num_classes,
            homophily=homophily,
            skew=skews,
            loops=src != dst,
            key=stream_key(seed, _EDGES, i),
        )
        if src == dst:  # citations point back in time
            later = time[forward[0].long()] >= time[forward[1].long()]
            forward = torch.where(later, forward, forward.flip(0))
        edges[(src, relation, dst)] = forward
        edges[(dst, f"rev_{relation}", src)] = forward.flip(0)
    info = {
        "generator": "typed",
        "num_classes": num_classes,
        "homophily": homophily,
        "separation": separation,
        "seed": seed,
        "target_type": "paper",
        "link_auc": 0.5 + (homophily - 1 / num_classes) / 2,
    }
    return Graph.from_edge_indices(edges, counts, node_data, info=info)


# source, relation, destination, edges per source node, skew of either end
_RELATIONS = [
    ("paper", "cites", "paper", 8.0, (1, 2)),
    ("author", "writes", "paper", 8.0, (2, 1)),
    ("author", "affiliated_with", "institution", 1.25, (1, 2)),
]


def class_means(num_classes: int, num_features: int, separation: float, seed: int) -> Tensor:
    """[num_classes, num_features] random directions, of length about `separation`."""
    _check_count("num_classes", num_classes, 1)
    _check_count("num_features", num_features, 1)
    zeros = torch.zeros(num_classes, dtype=torch.int64, device="cpu")
    noise = class_features(zeros, torch.zeros(1, num_features, device="cpu"), 1.0, stream_key(seed, _MEANS))
    return noise * (separation / num_features**0.5)


def _random_split(num_nodes: int, train: float, val: float, seed: int) -> dict[str, Tensor]:
    return _split_by_rank(random_permutation(num_nodes, stream_key(seed, _SPLIT)), train, val)


def _split_by_rank(rank: Tensor, train: float, val: float) -> dict[str, Tensor]:
    """Masks: the lowest ranks train, the next validate, the rest test."""
    if train < 0 or val < 0 or train + val > 1:
        raise ValueError(f"train and val must be fractions that leave a rest to test, got {train} and {val}")
    first, second = round(rank.numel() * train), round(rank.numel() * (train + val))
    return {"train_mask": rank < first, "val_mask": (rank >= first) & (rank < second), "test_mask": rank >= second}


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
