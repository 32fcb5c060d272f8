"""Products made ahead, by weights of `staleness` batches before: never older, and off where they must not be."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from gnnsys import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.planning import ExecutionPlan, Way
from tests.loader.first_layer_training import (
    ALL,
    SOME,
    assert_same,
    batches_of,
    graph_of,
    model_of,
    planned_loader,
    train,
    trimmed,
)

GRAPH = graph_of()
FIRST = ("convs.0.lin_l.weight", "convs.0.lin_r.weight")


def loader_of(model, pattern=None, **options):
    return planned_loader(GRAPH, model, pattern and Way(products=pattern), **options)


def test_staleness_is_of_products_and_other_ways_are_tried_as_without_it():
    model = model_of(GraphSAGE)
    made_for = NeighborLoader(GRAPH, [4, 3], batch_size=8, execution="auto").plan.made_for
    plan = ExecutionPlan([Way(), Way(loading_threads=2)], made_for=made_for)
    loader = NeighborLoader(GRAPH, [4, 3], batch_size=8, execution=plan, model=model, staleness=1)
    trial = loader.plan.trial
    trial.warm, trial.measured, trial.rounds = 1, 2, 1
    while loader.plan.chosen is None:
        list(loader)
    assert not trial.refused, loader.plan.report()
    loader.close()


def train_by_old_weights(model, loader, num_steps, staleness, is_turn=lambda position: True):
    """The oracle: the first layer's products have the value of old weights, and the gradient is that of new ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    history, weights = [], []
    for position, batch in enumerate(batches_of(loader, num_steps)):
        own = dict(model.named_parameters())
        weights.append({name: own[name].detach().clone() for name in FIRST})
        used = {}
        if position >= staleness and is_turn(position):
            old = weights[position - staleness]
            used = {name: own[name] + (old[name] - own[name]).detach() for name in FIRST}
        optimizer.zero_grad()
        sizes = {"num_sampled_nodes": batch.num_sampled_nodes}
        out = functional_call(model, used, (batch.x, batch.edge_index), sizes)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        history.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
    return history


@pytest.mark.parametrize("staleness, pattern", [(0, ALL), (1, ALL), (3, ALL), (2, SOME), (1, (False, True))])
def test_no_product_is_older_than_its_staleness(staleness, pattern):
    models = [model_of(GraphSAGE) for _ in range(3)]
    turns = len(pattern)
    expected = train_by_old_weights(models[0], loader_of(models[0]), 25, staleness, lambda p: pattern[p % turns])
    found = train(models[1], loader_of(models[1], pattern, staleness=staleness), 25, trimmed)
    assert_same(found, expected, 1e-12)
    if staleness:
        exact = train(models[2], loader_of(models[2]), 25, trimmed)
        assert max(abs(a[0] - b[0]) for a, b in zip(exact, found, strict=True)) > 1e-6, "old weights were not used"


def test_batches_that_are_kept_for_later_are_multiplied_by_new_weights():
    models = [model_of(GraphSAGE) for _ in range(2)]
    expected = train(models[0], list(batches_of(loader_of(models[0]), 12)), 12, trimmed)
    found = train(models[1], list(batches_of(loader_of(models[1], ALL, staleness=2), 12)), 12, trimmed)
    assert_same(found, expected, 1e-12)


def test_without_loading_threads_nothing_is_made_ahead():
    models = [model_of(GraphSAGE) for _ in range(2)]
    expected = train(models[0], loader_of(models[0]), 10, trimmed)
    found = train(models[1], loader_of(models[1], ALL, staleness=2, num_threads=0), 10, trimmed)
    assert_same(found, expected, 1e-12)


@pytest.mark.parametrize("across_epochs", [True, False])
def test_behind_a_jump_no_product_is_older_either(across_epochs):
    """On to the next epoch, and back to the third batch: what follows is made of weights of behind the jump."""
    models, found = [model_of(GraphSAGE) for _ in range(2)], []
    options = {"across_epochs": across_epochs, "batch_size": 100}  # six batches an epoch
    for model, pattern in zip(models, (None, ALL), strict=True):
        loader = loader_of(model, pattern, staleness=2 if pattern else 0, **options)
        run = train if pattern else lambda model, loader, steps, forward: train_by_old_weights(model, loader, steps, 2)
        told = run(model, loader, 2, trimmed)
        state = loader.state_dict()
        told += run(model, loader, 4, trimmed)
        loader.load_state_dict(state)
        found.append(told + run(model, loader, 4, trimmed))
    assert_same(*found, 1e-12)


def multiplying_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("gnnsys-products")}


def test_a_closed_loader_leaves_no_thread_and_batches_of_before_can_still_be_trained_on():
    model, before = model_of(GraphSAGE), multiplying_threads()
    loader = loader_of(model, ALL, staleness=1)
    train(model, loader, 4, trimmed)
    batch = next(iter(loader))
    made = multiplying_threads() - before
    assert made
    loader.close()
    assert made.isdisjoint(multiplying_threads())
    trimmed(model, batch).sum().backward()
    batch.x.host.multiplier.close()


def test_bad_staleness_is_told_in_one_line():
    model = model_of(GraphSAGE)
    for given in (-1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="staleness must be a number of batches >= 0"):
            NeighborLoader(GRAPH, [4], execution="auto", model=model, staleness=given)
    for options in ({"model": model}, {"execution": "auto"}):
        with pytest.raises(ValueError, match=r'give execution="auto" and model='):
            NeighborLoader(GRAPH, [4], staleness=1, **options)


def test_staleness_is_refused_under_ddp(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(model_of(GraphSAGE))
        with pytest.raises(ValueError, match="staleness=1 is not for DDP") as refused:
            NeighborLoader(GRAPH, [4, 3], execution="auto", model=model, staleness=1)
        assert "\n" not in str(refused.value)
        exact = [model_of(GraphSAGE), model]
        patterns = [None, ALL]
        found = [train(m, loader_of(m, p), 10, trimmed) for m, p in zip(exact, patterns, strict=True)]
        assert_same(*found, 1e-12)
    finally:
        torch.distributed.destroy_process_group()
