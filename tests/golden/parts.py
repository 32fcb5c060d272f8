"""Parts: assignments, files on disk, and the same loaders on what gnnsys.open returns, in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gnnsys
from gnnsys.graph import sbm
from gnnsys.partition import (
    Options,
    assign_parts,
    communication_volume,
    expected_remote,
    open_parts,
    partition_graph,
)
from gnnsys.sampling import NeighborSampler
from tests.golden.case import Case, Values, collect, epochs
from tests.golden.graphs import GRAPHS, NUM_NODES, PAPERS, SEEDS, WRITES, parts_of, plain, typed
from tests.golden.loaders import BY_TYPE, CITED, KEY, LINK_OPTIONS, LINKS, NODES, link_loader, node_loader, resumed

EDGE = ("node", "to", "node")
ON_PARTS = (
    "uniform",
    "all then some",
    "replace",
    "disjoint",
    "weights",
    "node times",
    "last by edge times",
    "bidirectional",
    "induced",
    "blocks",
    "shuffle, drop_last",
    "fetch",
    "a sampler of blocks",
    "no threads",
    "two threads",
)
LINKS_ON_PARTS = ("binary", "by weight", "two of each", "times, binary", "disjoint triplet", "supervision kept")


def nodes(name: str, folder: Path) -> Values:
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        return epochs(node_loader(graph, NODES[name], input_nodes=graph.from_original(SEEDS)))


def nodes_of_a_share(folder: Path) -> Values:
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        return epochs(node_loader(graph, {"shuffle": True}, input_nodes=gnnsys.split(graph, "train")))


def resumed_nodes(folder: Path) -> Values:
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        return resumed(lambda: node_loader(graph, {"shuffle": True}, input_nodes=graph.from_original(SEEDS)), folder)


def typed_nodes(options: dict[str, Any], folder: Path) -> Values:
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("typed", folder, 2))
        return epochs(node_loader(graph, options, input_nodes=graph.from_original(PAPERS, "paper")))


def links(name: str, folder: Path) -> Values:
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        index = graph.from_original(LINKS)
        return epochs(link_loader(graph, LINK_OPTIONS[name], edge_label_index=index))


def links_of_a_share(folder: Path) -> Values:
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("typed", folder, 2))
        share = gnnsys.split(graph, None, type=WRITES)
        options = {"neg_sampling": "triplet", "batch_size": 90, "shuffle": True}
        return epochs(link_loader(graph, options, edge_label_index=share), 1)


def lookups(folder: Path) -> Values:
    """Ids, ends, degrees and samples of an opened graph, and rows by id."""
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts_of("plain", folder))
        ids = graph.global_ids(SEEDS)
        edge_ids = torch.arange(0, 1600, 37)
        found = graph.sample_neighbors(ids, 3, key=KEY)
        return {
            "global ids": ids,
            "original ids": graph.original_ids(torch.arange(NUM_NODES)),
            "original edge ids": graph.original_edge_ids(edge_ids),
            "edge ends": list(graph.edge_ends(edge_ids)),
            "in-degrees": graph.in_degrees(ids),
            "share": gnnsys.split(graph, "train").ids[torch.arange(20)],
            "in-edges": [found.indptr, found.ids, found.edge_ids],
            "rows": [graph.node_data["node"][name][ids] for name in ("x", "y", "time")],
            "edge rows": [graph.edge_data[EDGE][name][edge_ids] for name in ("w", "edge_time")],
            **collect([NeighborSampler(graph, [4, 3]).sample({"node": ids}, key=KEY)]),
        }


# -- partitioning ------------------------------------------------------------------------------------------------------


def assignments(folder: Path) -> Values:
    graph = sbm(1000, num_features=1)
    values: Values = {}
    for method in ("multilevel", "random", "chunk"):
        for num_parts, trainers in ((2, 1), (3, 2)):
            assigned = assign_parts(graph, num_parts, trainers, options=Options(method=method, seed=5))
            values[f"{method} {num_parts} x {trainers}"] = assigned.assignment.subpart["node"]
            values[f"{method} {num_parts} x {trainers} cut"] = [assigned.cut, assigned.part_cut]
    assigned = assign_parts(graph, 3, options=Options(balance=["nodes", "edges", "train"]))
    values["balanced"] = assigned.assignment.subpart["node"]
    values["typed"] = list(assign_parts(typed(), 2).assignment.subpart.values())
    return values


def communication(folder: Path) -> Values:
    """Its search takes logarithms, which differ between machines in the last bit."""
    graph = sbm(1000, num_features=1)
    assigned = assign_parts(graph, 3, options=Options(objective="communication")).assignment.subpart["node"]
    return {"assigned": assigned, "cut": list(communication_volume(graph.csc(), assigned, 3))}


def volumes(folder: Path) -> Values:
    part = torch.arange(NUM_NODES, dtype=torch.int32) % 3
    volume = communication_volume(plain().csc(), part, 3)
    return {"total": volume.total, "load": volume.load}


def files(name: str, folder: Path) -> Values:
    """Every array of the parts by the manifest's order, and what the manifest says of the graph."""
    path = parts_of(name, folder, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    values: Values = {str(f.relative_to(path)): torch.from_numpy(np.load(f)) for f in sorted(path.glob("*/*.npy"))}
    return values | {key: json.dumps(manifest[key]) for key in ("format", "version", "schema", "book")}


def made_and_merged(folder: Path) -> Values:
    """`partition_graph` on the whole way, with reverse edges and a wider halo, and the graph put together again."""
    path = folder / "made"
    if not path.exists():
        partition_graph(plain(), 3, path, seed=1, halo_hops=2, add_reverse=True)
    merged = open_parts(path).merge()
    rows = {f"edge {name}": value for name, value in merged.edge_data[EDGE].items()}
    return {"edges": merged.edge_index(), **merged.node_data["node"], **rows}


def remote(folder: Path) -> Values:
    found = expected_remote(open_parts(parts_of("plain", folder)), [4, 3], batch_size=16)
    return {"fraction": float(found.fraction or 0.0)}


CASES: dict[str, Case] = {
    **{f"parts, nodes, {name}": Case(partial(nodes, name)) for name in ON_PARTS},
    "parts, nodes, a share": Case(nodes_of_a_share),
    "parts, nodes, resumed": Case(resumed_nodes),
    "parts, typed nodes": Case(partial(typed_nodes, {"num_neighbors": BY_TYPE, "shuffle": True})),
    "parts, typed nodes, times": Case(partial(typed_nodes, {"time_attr": "time"})),
    "parts, typed nodes, weights": Case(partial(typed_nodes, {"weight_attr": "w", "num_neighbors": CITED})),
    **{f"parts, links, {name}": Case(partial(links, name)) for name in LINKS_ON_PARTS},
    "parts, typed links, a share": Case(links_of_a_share),
    "parts, lookups": Case(lookups),
    "assignments": Case(assignments),
    "assignment by communication": Case(communication, is_portable=False),
    "volumes": Case(volumes, is_computed=True),
    **{f"files of {name} parts": Case(partial(files, name)) for name in GRAPHS},
    "partition_graph": Case(made_and_merged),
    "expected_remote": Case(remote, is_computed=True),
}
