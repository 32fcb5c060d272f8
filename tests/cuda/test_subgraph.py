"""Parts of a CSC on the device: bit for bit what the CPU kernels give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, in_subgraph, induced_subgraph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NUM_NODES = 900
DTYPES = [torch.int32, torch.int64]


def graph(dtype: torch.dtype, seed: int) -> CSC:
    """Empty rows, and one row that is longer than the others together."""
    g = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, 12, (NUM_NODES,), generator=g)
    degree[17] = 12_000
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    return CSC(indptr, torch.randint(0, NUM_NODES, (int(indptr[-1]),), generator=g).to(dtype), NUM_NODES)


def on_device(csc: CSC, pinned: bool = False) -> CSC:
    if pinned:
        return CSC(csc.indptr.pin_memory(), csc.indices.pin_memory(), csc.num_src)
    return CSC(csc.indptr.cuda(), csc.indices.cuda(), csc.num_src)


def assert_same(got: CSC, expected: CSC) -> None:
    pairs = [(got.indptr, expected.indptr), (got.indices, expected.indices), (got.edge_ids, expected.edge_ids)]
    for mine, reference in pairs:
        assert isinstance(mine, Tensor) and isinstance(reference, Tensor)
        assert mine.is_cuda and mine.dtype == reference.dtype
        assert torch.equal(mine.cpu(), reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("node_dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, 700, 5000])
def test_in_subgraph_is_the_cpus(dtype: torch.dtype, node_dtype: torch.dtype, size: int) -> None:
    csc = graph(dtype, seed=1)
    nodes = torch.randint(0, NUM_NODES, (size,), generator=torch.Generator().manual_seed(size)).to(node_dtype)
    nodes[size // 2 : size // 2 + 1] = 17
    expected = in_subgraph(csc, nodes)
    assert_same(in_subgraph(on_device(csc), nodes.cuda()), expected)
    assert_same(in_subgraph(on_device(csc, pinned=True), nodes.cuda()), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("node_dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, 700, 2000])
def test_induced_subgraph_is_the_cpus_with_repeated_nodes(
    dtype: torch.dtype, node_dtype: torch.dtype, size: int
) -> None:
    csc = graph(dtype, seed=2)
    nodes = torch.randint(0, NUM_NODES, (size,), generator=torch.Generator().manual_seed(size)).to(node_dtype)
    nodes[size // 2 : size // 2 + 1] = 17
    expected = induced_subgraph(csc, nodes)
    assert_same(induced_subgraph(on_device(csc), nodes.cuda()), expected)
    assert_same(induced_subgraph(on_device(csc, pinned=True), nodes.cuda()), expected)


def test_sources_are_looked_up_in_their_own_list() -> None:
    csc = graph(torch.int64, seed=3)
    g = torch.Generator().manual_seed(3)
    nodes = torch.randint(0, NUM_NODES, (200,), generator=g)
    for num_sources in (0, 1, 300):
        sources = torch.randint(0, NUM_NODES, (num_sources,), generator=g)
        sources[:1] = 1 << 40  # an id that the graph does not have
        got = induced_subgraph(on_device(csc), nodes.cuda(), sources.cuda())
        assert_same(got, induced_subgraph(csc, nodes, sources))


@pytest.mark.parametrize("op", [in_subgraph, induced_subgraph], ids=["in", "induced"])
@pytest.mark.parametrize("nodes", [[0, NUM_NODES], [3, -1]])
def test_nodes_out_of_range_are_refused_in_the_cpus_words(op, nodes: list[int]) -> None:
    csc = graph(torch.int64, seed=4)
    with pytest.raises(ValueError) as expected:
        op(csc, torch.tensor(nodes))
    with pytest.raises(ValueError) as got:
        op(on_device(csc), torch.tensor(nodes).cuda())
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize("op", [in_subgraph, induced_subgraph], ids=["in", "induced"])
@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
def test_an_indptr_that_does_not_ascend_is_refused_in_the_cpus_words(op, pinned: bool) -> None:
    csc = CSC(torch.tensor([0, 4, 2, 4]), torch.arange(4), 4)
    with pytest.raises(ValueError) as expected:
        op(csc, torch.tensor([0, 1]))
    with pytest.raises(ValueError) as got:
        op(on_device(csc, pinned), torch.tensor([0, 1]).cuda())
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_a_negative_source_is_refused() -> None:
    csc = on_device(graph(torch.int64, seed=5))
    with pytest.raises(ValueError, match=r"src_nodes must be in \[0, 9223372036854775807\), got -3 at position 1"):
        induced_subgraph(csc, torch.tensor([0]).cuda(), torch.tensor([4, -3]).cuda())
