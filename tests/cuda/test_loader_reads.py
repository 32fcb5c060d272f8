"""What a device reads while loaders, graphs and caches come and go, and loaders beside torch's default device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.pipeline import Stage
from gnnsys.sampling.neighborhoods import GraphNeighborhoods
from gnnsys.store import DeviceCache
from tests.cuda.places import homogeneous, same_batch, typed
from tests.cuda.test_loader import LINKS, OPTIONS, PLACES, placed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LONG = 300_000_000  # cycles: more than a tenth of a second


def wait_on_the_device(sampled: Any) -> Any:
    """A stage on the loader's stream: the rows of the batch are gathered a good while after `next` has returned."""
    torch.cuda._sleep(LONG)
    return sampled


SLOW = Stage("slow", wait_on_the_device, threads=0, after="sample")


def wide(num_nodes: int = 20_000) -> Graph:
    edges = torch.randint(0, num_nodes, (2, 4 * num_nodes), generator=torch.Generator().manual_seed(0))
    return Graph.from_edge_index(edges, num_nodes, {"x": torch.arange(num_nodes).float()[:, None].repeat(1, 64)})


def junk_like(tensor: Tensor) -> list[Tensor]:
    """Takes over what torch has free of this size, host or device, and writes to it."""
    if tensor.is_cuda:
        return [torch.full_like(tensor, -7) for _ in range(4)]
    out = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for _ in range(4)]
    for each in out:
        each.fill_(-7)
    return out


@pytest.mark.parametrize("num_threads", [0, None])
def test_rows_may_change_when_an_epoch_has_ended(num_threads: int | None) -> None:
    graph = wide().pin_memory()
    rows = graph.node_data[NODE]["x"]
    options: dict[str, Any] = {"batch_size": 10_000, "stages": [SLOW], "num_threads": num_threads}
    loader = NeighborLoader(graph, [2], device="cuda", across_epochs=False, **options)
    for epoch in range(3):
        rows.fill_(epoch)
        batches = list(loader)
        rows.fill_(-1)
        for batch in batches:
            assert bool((batch.x == epoch).all())
    rows.fill_(5)
    for _ in loader:
        break  # an epoch that is left early has ended too
    first = next(iter(loader))
    loader.close()
    rows.fill_(-1)
    assert bool((first.x == 5).all())


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_a_batch_survives_its_loader_and_its_graph(place: str) -> None:
    ids = list(range(1000))
    for way in ("call", "inline", "threads"):
        graph = placed(wide(), place)
        like = graph.node_data[NODE]["x"][:0].new_empty(0)
        shape = graph.node_data[NODE]["x"].shape
        threads = 1 if way == "threads" else 0
        loader = NeighborLoader(graph, [2], device="cuda", batch_size=1000, stages=[SLOW], num_threads=threads)
        batch = loader(ids) if way == "call" else next(iter(loader))
        del loader, graph
        gc.collect()
        kept = junk_like(torch.empty(shape, dtype=like.dtype, device=like.device))
        assert torch.equal(batch.x[:, 0].cpu(), batch.n_id.cpu().float()), way
        del kept


@pytest.mark.parametrize("readable", [True, False])
def test_rows_read_through_a_cache_survive_it(readable: bool) -> None:
    rows = torch.arange(20_000).float()[:, None].repeat(1, 64)
    rows = rows.pin_memory() if readable else rows
    ids = torch.randint(0, 20_000, (5_000,), device="cuda")
    cache = DeviceCache(rows, torch.arange(0, 20_000, 2), "cuda")
    held = cache._cache.shape
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        pending = cache.begin_read(ids if readable else ids.cpu())
        out = pending.result()
    del cache, pending
    shape = rows.shape
    del rows
    gc.collect()
    kept = [*junk_like(torch.empty(shape)), *junk_like(torch.empty(held, device="cuda"))]
    stream.synchronize()
    assert torch.equal(out[:, 0], ids.float())
    del kept


def test_structure_in_pinned_memory_survives_its_graph_until_it_is_read() -> None:
    graph = homogeneous(num_edges=200_000).pin_memory()
    expected = graph.csc().edge_ids.clone()
    positions = torch.arange(200_000, device="cuda")
    torch.cuda.synchronize()
    hoods = GraphNeighborhoods(graph, device=torch.device("cuda", 0))
    torch.cuda._sleep(LONG)
    found = hoods.edge_ids(EDGE, positions)
    del hoods, graph
    gc.collect()
    kept = junk_like(torch.empty(200_000, dtype=expected.dtype))
    assert torch.equal(found.cpu(), expected.long())
    del kept


# -- the default device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_threads", [0, 1])
def test_loaders_do_not_depend_on_the_default_device(place: str, num_threads: int) -> None:
    graph = homogeneous()
    there = placed(graph, place)
    common: dict[str, Any] = {"batch_size": 64, "shuffle": True, "seed": 5}
    for kind, cases in ((NeighborLoader, OPTIONS), (LinkNeighborLoader, LINKS)):
        for case, options in cases.items():
            here = kind(graph, [4, 3], num_threads=0, **{**common, **options})
            expected = [next(iter(here)), here([3, 1])]
            torch.set_default_device("cuda")
            try:
                loader = kind(there, [4, 3], num_threads=num_threads, device="cuda", **{**common, **options})
                found = [next(iter(loader)), loader([3, 1])]
                loader.load_state_dict(loader.state_dict())
                loader.close()
                on_host = kind(graph, [4, 3], num_threads=num_threads, **{**common, **options})
                assert next(iter(on_host)).n_id.is_cpu, case
                on_host.close()
            finally:
                torch.set_default_device(None)
            for a, b in zip(found, expected, strict=True):
                same_batch(a, b)


def test_pyg_loaders_do_not_depend_on_the_default_device() -> None:
    pyg = pytest.importorskip("gnnsys.pyg")
    from gnnsys.graph import to_pyg

    data, many = to_pyg(homogeneous()), to_pyg(typed())
    torch.set_default_device("cuda")
    try:
        for shuffle in (False, True):
            batch = next(iter(pyg.NeighborLoader(data, [4, 3], batch_size=32, shuffle=shuffle)))
            assert torch.equal(batch.x, data.x[batch.n_id])
            batch = next(iter(pyg.LinkNeighborLoader(data, [4], batch_size=32, shuffle=shuffle, neg_sampling="binary")))
            assert torch.equal(batch.x, data.x[batch.n_id])
        batch = next(iter(pyg.NeighborLoader(many, [4], input_nodes="paper", batch_size=32)))
        assert torch.equal(batch["paper"].x, many["paper"].x[batch["paper"].n_id])
    finally:
        torch.set_default_device(None)


# -- transforms and fanouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_transform_may_return_tuples_lists_and_dictionaries(place: str) -> None:
    def parts(batch: Any) -> Any:
        return batch.x, {"edges": [batch.edge_index]}, batch.batch_size, batch, None

    graph = homogeneous()
    options: dict[str, Any] = {"batch_size": 64, "transform": parts}
    there = NeighborLoader(placed(graph, place), [4, 3], device="cuda", **options)
    for a, b in zip(there, NeighborLoader(graph, [4, 3], **options), strict=True):
        assert a[0].is_cuda and a[1]["edges"][0].is_cuda and a[2] == b[2] and a[4] is None
        assert torch.equal(a[0].cpu(), b[0]) and torch.equal(a[1]["edges"][0].cpu(), b[1]["edges"][0])
        same_batch(a[3], b[3])
    with pytest.raises(ValueError, match="transform must return"):
        next(iter(NeighborLoader(placed(graph, place), [4], device="cuda", transform=lambda batch: object())))


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_a_huge_fanout_takes_no_more_memory_than_all_neighbours(place: str) -> None:
    graph = homogeneous()
    there = placed(graph, place)
    for options in ({}, {"disjoint": True}, {"weight_attr": "w"}, {"time_attr": "t"}, {"expand": "frontier"}):
        common: dict[str, Any] = {"batch_size": 32, "num_threads": 0, **options}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = next(iter(NeighborLoader(there, [10**8, 10**8], device="cuda", **common)))
        taken = torch.cuda.max_memory_allocated() - before
        assert taken < 200 << 20, (options, taken)
        same_batch(found, next(iter(NeighborLoader(graph, [10**8, 10**8], **common))))
