"""Hooks on parameters see the whole gradient, once, whatever bins and ranks made it of."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gnnsys.fullgraph import HybridParallel
from tests.fullgraph.changed import GRAPH, RANKS, narrowing, x
from tests.fullgraph.customised import bins
from tests.fullgraph.thread_ranks import run_ranks

HOOKS_OF_PARAMETERS = {
    "doubles": lambda grad: 2 * grad,
    "clamps": lambda grad: grad.clamp(-0.5, 0.5),
    "normalises": lambda grad: grad / grad.norm(),
}


def test_hooks_on_parameters_see_the_whole_gradient_once():
    for name, hook in HOOKS_OF_PARAMETERS.items():
        for options in ({}, bins(3), {"recompute": True}, {"memory_budget": 1 << 15}):
            seen: list[Tensor] = []
            layers, plain = nn.ModuleList(narrowing()), nn.ModuleList(narrowing())
            for p in (*layers.parameters(), *plain.parameters()):
                p.register_hook(hook)
            model = HybridParallel(layers, GRAPH, **options)
            for p in layers.parameters():
                p.register_hook(lambda grad, seen=seen: seen.append(grad))
                p.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
            model(x()).square().sum().backward()
            plain[3](plain[2](plain[1](plain[0](x(), GRAPH.csc())), GRAPH.csc())).square().sum().backward()
            assert len(seen) == 2 * len(list(layers.parameters())), (name, options)
            for p, q in zip(layers.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=1e-10), (name, options)


def test_hooks_on_parameters_see_the_sum_of_all_ranks():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60, **bins(2))
        for p in model.parameters():
            p.register_hook(lambda grad: grad / grad.norm())
        model(x()[model.nodes]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    layers = nn.ModuleList(narrowing())
    found = run_ranks(2, work)
    layers[3](layers[2](layers[1](layers[0](x(), GRAPH.csc())), GRAPH.csc())).square().sum().backward()
    for grads in found:
        for grad, p in zip(grads, layers.parameters(), strict=True):
            assert torch.allclose(grad, p.grad / p.grad.norm(), rtol=1e-10)
