"""Small graphs of every awkward shape, random assignments of them, and how tests look at and alter stored parts."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.ops import CSC
from gnnsys.partition import Assignment

WRITES, CITES, LIKES = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "likes", "author")


def homogeneous(num_nodes, num_edges, seed=0, *, narrow=True, in_order=False, rows=True, num_used=None) -> Graph:
    """Self loops and multi-edges are likely; nodes from `num_used` on have no edges."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_used or max(num_nodes, 1), (2, num_edges), generator=g)
    if in_order:
        edges = edges[:, edges[1].argsort(stable=True)]
    csc = CSC.from_edge_index(edges, num_nodes, narrow=narrow)
    node_data = {
        "x": torch.randn(num_nodes, 3, generator=g),
        "train_mask": torch.rand(num_nodes, generator=g) < 0.3,
        "half": torch.randn(num_nodes, 2, generator=g).bfloat16(),
        "turned": torch.rand(2, num_nodes, generator=g).t(),
    }
    edge_data = {
        "weight": torch.rand(num_edges, generator=g),
        "time": torch.randint(0, 99, (num_edges,), generator=g),
        "turned": torch.rand(2, num_edges, generator=g).t(),
    }
    info = {"seed": seed, "classes": ["a", "b"]}
    if not rows:
        node_data, edge_data = {}, {}
    return Graph({NODE: num_nodes}, {EDGE: csc}, {NODE: node_data}, {EDGE: edge_data}, info)


def heterogeneous(seed=0, num_papers=17, num_authors=9, num_edges=60) -> Graph:
    """Three edge types, one of them without edges, and a node type without nodes."""
    g = torch.Generator().manual_seed(seed)

    def edges(num_src, num_dst, count):
        count = count if num_src and num_dst else 0
        src = torch.randint(0, max(num_src, 1), (count,), generator=g)
        return torch.stack([src, torch.randint(0, max(num_dst, 1), (count,), generator=g)])

    return Graph.from_edge_indices(
        {
            WRITES: edges(num_authors, num_papers, num_edges),
            CITES: edges(num_papers, num_papers, num_edges),
            LIKES: torch.empty(2, 0, dtype=torch.int64),
            ("paper", "at", "venue"): torch.empty(2, 0, dtype=torch.int64),
        },
        {"paper": num_papers, "author": num_authors, "venue": 0},
        {"paper": {"x": torch.randn(num_papers, 4, generator=g)}, "venue": {"x": torch.empty(0, 2)}},
        {CITES: {"time": torch.arange(num_edges if num_papers else 0)}},
        {"name": "typed"},
    )


def components(seed=0) -> Graph:
    """Three components that know nothing of each other."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.cat([torch.randint(0, 8, (2, 25), generator=g) + 8 * i for i in range(3)], dim=1)
    return Graph.from_edge_index(edges, 24, {"y": torch.arange(24)})


CASES = {
    "empty": lambda: homogeneous(0, 0),
    "one node": lambda: homogeneous(1, 0),
    "one node and its loops": lambda: homogeneous(1, 3),
    "no edges": lambda: homogeneous(7, 0),
    "isolated nodes": lambda: homogeneous(30, 40, num_used=12),
    "multi-edges": lambda: homogeneous(4, 60),
    "int64": lambda: homogeneous(20, 80, 1, narrow=False),
    "int32": lambda: homogeneous(20, 80, 2),
    "edges in order": lambda: homogeneous(20, 80, 3, in_order=True),
    "edges in order, int64": lambda: homogeneous(20, 80, 4, in_order=True, narrow=False),
    "structure alone": lambda: homogeneous(25, 90, 5, rows=False),
    "components": components,
    "typed": heterogeneous,
    "typed, one author": lambda: heterogeneous(1, 40, 1, 50),
    "typed, no papers": lambda: heterogeneous(2, 0, 5, 0),
    "no types": lambda: Graph({}, {}),
} | {f"random {seed}": lambda seed=seed: homogeneous(5 + 7 * seed, 11 * seed * seed, seed) for seed in range(4, 9)}

# parts, trainers per part, halo hops: one part, more parts than the smallest graphs have nodes, and what lies between
SHAPES = [(1, 1, 1), (3, 2, 1), (3, 1, 2), (2, 2, 3), (11, 1, 1)]


def written(*turns: int) -> dict[str, tuple[str, tuple[int, int, int]]]:
    """Every case with as many shapes as there are turns, and every shape with as many cases: names of both.

    Tests take different turns, so that together they have all combinations.
    """
    return {
        f"{case} as {SHAPES[(number + turn) % len(SHAPES)]}": (case, SHAPES[(number + turn) % len(SHAPES)])
        for turn in turns
        for number, case in enumerate(CASES)
    }


def random_assignment(graph: Graph, num_parts: int, trainers: int, seed: int = 0) -> Assignment:
    g = torch.Generator().manual_seed(seed)
    high = num_parts * trainers
    subpart = {
        t: torch.randint(0, high, (graph.num_nodes(t),), generator=g, dtype=torch.int32) for t in graph.node_types
    }
    return Assignment(num_parts, trainers, subpart)


def assert_same_graph(left: Graph, right: Graph) -> None:
    assert left.node_types == right.node_types and left.edge_types == right.edge_types and left.info == right.info
    for node_type in left.node_types:
        assert left.num_nodes(node_type) == right.num_nodes(node_type)
        assert_same_rows(left.node_data[node_type], right.node_data[node_type])
    for edge_type in left.edge_types:
        a, b = left.csc(edge_type), right.csc(edge_type)
        assert a.num_src == b.num_src
        for x, y in ((a.indptr, b.indptr), (a.indices, b.indices), (a.edge_ids, b.edge_ids)):
            assert (x is None) == (y is None)
            assert x is None or (x.dtype == y.dtype and torch.equal(x, y))
        assert_same_rows(left.edge_data[edge_type], right.edge_data[edge_type])


def assert_same_rows(left, right) -> None:
    assert list(left) == list(right)
    for name in left:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]), name


# -- altering what is stored -------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def write_manifest(folder: Path, manifest: dict) -> None:
    """With a checksum that fits whatever was changed."""
    manifest.pop("crc32", None)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def stored_name(folder: Path, part: int, kind: str, type_index: int, role: str, name: str | None = None) -> str:
    entry = read_manifest(folder)["parts"][part][kind][type_index][role]
    return entry if name is None else entry[name]


def alter(folder: Path, name: str, change) -> None:
    """Rewrites one array as `change(array)` (or as changed in place), with size, shape and checksums made to fit."""
    array = np.load(folder / name)
    changed = change(array)
    array = array if changed is None else changed
    np.save(folder / name, array)
    content = (folder / name).read_bytes()
    manifest = read_manifest(folder)
    manifest["files"][name] |= {"bytes": len(content), "crc32": zlib.crc32(content), "shape": list(array.shape)}
    write_manifest(folder, manifest)
