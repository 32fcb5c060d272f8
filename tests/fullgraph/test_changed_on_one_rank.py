"""Ranks whose layers, inputs or modes differ hear of it at once, and go on when they agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import HybridParallel
from gnnsys.nn import SAGEConv
from tests.fullgraph.changed import GRAPH, RANKS, narrowing, seeded, x
from tests.fullgraph.customised import WIDTH
from tests.fullgraph.thread_ranks import run_ranks


def test_layers_that_one_rank_alone_changed_are_refused_on_all():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
        own = x()[model.nodes]
        model(own)
        if rank:
            model.layers[2] = seeded(lambda: SAGEConv(4, 5))[0]
        with pytest.raises(ValueError, match=r"not the same on all ranks.*change layers on every rank alike"):
            model(own)
        model.layers[2] = seeded(lambda: SAGEConv(4, 5))[0]
        return model(own).shape[1]

    layers = narrowing()
    assert run_ranks(2, work) == [5, 5]


def test_what_one_rank_refuses_all_refuse():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
        own = x()[model.nodes]
        with pytest.raises(ValueError, match="x must be float" if rank else "another rank refused"):
            model(own[:-1] if rank else own)
        return model(own).shape[1]

    layers = narrowing()
    assert run_ranks(2, work) == [3, 3]


def test_parameters_that_differ_between_ranks_are_refused_in_every_pass_until_they_do_not():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
        rows, state = x()[model.nodes], copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.layers[0].lin_l.weight += rank
        for call in (model, model, model.describe, model):
            with pytest.raises(ValueError, match=r"1 of \d+ parameters are not the same on all ranks"):
                call(rows)
        model.load_state_dict(state)
        return model(rows).shape[1]

    layers = narrowing()
    assert run_ranks(2, work) == [3, 3]


DIFFERENT = {
    "evaluation": lambda model, rows: model.eval() and None,
    "a module in evaluation": lambda model, rows: model.layers[1].eval() and None,
    "frozen": lambda model, rows: model.layers[0].requires_grad_(False) and None,
    "x trains": lambda model, rows: rows.clone().requires_grad_(),
    "x is no tensor": lambda model, rows: rows.numpy(),
    "how much is dropped": lambda model, rows: setattr(model.layers[2], "p", 0.1),
    "how fast statistics move": lambda model, rows: setattr(model.layers[1], "momentum", 0.5),
}


def test_ranks_that_differ_in_what_they_would_send_hear_of_it_at_once_and_go_on_when_they_agree():
    def work(rank, group):
        found = []
        for name, change in DIFFERENT.items():
            model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
            rows = x()[model.nodes]
            model(rows).sum().backward()
            given = change(model, rows) if rank else None
            with pytest.raises((ValueError, AttributeError, TypeError), match=r"on all ranks|numpy") as error:
                model(rows if given is None else given)
                pytest.fail(name)
            if not rank:
                assert "not the same on all ranks" in str(error.value)
            else:
                model.train().requires_grad_()
                model.layers[2].p, model.layers[1].momentum = 0.5, 0.1
            model(rows).sum().backward()
            found.append(name)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 0)
        for make in (lambda: autocast, lambda: torch.set_grad_enabled(rank == 0)):
            with make(), pytest.raises(ValueError, match="not the same on all ranks"):
                model(rows)
        return found

    layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.BatchNorm1d(4), nn.Dropout, lambda: SAGEConv(4, 3))
    assert run_ranks(2, work) == [list(DIFFERENT)] * 2


def test_a_layer_that_one_rank_changed_and_changed_back_runs_on_all():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
        own = x()[model.nodes]
        want = model(own)
        handle = model.layers[0].register_forward_hook(lambda *args: None) if rank else None
        with pytest.raises(ValueError, match="not the same on all ranks"):
            model(own)
        if handle is not None:
            handle.remove()
        return torch.equal(model(own), want)

    layers = narrowing()
    assert run_ranks(2, work) == [True, True]
