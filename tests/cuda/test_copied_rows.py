"""Labels of a pinned graph are read from a copy on the device, and are seen anew once a loader has been stopped."""

from __future__ import annotations

import pytest
import torch

from gnnsys import NeighborLoader
from gnnsys.graph import Graph
from gnnsys.store import CopiedRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NODES = 1 << 15


def graph() -> Graph:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(0, NODES, (2, 6 * NODES), generator=generator)
    rows = {"x": torch.rand(NODES, 20, generator=generator), "y": torch.arange(NODES)}
    return Graph.from_edge_index(edges, NODES, rows).pin_memory()


def test_labels_come_from_a_copy_and_rows_from_pinned_memory() -> None:
    pinned = graph()
    for num_threads in (0, 2):
        loader = NeighborLoader(pinned, [5, 5], batch_size=512, num_threads=num_threads, device="cuda")
        sources = {array.name: array.source for array in loader._fetch._own["node"]}
        assert isinstance(sources["y"], CopiedRows) and not isinstance(sources["x"], CopiedRows)
        for batch in loader:
            assert torch.equal(batch.y, batch.n_id) and torch.equal(
                batch.x.cpu(), pinned.node_data["node"]["x"][batch.n_id.cpu()]
            )
        loader.close()
        assert sources["y"]._device_bytes() == 0


def test_labels_that_were_written_between_two_epochs_are_seen() -> None:
    pinned = graph()
    labels = pinned.node_data["node"]["y"]
    loader = NeighborLoader(pinned, [5], batch_size=4096, across_epochs=False, device="cuda")
    for epoch in range(3):
        for batch in loader:
            assert torch.equal(batch.y, batch.n_id + epoch)
        labels.numpy()[:] += 1
    seen = loader(torch.arange(10))
    assert torch.equal(seen.y, seen.n_id + 3)
    torch.cuda.synchronize()
    labels.numpy()[:] += 1
    again = loader(torch.arange(10))
    assert torch.equal(again.y, again.n_id + 4)
