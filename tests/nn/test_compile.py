"""Models under torch.compile, on batches of any size, train as they do without it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnnsys.graph import sbm
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GAT, GraphSAGE


@pytest.mark.parametrize(
    ("make", "trimmed"),
    [(lambda: GraphSAGE(8, 8, 2, 3), True), (lambda: GAT(8, 8, 2, 3, heads=2), False)],
    ids=["sage, trimmed", "gat"],
)
def test_a_compiled_model_has_the_losses_and_gradients_of_the_plain_one(make: Callable[[], nn.Module], trimmed: bool):
    graph = sbm(400, num_classes=3, avg_degree=8, num_features=8, seed=1)
    losses, gradients = [], []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        call = torch.compile(model, backend="aot_eager", dynamic=True) if is_compiled else model
        losses.append([])
        for batch in islice(NeighborLoader(graph, [4, 3], batch_size=32, seed=2), 2):
            given = {"num_sampled_nodes": batch.num_sampled_nodes} if trimmed else {}
            out = call(batch.x, batch.edge_index, **given)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            losses[-1].append(loss.detach())
        gradients.append([p.grad for p in model.parameters()])
    torch._dynamo.reset()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
