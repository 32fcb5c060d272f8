"""Full-graph training on a device gives what it gives on the CPU: rows on the device, or on the host and bins moved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import HybridParallel, Packing, Schedule
from gnnsys.nn import GATConv, GCNConv, SAGEConv
from tests.fullgraph.dense import random_graph
from tests.fullgraph.ranks import run_ranks
from tests.fullgraph.test_exact import close, random_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

N, WIDTH = 200, 12


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        SAGEConv(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), GCNConv(16, 8), nn.ReLU(),
        GATConv(8, 4, heads=2),
    ]  # fmt: skip


def train(rank, group, world_size, device, rows_on, **options):
    graph = random_graph(N, 1500, 1)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mine = [layer.double().to(device) for layer in copy.deepcopy(MODEL)]
    model = HybridParallel(mine, graph, ranks=random_ranks(world_size, N), group=group, timeout=60, seed=3, **options)
    own = x[model.nodes].to(rows_on).requires_grad_()
    out = model(own)
    out.square().sum().backward()
    return model.nodes, out.detach().cpu(), own.grad.cpu(), [p.grad.cpu() for layer in mine for p in layer.parameters()]


MODEL = layers() if torch.cuda.is_available() else []
OPTIONS = [
    {}, {"recompute": True}, {"schedule": Schedule(packing=Packing(num_bins=4))}, {"memory_budget": 200_000},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["one bin", "recompute", "four bins", "budget"])
@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_device_gives_what_the_cpu_gives(options, rows_on, world_size):
    want = run_ranks(world_size, lambda rank, group: train(rank, group, world_size, "cpu", "cpu"))
    found = run_ranks(world_size, lambda rank, group: train(rank, group, world_size, "cuda", rows_on, **options))
    for (nodes, out, x_grad, grads), expected in zip(found, want):
        assert torch.equal(nodes, expected[0])
        close(out, expected[1])
        close(x_grad, expected[2])
        largest = max(float(grad.abs().max()) for grad in expected[3])
        for got, grad in zip(grads, expected[3]):
            close(got, grad, at_least=1e-3 * largest)


def test_a_budget_of_device_memory_is_kept_within_five_percent():
    torch.manual_seed(1)
    graph = random_graph(20_000, 200_000, 5)
    x = torch.randn(20_000, 64)

    def peak(**options) -> tuple[int, float]:
        torch.manual_seed(0)
        mine = [SAGEConv(64, 64), nn.ReLU(), SAGEConv(64, 64), nn.ReLU(), SAGEConv(64, 8)]
        model = HybridParallel([layer.cuda() for layer in mine], graph, recompute=True, **options)
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).square().mean()
            loss.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, float(loss.detach())

    whole, loss = peak(schedule=Schedule(packing=Packing(num_bins=1)))
    for share in (2, 8):
        used, same = peak(memory_budget=whole // share)
        assert used <= 1.05 * (whole // share) and same == pytest.approx(loss, rel=1e-4)
