"""Too little device memory is torch.OutOfMemoryError that says how much was asked for; with memory again, all works.

Memory is taken away by the fraction that torch's allocator may have, so that nothing else on the device is disturbed.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GATConv, SAGEConv
from gnnsys.ops import (
    CSC,
    HopRelation,
    HopStructure,
    compact,
    degrees,
    dropout_rows,
    edge_softmax,
    find_edges,
    gat_aggregate,
    gather_rows,
    in_subgraph,
    sample_hops,
    sample_neighbors,
    sddmm,
    spmm,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIB = 1 << 20
LARGE = 1 << 20  # rows of 64 floats that take 256 MiB
SPARE = 32 * MIB
Call = Callable[[], object]


@pytest.fixture(autouse=True)
def give_back() -> None:
    """Blocks that earlier calls left in torch's cache: what is made in a part of one leaves the rest free for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def no_more_memory() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SPARE) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.synchronize()


def fan_out(num_dst: int) -> CSC:
    """An edge from node 0 to every destination."""
    return CSC(torch.arange(num_dst + 1), torch.zeros(num_dst, dtype=torch.int32), 1).to("cuda")


def fan_in(num_edges: int) -> CSC:
    return CSC(torch.tensor([0, num_edges]), torch.zeros(num_edges, dtype=torch.int32), 1).to("cuda")


def rows_of(size: int) -> Tensor:
    return torch.ones(size, 64, device="cuda")


def summing(reduce: str) -> Callable[[int], Call]:
    def make(size: int) -> Call:
        csc, x = fan_out(size), rows_of(1)
        return lambda: spmm(csc, x, reduce=reduce)

    return make


def gradient(reduce: str) -> Callable[[int], Call]:
    def make(num_src: int) -> Call:
        x = rows_of(num_src).requires_grad_()
        indices = torch.arange(num_src, dtype=torch.int32)
        csc = CSC(torch.tensor([0, num_src]), indices, num_src).to("cuda")
        out = spmm(csc, x, reduce=reduce)
        return lambda: torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)

    return make


def attention(size: int) -> Call:
    csc, x = fan_out(size), torch.ones(1, 1, 64, device="cuda")
    score_src, score_dst = torch.ones(1, 1, device="cuda"), torch.ones(size, 1, device="cuda")
    return lambda: gat_aggregate(csc, x, score_src, score_dst)


def softmax(num_edges: int) -> Call:
    csc, scores = fan_in(num_edges), torch.ones(num_edges, 32, device="cuda")
    return lambda: edge_softmax(csc, scores)


def dots(num_edges: int) -> Call:
    csc, x = fan_in(num_edges), torch.ones(1, 16, 1, device="cuda")
    return lambda: sddmm(csc, x, x)


def gathering(size: int) -> Call:
    index, x = torch.zeros(size, dtype=torch.int64, device="cuda"), rows_of(1)
    return lambda: gather_rows(x, index)


def dropout(size: int) -> Call:
    x, ids = rows_of(size), torch.arange(size, device="cuda")
    return lambda: dropout_rows(x, ids, 0.5, key=1)


def compaction(size: int) -> Call:
    ids = torch.arange(8, device="cuda").repeat(size)
    return lambda: compact([ids[:3]], [ids], [0])


def sampling(size: int) -> Call:
    csc, seeds = fan_in(100), torch.zeros(size, dtype=torch.int32, device="cuda")
    return lambda: sample_neighbors(csc, seeds, 32, key=3)


def all_hops(size: int) -> Call:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 1000, (2, 32 * 1000), generator=generator)
    csc, seeds = CSC.from_edge_index(edges, 1000).to("cuda"), torch.zeros(size, dtype=torch.int64)
    return lambda: sample_hops(HopStructure.of(csc), [seeds], [20], keys=[1], on=csc.indptr)


def typed_hops(size: int) -> Call:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 1000, (2, 32 * 1000), generator=generator)
    csc, seeds = CSC.from_edge_index(edges, 1000).to("cuda"), torch.zeros(size, dtype=torch.int64)
    structure = HopStructure([HopRelation(csc, 0, 1), HopRelation(csc, 1, 1), HopRelation(csc, 1, 0)], [1000, 1000])
    return lambda: sample_hops(structure, [seeds[:3], seeds], [10] * 6, keys=list(range(6)), on=csc.indptr)


def counting(num_nodes: int) -> Call:
    return lambda: degrees(torch.zeros(3, dtype=torch.int64, device="cuda"), num_nodes)


def cutting_out(size: int) -> Call:
    csc, nodes = fan_in(100), torch.zeros(size, dtype=torch.int32, device="cuda")
    return lambda: in_subgraph(csc, nodes)


def finding(size: int) -> Call:
    csc, ids = fan_in(100), torch.zeros(size, dtype=torch.int32, device="cuda")
    return lambda: find_edges(csc, ids, ids)


def transposing(size: int) -> Call:
    csc = fan_in(16 * size)
    return lambda: csc.transpose()


def layer(size: int) -> Call:
    conv, csc, x = SAGEConv(64, 128).cuda(), fan_out(size), rows_of(1)
    return lambda: conv((x, torch.ones(1, 64, device="cuda").expand(size, 64)), csc)


def attention_layer(size: int) -> Call:
    conv, csc = GATConv((64, 64), 64, heads=1, add_self_loops=False).cuda(), fan_out(size)
    return lambda: conv((rows_of(1), None), csc)


CASES: dict[str, Callable[[int], Call]] = {
    "spmm": summing("sum"),
    "spmm: mean": summing("mean"),
    "spmm: max": summing("max"),
    "spmm: backward": gradient("sum"),
    "spmm: backward of max": gradient("max"),
    "gat_aggregate": attention,
    "edge_softmax": softmax,
    "sddmm": dots,
    "gather_rows": gathering,
    "dropout_rows": dropout,
    "compact": compaction,
    "sample_neighbors": sampling,
    "sample_hops": all_hops,
    "sample_hops: types": typed_hops,
    "degrees": lambda size: counting(64 * size),
    "in_subgraph": cutting_out,
    "find_edges": finding,
    "transpose": transposing,
    "SAGEConv": layer,
    "GATConv": attention_layer,
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_or_layer_says_what_it_had_no_memory_for_and_works_afterwards(name: str):
    make = CASES[name]
    make(9)()  # its kernels are loaded
    torch.cuda.empty_cache()
    call = make(LARGE)
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError) as raised:
        call()
    message = str(raised.value)
    op = name.split(":")[0]
    if op[0].islower():  # in a layer a call of torch's own may be the first that finds none
        named = re.search(r"memory: gnnsys::(\w+) asked for (\d+) bytes .* on cuda:0, where \d+ of", message)
        assert named and named[1].startswith(op) and int(named[2]) > SPARE // 4, message
    assert "memory" in message and re.search(r"\d+ bytes|[GM]iB", message), message
    del raised
    call()
    make(9)()
    torch.cuda.synchronize()


def test_sizes_that_no_device_can_hold():
    ids = torch.tensor([0, 1], device="cuda")
    for num_nodes in (1 << 46, 1 << 61, (1 << 63) - 1):
        with pytest.raises(torch.OutOfMemoryError, match="gnnsys::degrees asked for"):
            torch.ops.gnnsys.degrees(ids, num_nodes)


@pytest.mark.parametrize("place", ["device", "pinned", "host"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_loader_that_found_no_memory_makes_the_same_batches_afterwards(place: str, num_threads: int):
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 20_000, (2, 400_000), generator=generator)
    here = Graph.from_edge_index(edges, 20_000, {"x": torch.rand(20_000, 1024, generator=generator)})
    graph = {"device": lambda: here.to("cuda"), "pinned": here.pin_memory, "host": lambda: here}[place]()
    options = {"input_nodes": torch.arange(20_000), "batch_size": 10_000}
    loader = NeighborLoader(graph, [10, 10], device="cuda", num_threads=num_threads, **options)
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError, match="memory") as raised:
        for _ in loader:
            pass
    del raised
    expected = list(NeighborLoader(here, [10, 10], num_threads=0, **options))
    got = list(loader)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.n_id.cpu(), theirs.n_id) and torch.equal(mine.x.cpu(), theirs.x)
    loader.close()


def test_a_backward_pass_that_found_no_memory_can_be_made_again():
    """In torch's own thread of the device."""
    x = rows_of(LARGE).requires_grad_()
    csc = CSC(torch.tensor([0, LARGE]), torch.arange(LARGE, dtype=torch.int32), LARGE).to("cuda")
    loss = spmm(csc, x, reduce="mean").sum()
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError, match=r"gnnsys::spmm asked for \d+ bytes") as raised:
        loss.backward(retain_graph=True)
    del raised
    loss.backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.full_like(x, 1 / LARGE))


def test_a_compiled_model_raises_the_same():
    csc, x = fan_out(LARGE), rows_of(1)
    compiled = torch.compile(lambda x: spmm(csc, x), fullgraph=True)
    assert compiled(x).shape == (LARGE, 64)
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError, match="gnnsys::spmm asked for") as raised:
        compiled(x)
    del raised
    assert compiled(x).shape == (LARGE, 64)
