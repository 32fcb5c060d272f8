"""What the tests of changed modules share: a graph, seeded layers, and ways to change them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from gnnsys.nn import GINConv, SAGEConv
from tests.fullgraph.customised import WIDTH, draws, make_graph

GRAPH = make_graph()

N = GRAPH.num_nodes()

RANKS = torch.randint(2, (N,), generator=torch.Generator().manual_seed(7))

SEEDING = threading.Lock()  # ranks are threads, and torch has one generator


def seeded(*makers) -> list[nn.Module]:
    with SEEDING:
        torch.manual_seed(0)
        return [make().double() for make in makers]


def x() -> Tensor:
    return draws(N, WIDTH, seed=3)


def hooked(module: nn.Module, work=lambda _, __, out: 2 * out + 1) -> nn.Module:
    module.register_forward_hook(work)
    return module


def narrowing() -> list[nn.Module]:
    return seeded(lambda: SAGEConv(WIDTH, 4), nn.Tanh, lambda: SAGEConv(4, 3), nn.ELU)


def between() -> list[nn.Module]:
    inner = lambda: GINConv(nn.Linear(4, 4))  # noqa: E731
    layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.Dropout(0.5), inner, nn.Tanh, lambda: SAGEConv(4, 3))
    layers[4].requires_grad_(False)
    return layers


@torch.no_grad()
def write(tensor: Tensor) -> None:
    tensor.mul_(3).add_(1)
