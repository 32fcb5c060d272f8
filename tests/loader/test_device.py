"""Batches on an accelerator: the copy stage. Runs where there is one."""

from __future__ import annotations

import pytest
import torch

from gnnsys.graph import Graph
from gnnsys.loader import NeighborLoader

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


@pytest.fixture(scope="module")
def graph() -> Graph:
    edge_index = torch.randint(5000, (2, 60000), generator=torch.Generator().manual_seed(0))
    return Graph.from_edge_index(edge_index, 5000, {"x": torch.arange(5000).float()[:, None].repeat(1, 256)})


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_batches_arrive_on_the_device_with_the_content_they_had(graph: Graph, num_threads: int) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    options = {"batch_size": 256, "shuffle": True, "num_threads": num_threads}
    on_host = NeighborLoader(graph, [10, 5], **options)
    for _ in range(3):  # buffers are used again, streams are reused: content must stay right
        for there, here in zip(NeighborLoader(graph, [10, 5], device=device.type, **options), on_host, strict=True):
            assert there.x.device.type == there.edge_index.device.type == device.type
            loss = (there.x * 2).sum(dim=1)  # work on the consumer's stream right away
            assert torch.equal(loss.cpu(), (here.x * 2).sum(dim=1))
            assert torch.equal(there.edge_index.cpu(), here.edge_index)
            assert there.batch_size == here.batch_size
        on_host = NeighborLoader(graph, [10, 5], **options)


def test_blocks_travel_with_the_batch(graph: Graph) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    batch = next(iter(NeighborLoader(graph, [10, 5], batch_size=64, expand="frontier", device=device.type)))
    csc = next(iter(batch.blocks[0].csc.values()))
    assert csc.indices.device.type == device.type
    assert csc.num_edges == int(csc.indptr[-1])
