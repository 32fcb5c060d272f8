"""Batches that are sampled group by group on a GPU, or for one, are those of the host."""

import pytest
import torch

from gnnsys.graph import sbm
from gnnsys.loader import LinkNeighborLoader, NeighborLoader, PipelineOptions
from gnnsys.store import limited
from tests.cuda.places import placed, same_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GRAPH = sbm(20_000, avg_degree=10, num_features=64)
NODES = {"input_nodes": torch.arange(64 * 30), "batch_size": 64, "shuffle": True}
LINKS = {
    "edge_label_index": GRAPH.edge_index()[:, ::100],
    "batch_size": 64,
    "shuffle": True,
    "neg_sampling": "binary",
}


def _at(place):
    return GRAPH if place == "host" else placed(GRAPH, place)


@pytest.mark.parametrize("place", ["host", "device", "pinned"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("kind", "options"), [(NeighborLoader, NODES), (LinkNeighborLoader, LINKS)])
def test_groups_have_the_batches_of_the_host(place, num_threads, kind, options):
    here = kind(GRAPH, [5, 4], num_threads=0, **options)
    there = kind(
        _at(place), [5, 4], device="cuda", num_threads=num_threads, pipeline=PipelineOptions(group=7), **options
    )
    for _ in range(2):
        for ours, theirs in zip(there, here, strict=True):
            same_batch(ours, theirs)
    there.close()


def test_groups_keep_within_the_memory_of_the_device():
    graph = GRAPH.to("cuda")
    here = NeighborLoader(GRAPH, [5, 4], num_threads=0, **NODES)
    with limited("cuda", 4_000_000):
        there = NeighborLoader(graph, [5, 4], device="cuda", num_threads=2, pipeline=PipelineOptions(group=30), **NODES)
        for ours, theirs in zip(there, here, strict=True):
            same_batch(ours, theirs)
        assert there.counters()["sample"].waiting_most < 30
    there.close()
