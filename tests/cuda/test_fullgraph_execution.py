"""Plans of full-graph training on a device: rows there or on the host, the same losses and gradients either way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import FullGraphPlan, FullGraphWay, HybridParallel
from gnnsys.fullgraph.plan import full_graph_plan
from gnnsys.fullgraph.plan.full_graph_way import ANEW, KEPT, NARROW
from gnnsys.nn import GCNConv, GINConv, SAGEConv
from gnnsys.planning import DEVICE
from gnnsys.store import MemoryBudget, limited
from tests.fullgraph.dense import random_graph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

N, WIDTH, STEPS = 200, 24, 10
GRAPH = random_graph(N, 1500, 1)
MODELS = {
    "gcn": lambda: [GCNConv(WIDTH, 5), nn.ReLU(), nn.Dropout(0.3), GCNConv(5, 3)],
    "sage": lambda: [SAGEConv(WIDTH, 5), nn.ReLU(), SAGEConv(5, 3)],
    "gin": lambda: [GINConv(nn.Linear(WIDTH, 6), train_eps=True), nn.ReLU(), GINConv(nn.Linear(6, 3))],
}
WAYS = [FullGraphWay(first=first, place=place) for first in (KEPT, ANEW, NARROW) for place in ("as given", DEVICE)]


def layers_of(name: str, dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.to("cuda", dtype) for layer in MODELS[name]()]


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def train(model: HybridParallel, x: Tensor, steps: int = STEPS) -> list[list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        assert out.device == x.device
        loss = out.tanh().square().sum() / N
        loss.backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
        optimizer.step()
    return found


def same(found: list[list[Tensor]], want: list[list[Tensor]], tolerance: float) -> None:
    for step, expected in zip(found, want, strict=True):
        for got, value in zip(step, expected, strict=True):
            assert float((got - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_losses_and_gradients_of_rows_on_the_device(name, dtype):
    x, steps = rows(dtype), STEPS
    if name == "gin" and dtype == torch.float32:
        steps = 1  # sums that nothing divides: what is rounded differently grows with every step
    want = train(HybridParallel(layers_of(name, dtype), GRAPH), x.cuda(), steps)
    for way in WAYS:
        for given in (x, x.cuda()):
            model = HybridParallel(layers_of(name, dtype), GRAPH, execution=FullGraphPlan(way))
            same(train(model, given, steps), want, 1e-12 if dtype == torch.float64 else 1e-5)


def test_rows_that_train_on_the_host_get_their_gradient_there():
    layers, grads = layers_of("sage", torch.float64), []
    for way in (FullGraphWay(), FullGraphWay(place=DEVICE)):
        x = rows().requires_grad_()
        model = HybridParallel(copy.deepcopy(layers), GRAPH, execution=FullGraphPlan(way))
        model(x).square().sum().backward()
        assert x.grad.device == x.device
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_a_trial_with_rows_on_the_host_trains_as_ever_and_keeps_one_place(monkeypatch):
    monkeypatch.setattr(full_graph_plan, "ROUNDS", 1)
    x, steps = rows(), 40
    want = train(HybridParallel(layers_of("gcn", torch.float64), GRAPH), x, steps)
    model = HybridParallel(layers_of("gcn", torch.float64), GRAPH, execution="auto")
    same(train(model, x, steps), want, 1e-12)
    assert model.execution.chosen is not None and "rows on the device" in model.execution.results[0]
    assert len(model._runner.known.placed) == 1 and len(model._planner.plans) == 1


def test_without_room_for_rows_they_stay_on_the_host():
    x = rows(torch.float32)
    with limited("cuda", 1 << 30):
        taken = (1 << 30) - MemoryBudget.of("cuda").left()  # by what other tests have left behind
    with limited("cuda", taken + 100_000):
        model = HybridParallel(layers_of("gcn", torch.float32), GRAPH, execution="auto")
        model(x).sum().backward()
    assert "half of what cuda:0 has left is" in model.execution.passed_over["rows on the device"]


def test_with_everything_on_the_device_it_is_pure_gpu_and_says_so():
    model = HybridParallel(layers_of("gcn", torch.float32), GRAPH, execution="auto")
    model(rows(torch.float32).cuda()).sum().backward()
    assert "rows on cuda:0, computed on cuda:0: pure GPU" in model.execution.report()
    assert model.execution.way.place == "as given" and not model.execution.contests
