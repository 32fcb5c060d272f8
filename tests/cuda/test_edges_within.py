"""Edges among chosen nodes on a device are those of the host, with trees and without."""

from __future__ import annotations

import pytest
import torch

from gnnsys.graph import EDGE, NODE
from gnnsys.sampling import ClusterSampler, NeighborSampler, SampleKey, cluster, edges_within, induced
from tests.sampling.machines import homogeneous, on_host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KEY = SampleKey(seed=3, epoch=1, batch=4)
SEEDS = torch.tensor([7, 11, 80, 3, 80, 119])


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
