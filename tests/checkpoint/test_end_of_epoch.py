"""A checkpoint of an epoch's last step resumes at the end of that epoch: no batch, then what the script does there.

The epoch is not skipped, because what a script does at its end (a scheduler's step) would be lost. All loaders do the
same, and say so.
"""

from __future__ import annotations

import dgl
import torch
from torch_geometric.data import Data

import gnnsys
import gnnsys.dgl
import gnnsys.pyg
from tests.support.grid import grid

NUM_NODES, EPOCHS = 12, 3
EDGES = torch.stack([torch.arange(NUM_NODES), (torch.arange(NUM_NODES) + 1) % NUM_NODES])
GRAPH = gnnsys.Graph.from_edge_index(EDGES, NUM_NODES)
DATA = Data(edge_index=EDGES, num_nodes=NUM_NODES)
SEEDS = torch.arange(NUM_NODES)


def of_pyg(**options):
    return gnnsys.pyg.NeighborLoader(DATA, [2], input_nodes=SEEDS, batch_size=5, shuffle=True, **options)


def of_dgl():
    graph = dgl.graph((EDGES[0], EDGES[1]), num_nodes=NUM_NODES)
    return gnnsys.dgl.DataLoader(graph, SEEDS, gnnsys.dgl.NeighborSampler([2]), batch_size=5, shuffle=True, seed=3)


LOADERS = {
    "nodes": lambda: gnnsys.NeighborLoader(GRAPH, [2], input_nodes=SEEDS, batch_size=5, shuffle=True),
    "one epoch at a time": lambda: gnnsys.NeighborLoader(
        GRAPH, [2], input_nodes=SEEDS, batch_size=5, shuffle=True, across_epochs=False, num_threads=0
    ),
    "links": lambda: gnnsys.LinkNeighborLoader(GRAPH, [2], edge_label_index=EDGES, batch_size=5, shuffle=True),
    "pyg": lambda: of_pyg(seed=3),
    "pyg, torch's generator": lambda: of_pyg(generator=torch.Generator().manual_seed(3)),
    "pyg, workers": lambda: of_pyg(seed=3, num_workers=1, persistent_workers=True),
    "dgl": of_dgl,
}


def seeds_of(batch) -> list[int]:
    if isinstance(batch, tuple):
        return batch[1].tolist()
    return batch.input_id.tolist()


@grid(make=LOADERS, at=[1, EPOCHS - 1])
def test_every_loader_goes_on_with_the_end_of_the_epoch_and_says_so(make, at, logged):
    unbroken, state = {}, None
    loader = make()
    for epoch in range(EPOCHS):
        unbroken[epoch] = []
        for batch in loader:
            unbroken[epoch].append(seeds_of(batch))
            if (epoch, len(unbroken[epoch])) == (at, len(loader)):
                state, generator = loader.state_dict(), torch.get_rng_state()
    torch.set_rng_state(generator)  # torch's own, which PyG's order is drawn by, a checkpoint has too
    resumed = make()
    resumed.load_state_dict(state)
    logged.clear()
    epochs = {epoch: [seeds_of(batch) for batch in resumed] for epoch in range(resumed.epoch, EPOCHS)}
    assert epochs == {at: [], **{epoch: unbroken[epoch] for epoch in range(at + 1, EPOCHS)}}
    (record,) = logged
    assert f"resumed after the last batch of epoch {at}" in record.getMessage()
    if hasattr(resumed, "close"):
        resumed.close()


def test_a_resume_in_the_middle_of_an_epoch_or_between_two_says_nothing(logged):
    loader = LOADERS["nodes"]()
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    states = [*states[:-1], loader.state_dict()]
    for state in states:
        resumed = LOADERS["nodes"]()
        resumed.load_state_dict(state)
        assert list(resumed)
        resumed.close()
    assert not logged
