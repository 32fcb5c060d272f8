"""Graphs for the tests of samplers and loaders on a device, and equality across devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EDGE, EdgeType, Graph
from gnnsys.loader import Batch
from gnnsys.sampling import Block, Sample

WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
WRITTEN: EdgeType = ("paper", "rev_writes", "author")
PLACES = ("device", "pinned")


def homogeneous(seed: int = 0, num_nodes: int = 600, num_edges: int = 9000, wide: bool = False) -> Graph:
    """In no order of destinations, with nodes that nothing leads to and one that everything leads to."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    edge_index[1, : num_edges // 5] = 3
    edge_index[1][edge_index[1] % 11 == 5] = 7
    node_data = {
        "x": torch.rand(num_nodes, 17, generator=generator),
        "y": torch.randint(0, 9, (num_nodes,), generator=generator),
        "half": torch.rand(num_nodes, 2, 3, generator=generator).half(),
        "t": torch.randint(0, 100, (num_nodes,), generator=generator),
        "train_mask": torch.rand(num_nodes, generator=generator) < 0.3,
    }
    edge_data = {
        "w": torch.rand(num_edges, generator=generator),
        "et": torch.randint(0, 100, (num_edges,), generator=generator),
        "kind": torch.randint(0, 5, (num_edges,), generator=generator, dtype=torch.int8),
    }
    edge_data["w"][::7] = 0
    graph = Graph.from_edge_index(edge_index, num_nodes, node_data, edge_data)
    return widened(graph) if wide else graph


def widened(graph: Graph) -> Graph:
    """The same with int64 ids in its structure."""
    csc = graph.csc()
    ids = None if csc.edge_ids is None else csc.edge_ids.long()
    wide = type(csc)(csc.indptr, csc.indices.long(), csc.num_src, ids)
    return Graph({"node": graph.num_nodes()}, {EDGE: wide}, graph.node_data, graph.edge_data)


def typed(seed: int = 0) -> Graph:
    generator = torch.Generator().manual_seed(seed)

    def edges(src: int, dst: int, count: int) -> Tensor:
        return torch.stack([torch.randint(0, n, (count,), generator=generator) for n in (src, dst)])

    writes = edges(60, 100, 500)
    edge_index = {WRITES: writes, CITES: edges(100, 100, 800), WRITTEN: writes.flip(0)}
    node_data = {
        "author": {"x": torch.rand(60, 5, generator=generator)},
        "paper": {"x": torch.rand(100, 3, generator=generator), "y": torch.arange(100)},
    }
    edge_data = {CITES: {"w": torch.rand(800, generator=generator)}}
    return Graph.from_edge_indices(edge_index, {"author": 60, "paper": 100, "alone": 5}, node_data, edge_data)


def placed(graph: Graph, place: str) -> Graph:
    return graph.to("cuda") if place == "device" else graph.pin_memory()


def same(there: Tensor, here: Tensor, what: str) -> None:
    assert there.is_cuda, f"{what} is on {there.device}"
    assert here.is_cpu
    assert there.dtype == here.dtype and there.shape == here.shape, f"{what}: {there.dtype} {there.shape}"
    assert torch.equal(there.cpu(), here), what


def same_values(there: Any, here: Any, what: str) -> None:
    """Tensors on the device with those on the host, at any depth; everything else as it is."""
    if isinstance(here, Tensor):
        same(there, here, what)
    elif isinstance(here, dict):
        assert list(there) == list(here), what
        for key, value in here.items():
            same_values(there[key], value, f"{what}.{key}")
    else:
        assert there == here, what


def same_blocks(there: list[Block], here: list[Block]) -> None:
    assert len(there) == len(here)
    for number, (a, b) in enumerate(zip(there, here, strict=True)):
        assert (a.num_src, a.num_dst, list(a.csc)) == (b.num_src, b.num_dst, list(b.csc))
        for edge_type, csc in b.csc.items():
            other = a.csc[edge_type]
            assert other.num_src == csc.num_src
            for name in ("indptr", "indices", "edge_ids"):
                same_values(getattr(other, name), getattr(csc, name), f"blocks[{number}][{edge_type}].{name}")


def same_sample(there: Sample, here: Sample) -> None:
    for name in ("node", "row", "col", "edge", "num_sampled_nodes", "num_sampled_edges", "tree"):
        same_values(getattr(there, name), getattr(here, name), name)
    same_blocks(there.blocks, here.blocks)


def same_batch(there: Batch, here: Batch) -> None:
    same_values(there.nodes, here.nodes, "nodes")
    same_values(there.edges, here.edges, "edges")
    same_values(there.extra, here.extra, "extra")
    same_blocks(there.blocks, here.blocks)
