"""Loaders whose batches arrive on a device: of a graph there, a pinned one and one on the host, the same batches."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.graph import NODE, Graph
from gnnsys.loader import Batch, LinkNeighborLoader, NeighborLoader, PipelineOptions
from gnnsys.nn import GAT, GCN, GIN, GraphSAGE
from gnnsys.pipeline import Stage
from gnnsys.sampling import sample_from_blocks, sample_neighbors, to_block
from gnnsys.store import DeviceCache
from tests.cuda.places import CITES, WRITES, homogeneous, same_batch, typed
from tests.loader.sources import Source

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PLACES = ("device", "pinned", "host")


def placed(graph: Graph, place: str) -> Graph:
    return {"device": lambda: graph.to("cuda"), "pinned": graph.pin_memory, "host": lambda: graph}[place]()


def agree(kind: type, graph: Graph, place: str, num_batches: int, *args: Any, **options: Any) -> None:
    """The first batches, of as many epochs as that takes, of a loader on the device and of one on the host."""
    there = kind(placed(graph, place), *args, device="cuda", **options)
    here = kind(graph, *args, num_threads=0, **{k: v for k, v in options.items() if k != "num_threads"})
    left = num_batches
    while left:
        for a, b in zip(there, here, strict=True):
            same_batch(a, b)
            left -= 1
            if not left:
                break
    there.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weight": {"weight_attr": "w"},
    "node time": {"time_attr": "t"},
    "node time, last": {"time_attr": "t", "temporal_strategy": "last"},
    "edge time": {"time_attr": "et", "input_nodes": torch.arange(50), "input_time": torch.arange(50)},
    "frontier": {"expand": "frontier"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "some arrays": {"fetch": ["x", "kind"]},
    "a mask": {"input_nodes": "train_mask"},
    "few batches": {"drop_last": True, "input_nodes": torch.tensor([5, 5, 3] * 80, dtype=torch.int32)},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_gives_the_batches_of_the_host(place: str, case: str) -> None:
    options = {"batch_size": 64, "shuffle": True, "seed": 5, **OPTIONS[case]}
    agree(NeighborLoader, homogeneous(), place, 5, [6, 4], **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_threads_and_depth_change_nothing(place: str, num_threads: int, prefetch: int) -> None:
    options = {"batch_size": 64, "shuffle": True, "num_threads": num_threads, "prefetch": prefetch}
    agree(NeighborLoader, homogeneous(), place, 24, [6, 4], **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("expand", ["new", "frontier"])
def test_typed_graphs_give_the_batches_of_the_host(place: str, expand: str) -> None:
    agree(NeighborLoader, typed(), place, 5, [4, 3], input_nodes="paper", batch_size=32, expand=expand)


LINKS: dict[str, dict[str, Any]] = {
    "positives": {},
    "binary": {"neg_sampling": "binary"},
    "triplet": {"neg_sampling": ("triplet", 2)},
    "disjoint": {"neg_sampling": "binary", "disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "messages": {"exclude_supervision": False},
    "in time": {"time_attr": "t", "edge_label_time": torch.arange(9000) % 100, "neg_sampling": "binary"},
    "labelled": {"edge_label": torch.arange(9000) % 4, "neg_sampling": "binary"},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", LINKS)
def test_links_give_the_batches_of_the_host(place: str, case: str) -> None:
    options = {"batch_size": 128, "shuffle": True, **LINKS[case]}
    agree(LinkNeighborLoader, homogeneous(), place, 3, [4, 3], **options)


@pytest.mark.parametrize("place", PLACES)
def test_links_of_a_typed_graph_give_the_batches_of_the_host(place: str) -> None:
    agree(LinkNeighborLoader, typed(), place, 3, [4, 3], edge_label_index=WRITES, batch_size=64, neg_sampling="binary")
    agree(LinkNeighborLoader, typed(), place, 3, [4, 3], edge_label_index=CITES, batch_size=64, neg_sampling="triplet")


@pytest.mark.parametrize("place", PLACES)
def test_a_users_sampler_stage_and_transform_run_on_batches_where_they_are(place: str) -> None:
    def two_hops(graph: Any, seeds: dict[str, Tensor], key: Any) -> Any:
        nodes, blocks = seeds, []
        for hop in range(2):
            block, nodes = to_block(sample_neighbors(graph, nodes[NODE], 5, key=key, hop=hop))
            blocks.insert(0, block)
        return sample_from_blocks(graph, blocks, nodes, seeds)

    def double(sampled: Any) -> Any:
        sampled.rows[NODE]["x"] *= 2
        return sampled

    def add_sum(batch: Batch) -> Batch:
        batch.sums = batch.x.double().sum(dim=1).long()  # on a few numbers: any order of addition rounds down alike
        return batch

    stages = [Stage("double", double, threads=1, after="fetch")]
    agree(NeighborLoader, homogeneous(), place, 5, sampler=two_hops, batch_size=64, stages=stages)
    agree(NeighborLoader, homogeneous(), place, 5, [4, 3], batch_size=64, stages=stages, transform=add_sum)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_rows_may_be_anywhere(place: str) -> None:
    """On the device, pinned, pageable, or not contiguous, whatever the structure is."""
    graph = homogeneous()
    moved = placed(graph, place)
    rows = graph.node_data[NODE]["x"]
    for graph_ in (graph, moved):
        on_device = graph_ is moved
        graph_.set_node_data("there", rows.cuda() if on_device else rows)
        graph_.set_node_data("pinned", rows.pin_memory() if on_device else rows)
        graph_.set_node_data("pageable", rows.clone())
        graph_.set_node_data("strided", rows.repeat(1, 2)[:, ::2])
    there = NeighborLoader(moved, [5, 5], batch_size=100, device="cuda")
    for a, b in zip(there, NeighborLoader(graph, [5, 5], batch_size=100), strict=True):
        same_batch(a, b)


@pytest.mark.parametrize("place", PLACES)
def test_batches_stay_right_while_the_device_is_behind(place: str) -> None:
    """Memory of batches that were dropped is not given to others before the work that was queued on it is done."""
    graph = homogeneous(num_nodes=4000, num_edges=80000)
    options = {"batch_size": 256, "shuffle": True, "fetch": ["x"]}
    here = [batch.x.sum(dim=0, dtype=torch.float64) for batch in NeighborLoader(graph, [10, 10], **options)]
    sums = []
    weight = torch.rand(2048, 2048, device="cuda")
    for batch in NeighborLoader(placed(graph, place), [10, 10], device="cuda", **options):
        for _ in range(10):
            weight = (weight @ weight).clamp(-1, 1)  # the consumer's stream lags behind
        sums.append(batch.x.sum(dim=0, dtype=torch.float64))
        del batch
    for there, expected in zip(sums, here, strict=True):
        assert torch.allclose(there.cpu(), expected, rtol=1e-12)


@pytest.mark.parametrize("place", PLACES)
def test_batches_arrive_on_the_consumers_stream(place: str) -> None:
    graph = homogeneous()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        agree(NeighborLoader, graph, place, 5, [6, 4], batch_size=64)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_a_state_resumes_on_the_device_what_began_on_the_host(place: str) -> None:
    graph = homogeneous()
    options = {"batch_size": 64, "shuffle": True}
    here = NeighborLoader(graph, [5, 5], **options)
    batches = iter(here)
    for _ in range(3):
        next(batches)
    there = NeighborLoader(placed(graph, place), [5, 5], device="cuda", **options)
    there.load_state_dict(here.state_dict())
    for a, b in zip(there, batches, strict=True):
        same_batch(a, b)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_calling_a_loader_gives_the_batch_of_these_inputs(place: str) -> None:
    graph = homogeneous()
    there = NeighborLoader(placed(graph, place), [5, 5], device="cuda")
    same_batch(there([5, 9]), NeighborLoader(graph, [5, 5])([5, 9]))


def test_batches_are_where_the_graph_is() -> None:
    graph = homogeneous().to("cuda")
    assert next(iter(NeighborLoader(graph, [3], batch_size=8))).x.is_cuda
    with pytest.raises(ValueError, match="so are its batches"):
        NeighborLoader(graph, [3], device="cpu")


def test_what_was_sampled_on_the_device_is_not_copied_there() -> None:
    graph = homogeneous().pin_memory()
    loader = NeighborLoader(graph, [5, 5], batch_size=100, device="cuda")
    for _ in loader:
        pass
    seen = [record for record in loader.trace() if "copy" in record.stages]
    assert len(seen) >= len(loader)
    assert all(record.bytes["device"] == 8 * record.num_seeds for record in seen)  # input_id
    assert all(record.device.startswith("cuda") for record in seen)


def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    graph = homogeneous().to("cuda")
    loader = NeighborLoader(graph, [10, 10], batch_size=64, shuffle=True)

    def epochs(count: int) -> int:
        for _ in range(count):
            for batch in loader:
                batch.x.sum()
            del batch
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    before = epochs(2)
    assert epochs(5) < before + (32 << 20)
    loader.close()


def test_a_step_may_be_captured_while_batches_are_loaded() -> None:
    """Capture in this thread's mode: other threads go on allocating and waiting."""
    loader = NeighborLoader(homogeneous().to("cuda"), [10, 10], batch_size=64, shuffle=True)
    batches = iter(loader)
    rows = next(batches).x[:64].clone()
    weight = torch.rand(17, 17, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rows @ weight
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = rows @ weight
    for batch in batches:
        rows[: batch.batch_size].copy_(batch.x[: batch.batch_size])
        graph.replay()
        assert torch.allclose(out, rows @ weight)
    loader.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_stages_may_have_threads_of_their_own_on_the_device(depth: int) -> None:
    pipeline = PipelineOptions(threads={"sample": 1, "copy": 1}, depths={"sample": depth, "copy": 1})
    agree(NeighborLoader, homogeneous(), "device", 12, [6, 4], batch_size=64, pipeline=pipeline)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("behind", ["tensor", "source"])
def test_rows_come_through_a_cache_on_the_device(place: str, behind: str) -> None:
    graph = homogeneous()
    rows = graph.node_data[NODE]["x"]
    source = rows.pin_memory() if behind == "tensor" else Source(rows, mutable=False)
    cache = DeviceCache(source, torch.arange(0, 600, 2), "cuda")
    moved = placed(graph, place)
    moved.set_node_data("x", cache)
    here = NeighborLoader(homogeneous(), [5, 5], batch_size=64, shuffle=True)
    for a, b in zip(NeighborLoader(moved, [5, 5], batch_size=64, shuffle=True, device="cuda"), here, strict=True):
        same_batch(a, b)
    assert 0.2 < cache.counters().hit_rate < 0.8


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("case", ["plain", "disjoint", "weight", "node time", "frontier", "some arrays"])
def test_loading_waits_for_sizes_alone(place: str, case: str) -> None:
    """torch raises where anything but our own ops, which wait for their sizes, makes the host wait."""
    loader = NeighborLoader(placed(homogeneous(), place), [6, 4], batch_size=64, device="cuda", **OPTIONS[case])
    for _ in loader:
        pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in loader:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loader.close()


@pytest.mark.parametrize("model", [GraphSAGE, GCN, GAT, GIN])
@pytest.mark.parametrize("place", ["device", "pinned"])
def test_models_train_on_batches_as_they_do_on_the_host(model: Any, place: str) -> None:
    """By norm: where a value is next to zero, rounding decides what ReLU lets through."""
    graph = homogeneous()
    places = ((placed(graph, place), "cuda"), (graph, None))
    options = {"batch_size": 100, "shuffle": True, "seed": 2}
    torch.manual_seed(0)
    here = model(17, 16, 2, 9)
    there = copy.deepcopy(here).cuda()
    batches = (NeighborLoader(graph, [6, 4], device=device, **options) for graph, device in places)
    for a, b in zip(*batches, strict=True):
        for network, batch in ((there, a), (here, b)):
            hops = {} if model is GCN else {"num_sampled_nodes": batch.num_sampled_nodes}  # GCN is not trimmed
            out = network(batch.x, batch.edge_index, **hops)[: batch.batch_size]
            network.zero_grad()
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        for (name, p), q in zip(there.named_parameters(), here.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert (p.grad.cpu() - q.grad).norm() <= 1e-2 * q.grad.norm() + 1e-6, name


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_rows_that_are_still_being_computed_are_waited_for(num_threads: int) -> None:
    graph = homogeneous().to("cuda")
    rows = graph.node_data[NODE]["x"]
    expected = torch.rand_like(rows)
    loader = NeighborLoader(graph, [5, 5], batch_size=64, num_threads=num_threads, across_epochs=False)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        rows.copy_(expected)
        for batch in loader:
            assert torch.equal(batch.x, expected[batch.n_id])
        torch.cuda._sleep(200_000_000)
        rows.neg_()
        assert torch.equal(loader([1, 2]).x[:2], -expected[1:3])


def test_rows_on_the_device_need_batches_there() -> None:
    graph = homogeneous()
    graph.set_node_data("x", graph.node_data[NODE]["x"].cuda())
    with pytest.raises(ValueError, match="make the loader with device='cuda:0'"):
        NeighborLoader(graph, [5], batch_size=64)
