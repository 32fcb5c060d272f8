"""Structure ops on the device against the CPU's: the same arrays, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, bfs_order, bucket_ids, degrees, expand_indptr
from gnnsys.ops._library import native

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZES = [
    (1, 1, 0),
    (5, 0, 0),
    (0, 7, 0),
    (1, 1, 3),
    (7, 5, 40),
    (2, 3, 1024),
    (256, 255, 1025),
    (257, 1, 70_000),  # one giant row
    (300, 2000, 50_000),
    (70_001, 1009, 200_000),
    (3, 150_000, 300_000),
]
DTYPES = [torch.int32, torch.int64]


def random_edges(num_src: int, num_dst: int, num_edges: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Squared uniforms: low ids are hubs, high ids mostly have no edge."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(2, num_edges, generator=generator, dtype=torch.float64) ** 2
    return (unit * torch.tensor([[num_src], [num_dst]])).to(dtype)


def assert_same(ours: CSC, theirs: CSC) -> None:
    assert ours.num_src == theirs.num_src and ours.device.type == "cuda"
    pairs = [(ours.indptr, theirs.indptr), (ours.indices, theirs.indices)]
    assert (ours.edge_ids is None) == (theirs.edge_ids is None)
    if ours.edge_ids is not None and theirs.edge_ids is not None:
        pairs.append((ours.edge_ids, theirs.edge_ids))
    for mine, expected in pairs:
        assert mine.dtype == expected.dtype and torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_src,num_dst,num_edges", SIZES)
def test_coo_to_csc_is_the_cpus(num_src, num_dst, num_edges, dtype, narrow):
    edges = random_edges(num_src, num_dst, num_edges, dtype, seed=num_edges)
    for given in (edges, edges[:, edges[1].sort(stable=True).indices]):  # and sorted by destination
        theirs = CSC.from_edge_index(given, num_src, num_dst, narrow=narrow)
        assert_same(CSC.from_edge_index(given.cuda(), num_src, num_dst, narrow=narrow), theirs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_src,num_dst,num_edges", SIZES)
def test_transpose_is_the_cpus(num_src, num_dst, num_edges, dtype, seed):
    csc = CSC.from_edge_index(random_edges(num_src, num_dst, num_edges, dtype, seed), num_src, num_dst)
    ours = csc.to("cuda")
    assert_same(ours.transpose(), csc.transpose())
    assert ours.transpose() is ours.transpose()
    assert torch.equal(ours.dst().cpu(), csc.dst())
    assert torch.equal(ours.in_degrees().cpu(), csc.in_degrees())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_transpose(dtype):
    csc = CSC.from_edge_index(random_edges(200_000, 300_000, 2_000_000, dtype), 200_000, 300_000)
    assert_same(csc.to("cuda").transpose(), csc.transpose())


def test_transposing_can_be_captured_in_a_graph_and_replayed_on_other_edges():
    first, second = (
        CSC.from_edge_index(random_edges(900, 700, 40_000, torch.int64, seed).sort(1).values, 900, 700)
        for seed in range(2)
    )
    ours = first.to("cuda")
    native.transpose(ours.indptr, ours.indices, 900)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indptr, indices, positions = native.transpose(ours.indptr, ours.indices, 900)
    ours.indptr.copy_(second.indptr)
    ours.indices.copy_(second.indices)
    graph.replay()
    assert_same(CSC(indptr, indices, 700, positions), second.transpose())


def test_narrow_keeps_int64_where_node_ids_do_not_fit():
    edges = torch.tensor([[2**31, 5, 7], [1, 0, 1]]).cuda()
    assert CSC.from_edge_index(edges, 2**31 + 1, 2, narrow=True).indices.tolist() == [5, 2**31, 7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("row,name", [(0, "src"), (1, "dst")])
def test_an_index_out_of_range_names_the_argument_and_the_first_position(row, name, bad, dtype):
    edges = random_edges(10, 10, 40_000, dtype)
    edges[row, 39_990] = bad
    edges[row, 39_995] = bad
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 10\), got {bad} at position 39990"):
        CSC.from_edge_index(edges.cuda(), 10)


def test_malformed_edge_indices_are_refused():
    with pytest.raises(ValueError, match="int64 or int32"):
        CSC.from_edge_index(torch.zeros(2, 4).cuda(), 4)
    with pytest.raises(ValueError, match="num_src and num_dst"):
        CSC.from_edge_index(torch.zeros(2, 0, dtype=torch.int64).cuda(), -1)
    with pytest.raises(ValueError, match="equally long"):
        native.coo_to_csc(torch.zeros(3, dtype=torch.int64).cuda(), torch.zeros(4, dtype=torch.int64).cuda(), 4, 4)
    with pytest.raises(ValueError, match="one dtype"):
        native.coo_to_csc(torch.zeros(3, dtype=torch.int64).cuda(), torch.zeros(3, dtype=torch.int32).cuda(), 4, 4)
    with pytest.raises(ValueError, match="dst must be on cuda"):
        native.coo_to_csc(torch.zeros(3, dtype=torch.int64).cuda(), torch.zeros(3, dtype=torch.int64), 4, 4)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(
    "indptr,indices,message",
    [
        ([0, 2, 1, 3], [0, 1, 2], "indptr must never decrease, got 2 then 1 at position 2"),
        ([0, 9, 1, 3], [0, 1, 2], "indptr must never decrease, got 9 then 1 at position 2"),
        ([1, 2, 3, 3], [0, 1, 2], "from 0"),
        ([0, 1, 2, 4], [0, 1, 2], "got 0 to 4"),
        ([0, 1, 2, 3], [0, 1, 4], r"indices must be in \[0, 4\), got 4 at position 2"),
        ([0, 1, 2, 3], [-1, 1, 9], r"indices must be in \[0, 4\), got -1 at position 0"),
        ([], [], "none"),
    ],
)
def test_a_broken_csc_is_refused_by_validate(indptr, indices, message, pinned):
    rows = torch.tensor(indices, dtype=torch.int32)
    csc = CSC(torch.tensor(indptr, dtype=torch.int64).cuda(), rows.pin_memory() if pinned else rows.cuda(), 4)
    with pytest.raises(ValueError, match=message):
        csc.validate()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_src,num_dst,num_edges", SIZES)
def test_a_sound_csc_is_validated(num_src, num_dst, num_edges, dtype):
    csc = CSC.from_edge_index(random_edges(num_src, num_dst, num_edges, dtype).cuda(), num_src, num_dst)
    assert csc.validate() is csc


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_nodes,num_ids", [(0, 0), (5, 0), (1, 9), (1000, 400_000), (500_000, 200_000)])
def test_degrees_count_occurrences(num_nodes, num_ids, dtype):
    ids = random_edges(num_nodes, num_nodes, num_ids, dtype)[0]
    assert torch.equal(degrees(ids.cuda(), num_nodes).cpu(), degrees(ids, num_nodes))


@pytest.mark.parametrize(
    "counts", [[], [0], [3], [0, 0, 5, 0, 0], [1] * 3000, [0, 5000, 0, 1, 0] * 40, [0] * 5000 + [2]]
)
def test_expand_indptr_writes_every_entry(counts):
    indptr = torch.tensor([0, *counts]).cumsum(0)
    expected = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)) + 5
    whole = torch.full((expected.numel() + 2,), -9, device="cuda")
    for given in (indptr.cuda(), indptr.pin_memory()):
        out = expand_indptr(given, 5, whole[1:-1].fill_(-9))
        assert torch.equal(out.cpu(), expected)
        assert whole[0] == -9 and whole[-1] == -9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ids", [0, 1, 1000, 70_000])
@pytest.mark.parametrize("num_more", [0, 90, 700])
@pytest.mark.parametrize("on_host", [False, True])
def test_ids_are_grouped_by_owner_in_their_own_order(dtype, num_ids, num_more, on_host):
    bounds = torch.tensor([0, 0, 40, 40, 100, 1000, 1000])  # with empty buckets first, in the middle and last
    bounds = torch.cat([bounds, 1000 + torch.arange(num_more)])
    high = int(bounds[-1])
    ids = torch.randint(high, (num_ids,), dtype=dtype, generator=torch.Generator().manual_seed(num_ids))
    for ours, expected in zip(
        bucket_ids(ids.cuda(), bounds if on_host else bounds.cuda()), bucket_ids(ids, bounds), strict=True
    ):
        assert ours.is_cuda and ours.dtype == expected.dtype and torch.equal(ours.cpu(), expected)


def test_one_bucket_and_bounds_beyond_what_ids_reach():
    ids = torch.tensor([5, 2**31 - 1, 0], dtype=torch.int32)
    for bounds in (torch.tensor([0, 2**31]), torch.tensor([0, 7, 2**32, 2**33])):
        for ours, expected in zip(bucket_ids(ids.cuda(), bounds), bucket_ids(ids, bounds), strict=True):
            assert torch.equal(ours.cpu(), expected)


def test_bounds_on_the_host_must_ascend_from_zero():
    for bounds in ([0], [1, 5], [0, 5, 3]):
        with pytest.raises(ValueError, match="bounds must"):
            bucket_ids(torch.tensor([0]).cuda(), torch.tensor(bounds))


def test_a_csc_moves_with_its_transpose_and_finds_edge_ids_only_when_asked():
    calls = []

    def edge_ids() -> Tensor:
        calls.append(1)
        return torch.arange(60)

    csc = CSC.from_edge_index(random_edges(13, 9, 60, torch.int64), 13, 9)
    csc = CSC(csc.indptr, csc.indices, 13, edge_ids)
    turned = csc.transpose()
    ours = csc.to("cuda", non_blocking=True)
    assert ours.to("cuda") is ours and csc.to("cpu") is csc and not calls
    assert ours._transposed is not None
    assert_same(ours.transpose(), turned)
    assert ours.edge_ids is not None and ours.edge_ids.is_cuda and calls == [1]
    back = ours.to("cpu")
    assert back.device.type == "cpu" and torch.equal(back.transpose().indices, turned.indices)


def test_a_pinned_csc_is_read_by_the_device_where_it_is():
    csc = CSC.from_edge_index(random_edges(50, 40, 600, torch.int32), 50, 40)
    csc.transpose()
    pinned = csc.pin_memory()
    assert pinned.pin_memory() is pinned
    for part in (pinned, pinned.transpose()):
        assert part.indptr.is_pinned() and part.indices.is_pinned()
    assert torch.equal(pinned.indices, csc.indices) and pinned.edge_ids is not None and pinned.edge_ids.is_pinned()


def test_an_order_by_breadth_is_for_the_cpu():
    csc = CSC.from_edge_index(random_edges(9, 9, 30, torch.int64), 9)
    with pytest.raises(ValueError, match="runs on the CPU"):
        bfs_order(csc.to("cuda"), torch.tensor([0]))
