"""For tests of what is made ahead of a model's first layer: a small graph, models, ways to call them, and training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gnnsys import NeighborLoader
from gnnsys.graph import NODE, sbm
from gnnsys.planning import ExecutionPlan, Way

FEATURES, CLASSES = 12, 4
ALL, SOME = (True,), (True, False, True)  # patterns over batches


def graph_of(dtype=torch.float64):
    made = sbm(600, num_classes=CLASSES, avg_degree=6, num_features=FEATURES, seed=3)
    made.set_node_data("x", made.node_data[NODE]["x"].to(dtype))
    weight = 0.5 + torch.rand(made.csc().num_edges, generator=torch.Generator().manual_seed(2)).to(dtype)
    made.set_edge_data("w", weight)
    return made


def model_of(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return kind(FEATURES, 8, 2, CLASSES, **options).to(dtype)


def planned_loader(graph, model, way=None, staleness=0, **options):
    """By `way`, such as Way(sums=ALL), chosen beforehand; a loader without a plan where there is none."""
    given = {"batch_size": 32, "shuffle": True, "seed": 5, **options}
    if way is None:
        return NeighborLoader(graph, [4, 3], **given)
    made_for = NeighborLoader(graph, [4, 3], execution="auto", model=model, **given).plan.made_for
    plan = ExecutionPlan([Way(), way], made_for=made_for, chosen=1)
    return NeighborLoader(graph, [4, 3], execution=plan, model=model, staleness=staleness, **given)


def batches_of(loader, count):
    while True:
        for batch in loader:
            yield batch
            count -= 1
            if count == 0:
                return


def train(model, loader, num_steps, forward):
    """Loss and gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    history = []
    for batch in batches_of(loader, num_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(model, batch)[: batch.batch_size], batch.y[: batch.batch_size])
        loss.backward()
        history.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
    return history


def assert_same(found, expected, bound):
    for (loss, grads), (other, others) in zip(expected, found, strict=True):
        assert abs(loss - other) <= bound * max(1, abs(loss))
        for a, b in zip(grads, others, strict=True):
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def trimmed(model, batch):
    return model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)


def of_blocks(model, batch):
    return model(batch.x, batch.blocks)
