"""What users do with modules and tensors that a model must stand: in place, frozen, shared, copied, failed."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from gnnsys.nn import GATConv, GCNConv, SAGEConv
from gnnsys.ops import CSC, spmm
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.test_exact import close, random_ranks, seeded
from tests.fullgraph.thread_ranks import run_ranks

N, WIDTH = 60, 6
GRAPH = random_graph(N, 300, 11)
BINS = BinSchedule(packing=Packing(num_bins=4))


def features(dtype=torch.float64) -> Tensor:
    return torch.randn(N, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(4))


def alone(layers, **options) -> HybridParallel:
    return HybridParallel(layers, GRAPH, schedule=BINS, **options)


class Halved(nn.Module):
    """A graph layer two of whose parameters have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, rows: Tensor, csc: CSC) -> Tensor:
        return spmm(csc, rows) * (self.a + self.b)


def test_parameters_with_one_gradient_get_it_once():
    x = features()
    for layer in (
        (run_ranks(2, lambda rank, group: _trained(group, Halved().double(), x)))[0],
        _trained(None, Halved().double(), x),
    ):
        want = (adjacency(GRAPH) @ x).sum(0)
        close(layer.a.grad, want)
        close(layer.b.grad, want)


def _trained(group, layer, x):
    ranks = None if group is None else random_ranks(2, N)
    model = HybridParallel([layer], GRAPH, ranks=ranks, schedule=BINS, group=group, timeout=60)
    model(x[model.nodes]).sum().backward()
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: [nn.LeakyReLU(0.1, inplace=True), SAGEConv(WIDTH, 5)],
        lambda: [SAGEConv(WIDTH, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), SAGEConv(5, 3)],
        lambda: [GCNConv(WIDTH, 3, bias=False), nn.ReLU(inplace=True), GCNConv(3, 2)],
        lambda: [SAGEConv(WIDTH, 3, bias=False, root_weight=False), nn.ReLU(inplace=True)],
    ],
)
@pytest.mark.parametrize("x_grad", [True, False])
def test_modules_in_place_write_nothing_that_is_read_again(make, x_grad):
    layers = seeded(make)
    plain = copy.deepcopy(layers)
    for module in plain:
        if hasattr(module, "inplace"):
            module.inplace = False
    model, same = alone(layers), alone(plain)
    x = features().requires_grad_(x_grad)
    before = x.detach().clone()
    for _ in range(3):
        out, want = model(x), same(x)
        assert torch.equal(out, want) and torch.equal(x.detach(), before)
        out.square().sum().backward()
        want.square().sum().backward()
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_bins_that_are_computed_again_drop_what_they_dropped_although_the_model_was_switched():
    layers = seeded(lambda: [SAGEConv(WIDTH, 5), nn.Dropout(0.5), SAGEConv(5, 3)])
    grads = []
    for recompute in (False, True):
        model = alone(copy.deepcopy(layers), recompute=recompute, seed=2)
        out = model(features())
        model.eval()
        out.square().sum().backward()
        assert not any(module.training for module in model.modules())
        grads.append([p.grad for p in model.parameters()])
    for kept, computed in zip(*grads, strict=True):
        close(computed, kept)


def test_batch_normalisation_of_narrow_rows_is_torchs():
    layers = [layer.to(torch.bfloat16) for layer in seeded(lambda: [SAGEConv(WIDTH, 8), nn.BatchNorm1d(8)])]
    x = features(torch.bfloat16) * 3 + 20
    want = layers[1](layers[0](x, GRAPH.csc()))
    layers[1].reset_running_stats()
    out = alone(layers)(x)
    assert out.dtype == want.dtype == torch.bfloat16
    assert float((out - want).abs().max()) <= 0.05


def test_a_layer_of_which_a_part_is_frozen_trains_the_rest():
    layers = seeded(lambda: [SAGEConv(WIDTH, 8), SAGEConv(8, 3)])
    for p in (*layers[0].parameters(), layers[1].lin_l.weight):
        p.requires_grad_(False)
    x, plain = features(), copy.deepcopy(layers)
    alone(layers)(x).square().sum().backward()
    dense_forward(plain, x, adjacency(GRAPH)).square().sum().backward()
    for got, want in zip(layers, plain, strict=True):
        for p, q in zip(got.parameters(), want.parameters(), strict=True):
            close(p.grad, q.grad)


def test_a_parameter_that_nothing_uses_has_no_gradient():
    class Idle(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return rows * self.weight.sum()

    layers = seeded(lambda: [SAGEConv(WIDTH, 3), Idle(3, 3)])
    alone(layers)(features()).sum().backward()
    assert layers[1].bias.grad is None and layers[1].weight.grad is not None


def test_evaluation_in_inference_mode_does_not_spoil_training():
    model = alone(seeded(lambda: [SAGEConv(WIDTH, 5), nn.Dropout(0.5), SAGEConv(5, 3)]))
    x = features()
    with torch.inference_mode():
        model.eval()
        first = model(x).clone()
        made_there = features() * 2
        assert not torch.equal(model(made_there), first)
    model.train()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_features_that_were_replaced_are_noticed():
    model, x = alone(seeded(lambda: [SAGEConv(WIDTH, 3)])).eval(), features()
    before = model(x)
    x.data = x.data * 2
    assert not torch.allclose(model(x), before)
    before = model(x)
    x.mul_(2)
    assert not torch.allclose(model(x), before)


def test_after_a_failed_pass_a_model_says_so_instead_of_going_on():
    class Fails(nn.Module):
        fails = False

        def forward(self, rows: Tensor) -> Tensor:
            if self.fails:
                raise ArithmeticError("no more")
            return rows

    made = seeded(lambda: [SAGEConv(WIDTH, 5), SAGEConv(5, 3)])

    def work(rank, group):
        layers = copy.deepcopy(made)
        model = HybridParallel(
            [layers[0], Fails(), layers[1]], GRAPH, ranks=random_ranks(2, N), group=group, timeout=60
        )
        x = features()[model.nodes]
        model(x)
        Fails.fails = True
        with pytest.raises(ArithmeticError, match="no more"):
            model(x)
        with pytest.raises(RuntimeError, match=r"an earlier pass failed \(ArithmeticError: no more\).*checkpoint"):
            model(x)

    run_ranks(2, work)


def test_bytes_are_told_of_features_that_train_and_of_layers_that_do_not():
    made = seeded(lambda: [SAGEConv(WIDTH, 8), nn.ReLU(), SAGEConv(8, 9)])

    def work(rank, group):
        found = []
        for x_grad, frozen in ((True, False), (False, True)):
            layers = copy.deepcopy(made)
            layers[0].requires_grad_(not frozen)
            model = HybridParallel(layers, GRAPH, ranks=random_ranks(2, N), group=group, timeout=60)
            x = features()[model.nodes].requires_grad_(x_grad)
            sent = []
            for _ in range(2):
                model(x).sum().backward()
                sent.append(model.times.num_bytes)
            found.append((sent, model.least_bytes(x)))
        return found

    for found in run_ranks(2, work):
        for sent, (once, each) in found:
            assert sent == [once + each, each]


def test_a_model_keeps_a_thread_per_peer_from_its_first_pass_on_and_no_others():
    before, x = set(threading.enumerate()), features()
    layers = seeded(lambda: [SAGEConv(WIDTH, 3)])

    def work(rank, group):
        models = [
            HybridParallel(copy.deepcopy(layers), GRAPH, ranks=random_ranks(3, N), group=group, timeout=60)
            for _ in range(2)
        ]
        models[1](x[models[1].nodes])
        return models

    models = [model for each in run_ranks(3, work) for model in each]
    kept = [model._peers._threads for model in models]
    assert list(map(len, kept)) == [0, 2] * 3 and all(thread.is_alive() for each in kept for thread in each)
    for thread in set(threading.enumerate()) - before - set(itertools.chain(*kept)):
        thread.join(10.0)
        assert not thread.is_alive(), thread.name


def test_a_model_is_not_copied_but_says_what_is():
    model = alone([GATConv(WIDTH, 3)])
    with pytest.raises(TypeError, match=r"copy model\.layers"):
        copy.deepcopy(model)


def test_dropping_everything_gives_zeros_as_torch_does():
    out = alone([SAGEConv(WIDTH, 3), nn.Dropout(1.0)])(features(torch.float32))
    assert not out.any() and out.requires_grad
