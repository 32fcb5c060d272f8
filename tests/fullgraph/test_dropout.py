"""Dropout in a list of layers: one mask per step, layer and use, none in evaluation, whoever switches the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, Dropout, HybridParallel, Packing, Residual
from gnnsys.nn import GCN, SAGEConv
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.thread_ranks import run_ranks

N, WIDTH = 40, 16
GRAPH = random_graph(N, 150, 1)


def ones() -> Tensor:
    return torch.ones(N, WIDTH)


class Pass(nn.Module):
    """A graph layer that gives the nodes' own rows: what follows it shows its masks."""

    def forward(self, rows: Tensor, csc: object) -> Tensor:
        return rows[: csc.num_dst]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [SAGEConv(WIDTH, 8), nn.ReLU(), nn.Dropout(0.5), SAGEConv(8, 3)],
        lambda: [Residual(SAGEConv(WIDTH, WIDTH), nn.Dropout(0.5)), SAGEConv(WIDTH, 3)],
        lambda: [GCN(WIDTH, 8, 2, 3, dropout=0.5)],
    ],
    ids=["list", "residual", "reference model"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["the whole is switched", "its layers are switched"])
def test_evaluation_drops_nothing_and_training_does(make, whole):
    layers = nn.ModuleList(make())
    model = HybridParallel(layers, GRAPH)
    switched = model if whole else layers
    if not whole:
        model.eval()
    x = ones()
    for _ in range(2):
        switched.train()
        trained = model(x)
        switched.eval()
        assert torch.equal(model(x), model(x)) and not torch.equal(model(x), trained)


def test_evaluation_is_that_of_the_layers_without_dropout():
    torch.manual_seed(0)
    layers = [SAGEConv(WIDTH, 8), nn.Dropout(0.5), SAGEConv(8, 3)]
    layers = [layer.double() for layer in layers]
    model = HybridParallel(layers, GRAPH)
    model.eval()
    want = dense_forward([layers[0], layers[2]], ones().double(), adjacency(GRAPH))
    assert torch.allclose(model(ones().double()), want, rtol=0, atol=1e-12)


def test_every_use_of_dropout_has_a_mask_of_its_own():
    """Two layers' masks multiply: where both were one mask as many values would survive two as survive one."""
    shared = nn.Dropout(0.5)
    for layers in (
        [Pass(), nn.Dropout(0.5), Pass(), nn.Dropout(0.5)],
        [Pass(), nn.Dropout(0.5), nn.Dropout(0.5)],
        [Pass(), shared, Pass(), shared],
        [Pass(), shared, shared],
        [Sum(), Sum()],
    ):
        left = float((HybridParallel(layers, GRAPH)(ones()) != 0).float().mean())
        assert abs(left - 0.25) < 5 * (0.25 * 0.75 / (N * WIDTH)) ** 0.5, layers


class Sum(nn.Module):
    """A graph layer with a dropout of ours inside."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropout(0.5)

    def forward(self, rows: Tensor, csc: object) -> Tensor:
        return self.drop(rows[: csc.num_dst])  # type: ignore[attr-defined]


@pytest.mark.parametrize("recompute", [False, True])
def test_masks_inside_residuals_are_the_same_on_any_number_of_ranks_and_bins(recompute):
    torch.manual_seed(0)
    layers = [SAGEConv(WIDTH, 8), Residual(SAGEConv(8, 8), nn.Dropout(0.5)), nn.Dropout(0.2), SAGEConv(8, 3)]
    layers = [layer.double() for layer in layers]
    ranks = torch.arange(N) % 3

    def work(world_size):
        def inner(rank, group):
            model = HybridParallel(
                copy.deepcopy(layers), GRAPH, ranks=ranks % world_size, group=group, timeout=60, recompute=recompute,
                schedule=BinSchedule(packing=Packing(num_bins=2 * world_size)),
            )  # fmt: skip
            out = model(ones().double()[model.nodes])
            out.square().sum().backward()
            return model.nodes, out.detach(), [p.grad for p in model.parameters()]

        return inner

    ((_, want, grads),) = run_ranks(1, work(1))
    for nodes, out, found in run_ranks(3, work(3)):
        assert torch.allclose(out, want[nodes], rtol=0, atol=1e-12)
        for got, grad in zip(found, grads, strict=True):
            assert torch.allclose(got, grad, rtol=0, atol=1e-10 * float(grad.abs().max()))
