"""Dense oracles of approximate training, in float64: layers whose neighbours' rows are mixed as a policy says.

`mix(m, rows)` stands for what the exact computation has as `m @ rows`: m is how much of each row goes to each node, and
rows are what travels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph import HybridParallel
from tests.fullgraph.dense import adjacency
from tests.fullgraph.test_exact import WIDTH, close, loss_of
from tests.fullgraph.thread_ranks import run_ranks

LR = 1e-3
Mix = Callable[[Tensor, Tensor], Tensor]


def sage(conv: Any, h: Tensor, a: Tensor, mix: Mix) -> Tensor:
    mean, weight = a / a.sum(1, keepdim=True).clamp(min=1), conv.lin_l.weight.t()
    return _either(mean, h, weight, mix) + conv.lin_l.bias + h @ conv.lin_r.weight.t()


def gcn(conv: Any, h: Tensor, a: Tensor, mix: Mix) -> Tensor:
    looped = a - torch.diag(a.diagonal()) + torch.eye(len(a), dtype=a.dtype)
    scale = looped.sum(1).pow(-0.5)
    return _either(scale[:, None] * looped * scale, h, conv.lin.weight.t(), mix) + conv.bias


def gin(conv: Any, h: Tensor, a: Tensor, mix: Mix) -> Tensor:
    return conv.nn((1 + conv.eps) * h + mix(a, h))


def _either(m: Tensor, h: Tensor, weight: Tensor, mix: Mix) -> Tensor:
    """Rows become narrower before they travel, where the layer makes them so."""
    return mix(m, h @ weight) if weight.shape[1] < weight.shape[0] else mix(m, h) @ weight


MIXED: dict[str, Callable[[Any, Tensor, Tensor, Mix], Tensor]] = {
    "SAGEConv": sage, "GCNConv": gcn, "GINConv": gin,
}  # fmt: skip


def same_rank(ranks: Tensor) -> Tensor:
    """[v, u]: 1 where both are on one rank."""
    return (ranks[:, None] == ranks).double()


def drawn(ranks: Tensor, rate: float, seen: Callable[[int], Tensor]) -> Tensor:
    """[v, u]: what a row of u counts for v; `seen(rank)` says of all nodes whether they are in its halo."""
    world_size = int(ranks.max()) + 1
    halo = torch.stack([seen(rank).double() for rank in range(world_size)])[ranks]
    same = same_rank(ranks)
    return same + (1 - same) * halo * (1 / rate if rate else 0.0)


def dense_sampled(layers: Sequence[nn.Module], x: Tensor, a: Tensor, counts: Tensor) -> Tensor:
    """Layers with row u at node v counted counts[v, u] times; degrees are those of `a`."""
    for layer in layers:
        conv = MIXED.get(type(layer).__name__)
        x = layer(x) if conv is None else conv(layer, x, a, lambda m, rows: (m * counts) @ rows)
    return x


class LateHalo:
    """Training whose neighbours on other ranks are those of the pass before, and their gradients too."""

    def __init__(self, ranks: Tensor, gamma: float = 0.0) -> None:
        self._same, self._gamma = same_rank(ranks), gamma
        self._rows: dict[int, Tensor] = {}  # by layer, what the next pass takes for others' rows
        self._grads: dict[int, Tensor] = {}

    def forward(self, layers: Sequence[nn.Module], x: Tensor, a: Tensor) -> tuple[Tensor, dict[int, Any]]:
        """The result, and of each layer the rows that travel and what others took for them."""
        used: dict[int, tuple[Tensor, Tensor]] = {}
        h = x
        for at, layer in enumerate(layers):
            conv = MIXED.get(type(layer).__name__)

            def mix(m: Tensor, rows: Tensor, at: int = at) -> Tensor:
                if rows is x or not rows.requires_grad:  # features, and what is the same in every pass
                    return m @ rows
                late = self._late(at, rows)
                late.retain_grad()
                used[at] = (rows, late)
                return (m * self._same) @ rows + (m * (1 - self._same)) @ late

            h = layer(h) if conv is None else conv(layer, h, a, mix)
        for at, (rows, _) in used.items():
            self._rows[at] = self._mean(self._rows.get(at), rows.detach())
        return h, used

    def backward(self, loss: Tensor, used: dict[int, Any]) -> None:
        """Gradients of the parameters, with those of others' rows as they were in the pass before."""
        late_part = [(rows * self._grads[at]).sum() for at, (rows, _) in used.items() if at in self._grads]
        sum(late_part, loss).backward()
        for at, (_, late) in used.items():
            self._grads[at] = self._mean(self._grads.get(at), late.grad)

    def _late(self, at: int, x: Tensor) -> Tensor:
        value = self._rows.get(at, x.detach())
        if at in self._grads:
            return value.clone().requires_grad_()
        return x + (value - x).detach()  # gradients of this pass go where they belong

    def _mean(self, before: Tensor | None, now: Tensor) -> Tensor:
        return now.clone() if before is None else self._gamma * before + (1 - self._gamma) * now


@dataclass
class Trained:
    """What a few passes gave, on one rank or on all: each pass's loss and gradients, and bytes sent."""

    losses: list[float]
    grads: list[list[Tensor | None]]
    x_grads: list[Tensor | None]
    num_bytes: list[int]
    nodes: Tensor


def inputs(graph: Any, width_out: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = graph.num_nodes()
    x = torch.randn(shape, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return x, torch.randn(shape, width_out, dtype=torch.float64, generator=generator).to(dtype)


def train(
    layers,
    graph,
    ranks,
    world_size,
    x,
    target,
    approximate,
    *,
    passes=3,
    x_grad=False,
    evaluate=False,
    run=run_ranks,
    **options,
) -> list[Trained]:  # fmt: skip
    """Passes of gradient descent on all ranks; with `evaluate`, the exact answer is checked between them."""
    a = adjacency(graph)

    def work(rank: int, group: Any) -> Trained:
        mine = copy.deepcopy(list(layers))
        model = HybridParallel(
            mine, graph, ranks=ranks, group=group, timeout=60, approximate=approximate, seed=11, **options
        )
        optimizer = torch.optim.SGD(model.parameters(), LR)
        out = Trained([], [], [], [], model.nodes)
        own = x[model.nodes].requires_grad_(x_grad)
        for _ in range(passes):
            if evaluate:
                check_evaluation(model, mine, own, x, a)
            optimizer.zero_grad()
            own.grad = None
            loss = loss_of(model(own), target[model.nodes])
            loss.backward()
            out.losses.append(model.total(loss.detach()))
            out.grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            out.x_grads.append(own.grad)
            out.num_bytes.append(model.times.num_bytes)
            optimizer.step()
        if evaluate:
            check_evaluation(model, mine, own, x, a)
        return out

    return run(world_size, work)


def check_evaluation(model, layers, own, x, a) -> None:
    """What the model says now, in eval mode and without gradients, is the exact answer of its layers."""
    want = dense_sampled([copy.deepcopy(layer).eval() for layer in layers], x, a, torch.ones_like(a))[model.nodes]
    model.eval()
    close(model(own).detach(), want.detach())
    model.train()
    with torch.no_grad():  # this one counts as a step of the model's, as every pass in training mode does
        step = int(model.step)
        close(model(own), want.detach())
        model.step.fill_(step)


def agree(found: list[Trained], losses, grads, x_grads=None, tolerance: float | None = None) -> None:
    """Every rank's passes against those of the oracle."""
    for each in found:
        for n, want in enumerate(losses):
            bound = 1e-10 if tolerance is None else tolerance
            assert abs(each.losses[n] - want) <= bound * abs(want), f"pass {n}"
            largest = max(float(grad.abs().max()) for grad in grads[n] if grad is not None)
            for got, exact in zip(each.grads[n], grads[n], strict=True):
                if tolerance is None:
                    close(got, exact, at_least=1e-3 * largest)
                else:
                    assert float((got - exact).abs().max()) <= tolerance * largest, f"pass {n}"
            if x_grads is not None:
                close(each.x_grads[n], x_grads[n][each.nodes])
