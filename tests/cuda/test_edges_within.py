"""Edges among chosen nodes on a device are those of the host, with trees and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE
from gnnsys.ops import CSC
from gnnsys.ops import edges_within as csc_edges_within
from gnnsys.sampling import ClusterSampler, NeighborSampler, SampleKey, cluster, edges_within, induced
from tests.cuda.test_sampling import HEAVY, NUM_NODES, on_device
from tests.cuda.test_sampling import graph as skewed
from tests.sampling.machines import homogeneous, on_host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KEY = SampleKey(seed=3, epoch=1, batch=4)
SEEDS = torch.tensor([7, 11, 80, 3, 80, 119])
DTYPES = [torch.int32, torch.int64]


def check(csc: CSC, dst: Tensor, src: Tensor, pinned: bool = False, **options: Tensor) -> int:
    """On both; returns how many edges there are."""
    expected = csc_edges_within(csc, dst, src, **options)
    moved = {name: rows.cuda() for name, rows in options.items()}
    got = csc_edges_within(on_device(csc, pinned), dst.cuda(), src.cuda(), **moved)
    for name, mine, reference in zip(got._fields, got, expected, strict=True):
        assert mine.is_cuda and mine.dtype == reference.dtype and torch.equal(mine.cpu(), reference), name
    return expected.places.numel()


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("dst_dtype", DTYPES, ids=["int32 dst", "int64 dst"])
@pytest.mark.parametrize("src_dtype", DTYPES, ids=["int32 src", "int64 src"])
def test_the_op_finds_what_the_cpu_finds(pinned: bool, dtype, dst_dtype, src_dtype) -> None:
    """A giant row, nodes that repeat, places that nobody has, edges that are left out, trees."""
    csc, g, found = skewed(dtype, seed=6), torch.Generator().manual_seed(1), 0
    for num_dst, num_src in ((0, 5), (5, 0), (1, 1), (40, 300), (900, 900)):
        dst = torch.randint(0, NUM_NODES, (num_dst,), generator=g).to(dst_dtype)
        dst[num_dst // 2 : num_dst // 2 + 1] = HEAVY
        src = torch.randint(-20, NUM_NODES, (num_src,), generator=g).to(src_dtype)
        exclude = torch.randperm(csc.num_edges, generator=g)[:4000].sort().values
        trees = {"dst_tree": torch.randint(0, 5, (num_dst,), generator=g)}
        trees["src_tree"] = torch.randint(0, 5, (num_src,), generator=g)
        for options in ({}, {"exclude": exclude}, trees, {"exclude": exclude.repeat_interleave(2), **trees}):
            found += check(csc, dst, src, pinned, **options)
    assert found > 10_000


BAD: dict[str, dict[str, Any]] = {
    "dst": {"dst": torch.tensor([0, NUM_NODES])},
    "dst_tree": {"dst_tree": torch.tensor([0, -1]), "src_tree": torch.tensor([0, 0])},
    "src_tree": {"dst_tree": torch.tensor([0, 0]), "src_tree": torch.tensor([0, 1 << 23])},
    "one tree": {"dst_tree": torch.tensor([0, 0])},
    "src": {"src": torch.tensor([1, 1 << 41])},
    "exclude": {"exclude": torch.tensor([3, 1])},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_in_the_cpus_words(case: str) -> None:
    csc = skewed(torch.int64, seed=6)
    arguments = {"dst": torch.tensor([0, HEAVY]), "src": torch.tensor([1, 2]), **BAD[case]}
    with pytest.raises(ValueError) as expected:
        csc_edges_within(csc, **arguments)
    with pytest.raises(ValueError) as got:
        csc_edges_within(on_device(csc, False), **{name: rows.cuda() for name, rows in arguments.items()})
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize("disjoint", [False, True])
def test_induced_samples_are_those_of_the_host(disjoint: bool) -> None:
    graph = homogeneous()
    there = graph.to("cuda")
    expected = induced(NeighborSampler(graph, [4, 3], disjoint=disjoint).sample({NODE: SEEDS}, key=KEY), graph)
    found = NeighborSampler(there, [4, 3], disjoint=disjoint).sample({NODE: SEEDS}, key=KEY)
    found = on_host(induced(found, there))
    assert expected.row[EDGE].numel() > 50
    for name in ("row", "col", "edge"):
        assert torch.equal(getattr(found, name)[EDGE], getattr(expected, name)[EDGE]), name


def test_edges_into_some_nodes_from_others_are_those_of_the_host() -> None:
    graph = homogeneous()
    dst, src = torch.arange(0, 100), torch.arange(40, 80)
    expected, found = edges_within(graph, dst, src), edges_within(graph.to("cuda"), dst.cuda(), src.cuda())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found[:3], expected[:3], strict=True))


def test_batches_of_clusters_are_those_of_the_host() -> None:
    graph = homogeneous()
    cut, inputs = cluster(graph, 8), torch.tensor([3, 0, 6])
    expected = ClusterSampler(graph, cut).sample(inputs, key=KEY)
    found = on_host(ClusterSampler(graph.to("cuda"), cut).sample(inputs, key=KEY))
    assert torch.equal(found.node[NODE], expected.node[NODE]) and torch.equal(found.row[EDGE], expected.row[EDGE])
    assert torch.equal(found.col[EDGE], expected.col[EDGE]) and torch.equal(found.edge[EDGE], expected.edge[EDGE])
