"""The faces for PyG and DGL programs, on graphs of theirs and on graphs in parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gnnsys
from gnnsys.graph import to_pyg
from tests.golden.case import Case, Values, collect, epochs
from tests.golden.graphs import CITES, GRAPHS, PAPERS, SEEDS, WRITES, parts_of, plain, typed
from tests.golden.loaders import BY_TYPE, LINK_TIMES, LINKS, TIMES

PYG, DGL = "torch_geometric", "dgl"

# -- PyG ---------------------------------------------------------------------------------------------------------------

PYG_NODES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "all neighbours": {"num_neighbors": [-1, 2]},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weights": {"weight_attr": "w"},
    "node times": {"time_attr": "time"},
    "last by given times": {"time_attr": "time", "input_time": TIMES, "temporal_strategy": "last"},
    "edge times": {"time_attr": "edge_time", "input_time": TIMES},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "shuffle, drop_last": {"shuffle": True, "drop_last": True},
    "two workers": {"shuffle": True, "num_workers": 2},
    "transform": {"transform": lambda data: data.update({"twice": data.x * 2})},
    "filter in workers": {"filter_per_worker": True, "num_workers": 1},
}
LEAK_FREE: dict[str, Any] = {"exclude_supervision": True}
PYG_LINKS: dict[str, dict[str, Any]] = {
    "no negatives": {},
    "binary": {"neg_sampling": "binary"},
    "ratio": {"neg_sampling_ratio": 2.0},
    "triplet": {"neg_sampling": {"mode": "triplet", "amount": 2}},
    "times": {"time_attr": "time", "edge_label_time": LINK_TIMES, "neg_sampling": "binary"},
    "supervision kept": {"exclude_supervision": None, "neg_sampling": "binary", "shuffle": True},
}
PYG_TYPED: dict[str, dict[str, Any]] = {
    "uniform": {},
    "by type": {"num_neighbors": BY_TYPE, "shuffle": True},
    "disjoint": {"disjoint": True},
    "node times": {"time_attr": "time"},
    "induced": {"subgraph_type": "induced"},
}


def pyg_nodes(graph: str, options: dict[str, Any], folder: Path, *, seed: int | None = 7) -> Values:
    torch.manual_seed(3)  # what shuffles
    seeds = SEEDS if graph == "plain" else ("paper", PAPERS)
    given: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 16, "input_nodes": seeds, "seed": seed} | options
    return epochs(gnnsys.pyg.NeighborLoader(to_pyg(GRAPHS[graph]()), **given))


def pyg_links(options: dict[str, Any], folder: Path) -> Values:
    torch.manual_seed(3)
    given: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 12, "seed": 7, **LEAK_FREE} | options
    return epochs(gnnsys.pyg.LinkNeighborLoader(to_pyg(plain()), edge_label_index=LINKS, **given))


def pyg_typed_links(folder: Path) -> Values:
    torch.manual_seed(3)
    index = (WRITES, typed().edge_index(WRITES)[:, :40])
    options: dict[str, Any] = {"neg_sampling": "binary", "batch_size": 12, "shuffle": True, "seed": 7, **LEAK_FREE}
    return epochs(gnnsys.pyg.LinkNeighborLoader(to_pyg(typed()), [3, 2], edge_label_index=index, **options))


def pyg_resumed(folder: Path) -> Values:
    def make() -> Any:
        generator = torch.Generator().manual_seed(9)
        data = to_pyg(plain())
        return gnnsys.pyg.NeighborLoader(
            data, [4, 3], input_nodes=SEEDS, batch_size=8, shuffle=True, generator=generator
        )

    first, second = make(), make()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    second.load_state_dict(first.state_dict())
    return epochs(second)


def pyg_parts(name: str, options: dict[str, Any], folder: Path) -> Values:
    torch.manual_seed(3)
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of(name, folder))
        seeds: Any = graph.from_original(SEEDS) if name == "plain" else graph.from_original(PAPERS, "paper")
        return epochs(gnnsys.pyg.NeighborLoader(graph, [4, 3], input_nodes=seeds, batch_size=16, seed=7, **options))


def pyg_links_of_parts(folder: Path) -> Values:
    torch.manual_seed(3)
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        links = gnnsys.split(graph, None, type=("node", "to", "node"))
        options: dict[str, Any] = {"neg_sampling": "binary", "batch_size": 400, "shuffle": True, "seed": 7, **LEAK_FREE}
        return epochs(gnnsys.pyg.LinkNeighborLoader(graph, [2], edge_label_index=links, **options), 1)


def pyg_stores(folder: Path) -> Values:
    """PyG's own loader on our stores and sampler."""
    from torch_geometric.loader import NeighborLoader

    torch.manual_seed(3)
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        features, edges = gnnsys.pyg.stores(graph)
        sampler = gnnsys.pyg.NeighborSampler((features, edges), [4, 3])
        loader = NeighborLoader(
            (features, edges),
            [4, 3],
            input_nodes=graph.global_ids(SEEDS),
            batch_size=16,
            neighbor_sampler=sampler,
            transform=features.add_edge_data,
        )
        row, col = edges.get_edge_index(None, "coo", part=1)
        return {**epochs(loader, 1), "row": row, "col": col}


# -- DGL ---------------------------------------------------------------------------------------------------------------

FEATURES: Any = {"prefetch_node_feats": ["x"], "prefetch_labels": ["y"], "prefetch_edge_feats": ["w", "number"]}
TYPED_FEATURES: Any = {"prefetch_node_feats": {"paper": ["x"], "author": ["x"]}, "prefetch_edge_feats": {CITES: ["w"]}}
BY_LAYER: list[Any] = [{CITES: 3, WRITES: 2, "rev_writes": -1}, {"cites": 4, "writes": 4}]
DGL_NODES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "weights": {"prob": "w"},
    "mask": {"mask": "odd"},
    "replace": {"replace": True},
    "features": FEATURES,
}


def as_dgl(name: str) -> Any:
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import dgl

    graph = GRAPHS[name]()
    if graph.is_homogeneous:
        g = dgl.graph(tuple(graph.edge_index()), num_nodes=graph.num_nodes())
        g.ndata.update(graph.node_data["node"])
        g.edata.update(graph.edge_data["node", "to", "node"])
        g.edata["odd"] = g.edata["number"] % 2 == 1
        return g
    edges = {t: tuple(graph.edge_index(t)) for t in graph.edge_types}
    g = dgl.heterograph(edges, num_nodes_dict={t: graph.num_nodes(t) for t in graph.node_types})
    for node_type, rows in graph.node_data.items():
        g.nodes[node_type].data.update(rows)
    for edge_type, rows in graph.edge_data.items():
        g.edges[edge_type].data.update(rows)
    return g


def dgl_nodes(options: dict[str, Any], folder: Path, **loading: Any) -> Values:
    g = as_dgl("plain")
    sampler = gnnsys.dgl.NeighborSampler([3, 4], **options)
    return epochs(gnnsys.dgl.DataLoader(g, SEEDS, sampler, batch_size=16, seed=4, **loading))


def dgl_full(folder: Path) -> Values:
    g = as_dgl("plain")
    return epochs(gnnsys.dgl.DataLoader(g, SEEDS, gnnsys.dgl.MultiLayerFullNeighborSampler(2), batch_size=16, seed=4))


def dgl_typed(folder: Path) -> Values:
    g = as_dgl("typed")
    sampler = gnnsys.dgl.NeighborSampler(BY_LAYER, **TYPED_FEATURES)
    return epochs(gnnsys.dgl.DataLoader(g, {"paper": PAPERS}, sampler, batch_size=16, seed=4, shuffle=True))


def dgl_parts(name: str, folder: Path) -> Values:
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of(name, folder))
        sampler: Any
        seeds: Any
        if name == "plain":
            sampler, seeds = gnnsys.dgl.NeighborSampler([3, 4], prob="w", **FEATURES), gnnsys.split(graph, "train")
        else:
            sampler = gnnsys.dgl.NeighborSampler(BY_LAYER, **TYPED_FEATURES)
            seeds = graph.from_original({"paper": PAPERS})
        return epochs(gnnsys.dgl.DataLoader(graph, seeds, sampler, batch_size=16, seed=4, shuffle=True))


def dgl_sampled(folder: Path) -> Values:
    """What the sampler gives DGL's own DataLoader; its draws follow torch's generator."""
    g = as_dgl("plain")
    torch.manual_seed(2)
    sampler = gnnsys.dgl.NeighborSampler([3, 4])
    return collect(tuple(sampler.sample_blocks(g, seeds)) for seeds in SEEDS.split(20))


def _all(needs: str, make: Callable[..., Values], table: dict[str, dict[str, Any]], label: str) -> dict[str, Case]:
    return {f"{label}, {name}": Case(partial(make, options), needs=needs) for name, options in table.items()}


CASES: dict[str, Case] = {
    **_all(PYG, partial(pyg_nodes, "plain"), PYG_NODES, "pyg nodes"),
    "pyg nodes, torch's seed": Case(partial(pyg_nodes, "plain", {"shuffle": True}, seed=None), needs=PYG),
    "pyg nodes, resumed": Case(pyg_resumed, needs=PYG),
    **_all(PYG, partial(pyg_nodes, "typed"), PYG_TYPED, "pyg typed nodes"),
    **_all(PYG, pyg_links, PYG_LINKS, "pyg links"),
    "pyg typed links": Case(pyg_typed_links, needs=PYG),
    "pyg parts": Case(partial(pyg_parts, "plain", {}), needs=PYG),
    "pyg parts, weights": Case(partial(pyg_parts, "plain", {"weight_attr": "w", "shuffle": True}), needs=PYG),
    "pyg typed parts": Case(partial(pyg_parts, "typed", {"disjoint": True}), needs=PYG),
    "pyg links of parts": Case(pyg_links_of_parts, needs=PYG),
    "pyg stores": Case(pyg_stores, needs=PYG),
    **_all(DGL, dgl_nodes, DGL_NODES, "dgl nodes"),
    "dgl nodes, shuffle, drop_last": Case(partial(dgl_nodes, {}, shuffle=True, drop_last=True), needs=DGL),
    "dgl nodes, two workers": Case(partial(dgl_nodes, FEATURES, shuffle=True, num_workers=2), needs=DGL),
    "dgl nodes, all neighbours": Case(dgl_full, needs=DGL),
    "dgl typed nodes": Case(dgl_typed, needs=DGL),
    "dgl parts": Case(partial(dgl_parts, "plain"), needs=DGL),
    "dgl typed parts": Case(partial(dgl_parts, "typed"), needs=DGL),
    "dgl sampler": Case(dgl_sampled, needs=DGL),
}
