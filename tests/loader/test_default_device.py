"""Loaders beside `torch.set_default_device`: what they make for themselves is where it belongs, whatever the default.

The default here is "meta", which holds no values: whatever was left to it makes a batch fail or differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gnnsys
import gnnsys.graph
from gnnsys.graph import EDGE
from gnnsys.loader import Batch, LinkNeighborLoader, NegativeSampling, NeighborLoader
from gnnsys.sampling import NeighborSampler, expected_visits, sample_batches, sample_neighbors, to_block
from gnnsys.store import DeviceCache
from tests.sampling.machines import CITES, WRITES, homogeneous, machines, typed


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Batch):
        return list(batch.tensors())
    stores = batch.stores if hasattr(batch, "stores") else [batch]
    return [value for store in stores for _, value in sorted(store.items()) if isinstance(value, Tensor)]


def node_options(graph: Any) -> list[dict[str, Any]]:
    ids = graph.from_global(range(0, 60, 2))
    return [
        {},
        {"shuffle": True, "input_nodes": ids},
        {"input_nodes": graph.from_original(list(range(0, 60, 2)))},
        {"input_nodes": gnnsys.split(graph, ids), "shuffle": True},
        {"replace": True},
        {"disjoint": True},
        {"weight_attr": "w"},
        {"time_attr": "t"},
        {"time_attr": "et", "input_nodes": ids, "input_time": torch.arange(30)},
        {"expand": "frontier"},
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced"},
        {"fetch": ["x"]},
    ]


def link_options(graph: Any) -> list[dict[str, Any]]:
    links = graph.from_global(torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0)))
    weight = torch.arange(graph.num_nodes()).float()
    return [
        {},
        {"edge_label_index": links},
        {"edge_label_index": gnnsys.split(graph, None, type=EDGE)},
        {"neg_sampling": "binary"},
        {"neg_sampling": ("triplet", 2), "shuffle": True},
        {"neg_sampling": NegativeSampling("binary", 1.5, weight, weight), "disjoint": True},
        {"edge_label_index": links, "time_attr": "t", "edge_label_time": torch.arange(40), "neg_sampling": "binary"},
        {"edge_label_index": links, "edge_label": torch.arange(40)},
        {"subgraph_type": "induced"},
    ]


def native(graph: Any) -> list[Callable[[], Any]]:
    """Loaders yet to be made. The default device is a thread's own: most of them load in the thread that has it."""
    common: dict[str, Any] = {"batch_size": 16, "seed": 3}
    out: list[Callable[[], Any]] = [lambda: NeighborLoader(graph, [3, 2], num_threads=1, **common)]
    for options in node_options(graph):
        out.append(lambda options=options: NeighborLoader(graph, [3, 2], num_threads=0, **options, **common))
    for options in link_options(graph):
        out.append(lambda options=options: LinkNeighborLoader(graph, [3, 2], num_threads=0, **options, **common))
    return out


def compare(loaders: list[Callable[[], Any]]) -> None:
    for number, make in enumerate(loaders):
        torch.manual_seed(number)
        loader = make()
        expected = [batch for _, batch in zip(range(1), loader, strict=False)]
        if isinstance(loader, (NeighborLoader, LinkNeighborLoader)):
            expected.append(loader([4, 0]))
        torch.manual_seed(number)
        with default_device("meta"):
            loader = make()
            found = [batch for _, batch in zip(range(1), loader, strict=False)]
            if isinstance(loader, (NeighborLoader, LinkNeighborLoader)):
                found.append(loader([4, 0]))
                state = loader.state_dict()
                loader.load_state_dict(state)
                next(iter(loader), None)
        for one, other in zip(found, expected, strict=True):
            for a, b in zip(tensors(one), tensors(other), strict=True):
                assert a.is_cpu and torch.equal(a, b), number


def test_native_loaders_do_not_depend_on_the_default_device() -> None:
    compare(native(homogeneous()))
    graph = typed()
    compare(
        [
            lambda: NeighborLoader(graph, [3, 2], input_nodes="paper", batch_size=16, num_threads=0),
            lambda: LinkNeighborLoader(graph, [3], edge_label_index=WRITES, batch_size=16, neg_sampling="binary"),
            lambda: LinkNeighborLoader(
                graph, [3], edge_label_index=CITES, batch_size=16, neg_sampling="triplet", num_threads=0
            ),
        ]
    )


def test_loaders_on_parts_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:
        compare(native(graphs[0]))


def test_samplers_and_caches_do_not_depend_on_the_default_device() -> None:
    graph = homogeneous()
    x = graph.node_data["node"]["x"]
    seeds = torch.arange(30)

    def answers() -> list[Tensor]:
        sampler = NeighborSampler(graph, [3, 2])
        first = next(iter(sample_batches(sampler, seeds, 8)))
        found = sample_neighbors(graph, seeds, 3)
        _, nodes = to_block(found)
        cache = DeviceCache.from_scores(x, graph.csc().in_degrees(), bytes=1000, device="cpu")
        visits = expected_visits(graph.csc(), [3], seeds, batch_size=8)
        return [first.node["node"], found.ids, nodes["node"], cache.read(seeds), visits]

    expected = answers()
    with default_device("meta"):
        found = answers()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_pyg_loaders_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    pyg = pytest.importorskip("gnnsys.pyg")
    data = gnnsys.graph.to_pyg(homogeneous())
    many = gnnsys.graph.to_pyg(typed())

    def loaders(of: Any) -> list[Callable[[], Any]]:
        out: list[Callable[[], Any]] = []
        common = {"batch_size": 16, "seed": 3}
        for options in ({"shuffle": True}, {"disjoint": True}, {"weight_attr": "w"}, {"time_attr": "t"}):
            out.append(lambda options=options: pyg.NeighborLoader(of, [3, 2], **options, **common))
        for options in ({}, {"neg_sampling": "binary"}, {"neg_sampling": {"mode": "triplet", "amount": 2}}):
            out.append(lambda options=options: pyg.LinkNeighborLoader(of, [3, 2], **options, **common))
        return out

    compare(loaders(data))
    compare([lambda: pyg.NeighborLoader(many, [3], input_nodes="paper", batch_size=16, seed=1)])
    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:
        compare(loaders(graphs[0]))


def test_dgl_loaders_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    pytest.importorskip("dgl")
    import dgl

    from gnnsys import dgl as ours

    graph = homogeneous()
    src, dst = graph.edge_index()
    g = dgl.graph((src, dst), num_nodes=graph.num_nodes())
    g.ndata["x"] = graph.node_data["node"]["x"]

    def first(of: Any) -> tuple[Any, Any, Any]:
        sampler = ours.NeighborSampler([2, 3], prefetch_node_feats=["x"])
        ids = torch.arange(0, 60, 3, device="cpu")
        ids = ids if of is g else of.from_original(ids)
        loader = ours.DataLoader(of, ids, sampler, batch_size=7, shuffle=True, seed=4)
        inputs, outputs, blocks = next(iter(loader))
        return inputs, outputs, blocks[0].srcdata["x"]

    with machines(graph, tmp_path / "parts", 2) as graphs:
        for of in (g, graphs[0]):
            expected = first(of)
            with default_device("meta"):
                found = first(of)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
