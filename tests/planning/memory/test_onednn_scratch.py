"""Convolutions and recurrent layers on the CPU: what oneDNN copies is counted, and not much more than that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnsys.planning import TrainingJob, estimate_memory
from gnnsys.planning.memory.trace import trace_steps, watch_steps
from tests.planning.memory.allocations import allocated_peak
from tests.support.grid import grid


def training(model: nn.Module, *shape: int) -> TrainingJob:
    torch.manual_seed(0)
    kind = next(model.parameters()).dtype

    def loss(model: nn.Module, graph) -> torch.Tensor:
        out = model(graph.x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return TrainingJob(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), rows=torch.randn(shape, dtype=kind), loss=loss
    )


MODELS = {
    "an LSTM": lambda: training(nn.LSTM(64, 128, batch_first=True), 32, 50, 64),
    "a short LSTM both ways": lambda: training(nn.LSTM(24, 40, num_layers=2, bidirectional=True), 30, 9, 24),
    "a GRU": lambda: training(nn.GRU(24, 40), 30, 9, 24),
    "one dimension": lambda: training(nn.Conv1d(32, 64, 5, padding=2), 16, 32, 200),
    "strides": lambda: training(
        nn.Sequential(nn.Conv1d(32, 64, 5), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 5, stride=2)), 16, 32, 200
    ),
    "channels that are no whole blocks": lambda: training(
        nn.Sequential(nn.Conv2d(20, 40, 3), nn.GroupNorm(4, 40), nn.Conv2d(40, 40, 3, groups=8)), 4, 20, 32, 32
    ),
    "a first layer": lambda: training(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1)), 4, 3, 40, 40),
    "transposed": lambda: training(nn.ConvTranspose2d(16, 16, 3), 4, 16, 32, 32),
    "float64, by columns": lambda: training(nn.Conv2d(8, 16, 3).double(), 4, 8, 32, 32),
    "norms": lambda: training(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.BatchNorm1d(64)), 500, 64),
}


@grid(make=MODELS)
def test_no_less_is_estimated_than_is_allocated_and_a_tenth_more_at_most(make):
    traced = trace_steps(make(), num_steps=2)
    taken = traced.start_bytes + allocated_peak(make())
    assert taken <= traced.peak()[0] <= 1.1 * taken, (traced.peak()[0], taken)


def test_a_real_run_under_watch_counts_it_too():
    make = MODELS["an LSTM"]
    assert watch_steps(make()).peak()[0] == trace_steps(make(), num_steps=2).peak()[0]


@pytest.mark.parametrize("make", [MODELS["an LSTM"], MODELS["one dimension"]], ids=["LSTM", "convolution"])
def test_on_a_device_their_workspace_is_said_to_be_unknown(make):
    found = estimate_memory(make, device="h200")
    assert "workspace is not told by: aten::" in found.table()
