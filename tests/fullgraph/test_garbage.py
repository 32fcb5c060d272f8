"""A pass that is over leaves nothing to Python's collector of cycles, which may be late: its rows fill the memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from gnnsys.nn import GATConv, SAGEConv
from tests.fullgraph.dense import random_graph

NUM_NODES = 1013
OPTIONS = {
    "one bin": {},
    "bins": {"schedule": BinSchedule(packing=Packing(num_bins=4))},
    "recompute": {"recompute": True},
    "budget": {"memory_budget": 2_000_000},
}


def rows_alive() -> int:
    """Tensors with a row per node that Python knows of."""
    return sum(type(o) is torch.Tensor and o.dim() == 2 and o.shape[0] == NUM_NODES for o in gc.get_objects())


@pytest.mark.parametrize("kind", OPTIONS)
def test_rows_of_a_pass_go_when_it_is_over(kind):
    layers = [SAGEConv(8, 16), nn.BatchNorm1d(16), nn.ReLU(), GATConv(16, 4, heads=2), nn.ReLU(), SAGEConv(8, 4)]
    model = HybridParallel(layers, random_graph(NUM_NODES, 5000, 1), **OPTIONS[kind])
    x = torch.randn(NUM_NODES, 8)

    def step() -> None:
        model(x).square().mean().backward()
        with torch.no_grad():
            model(x)

    step()
    gc.collect()
    before = rows_alive()
    gc.disable()
    try:
        step()
        assert rows_alive() == before
    finally:
        gc.enable()
