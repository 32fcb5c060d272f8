"""What becomes of a plan that was chosen: without memory, resumed, saved, with other layers or rows."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import FullGraphPlan, FullGraphWay, HybridParallel
from gnnsys.fullgraph.plan.full_graph_plan import MEASURED, WARM
from gnnsys.fullgraph.plan.full_graph_way import AS_GIVEN, KEPT, NARROW
from tests.fullgraph.dense import random_graph
from tests.fullgraph.planned_models import GRAPH, PASSES, STEPS, N, layers_of, loss_of, rows, same, train

pytestmark = pytest.mark.usefixtures("one_core")


class Tight(nn.Module):
    """Rows as they are; without room for them once, where `fails` says so."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError("no room for it")
        return x


def test_a_way_without_memory_is_left_and_the_pass_goes_the_other():
    x, layers = rows(), layers_of("PyG's sage")
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x)
    tight = Tight()
    model, found = HybridParallel([*layers, tight], GRAPH, execution="auto"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        tight.fails = model.execution is not None and model._way(x) != model.execution.way
        loss = loss_of(model(x))
        loss.backward()
        found.append([loss.detach()])
        optimizer.step()
    same(found, [step[:1] for step in want], 1e-12)
    assert model.execution.chosen == AS_GIVEN and not tight.fails
    assert "PyG's layers in halves, sums kept: is not possible: no room for it" in model.execution.report()


def test_who_resumes_keeps_the_choice_and_a_contest_under_way_begins_anew():
    x = rows()
    first = HybridParallel(layers_of("PyG's sage"), GRAPH, execution="auto")
    train(first, x, WARM + MEASURED + 2)
    saved = copy.deepcopy(first.state_dict())
    again = HybridParallel(layers_of("PyG's sage"), GRAPH, execution="auto")
    again.load_state_dict(saved)
    again.eval()(x)
    assert again.execution.to_json() == first.execution.to_json() and again.execution.contests[0].passes == 0
    train(first, x, PASSES)
    assert len(first.execution.results) == 1
    again.load_state_dict(first.state_dict())
    again.eval()(x)
    assert again.execution.way == first.execution.way and again.execution.results == first.execution.results
    plain = HybridParallel(layers_of("PyG's sage"), GRAPH)
    plain.load_state_dict(saved)  # takes no notice of the plan
    assert "execution" not in plain.state_dict()


def test_a_saved_plan_goes_its_way_from_the_first_pass_on_and_is_refused_elsewhere(tmp_path):
    x, path = rows(), str(tmp_path / "plan.json")
    model = HybridParallel(layers_of("gcn"), GRAPH, execution="auto")
    train(model, x, 1)
    model.execution.way = FullGraphWay(first=NARROW)
    model.execution.save(path)
    plan = FullGraphPlan.load(path)
    again = HybridParallel(layers_of("gcn"), GRAPH, execution=plan)
    twice = HybridParallel(layers_of("gcn"), GRAPH, execution=FullGraphPlan.load(path))
    for got, want in zip(train(again, x), train(twice, x), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert again.execution.way.first == NARROW
    for layers, graph, given, what in (
        (layers_of("sage"), GRAPH, x, "layers"),
        (layers_of("gcn"), random_graph(N, 299, 1), x, "graph"),
        (layers_of("gcn", torch.float32), GRAPH, x.float(), "layers"),
    ):
        other = HybridParallel(layers, graph, execution=FullGraphPlan.load(path))
        with pytest.raises(ValueError, match=f'made for other {what}: .*execution="auto" makes one'):
            other(given)
    for wrong in ({"version": 9}, {**plan.to_json(), "way": {"speed": 3}}, {**plan.to_json(), "contests": [{}]}):
        with pytest.raises(ValueError, match=r"no plan of full-graph training|has no speed"):
            FullGraphPlan.from_json(json.loads(json.dumps(wrong)))
    with pytest.raises(ValueError, match='execution must be "auto", a FullGraphPlan or None'):
        HybridParallel(layers_of("gcn"), GRAPH, execution="fast")


@pytest.mark.parametrize("name", ["gcn", "sage that widens"])
def test_rows_that_are_another_tensor_in_every_epoch_are_not_summed_to_be_kept(name):
    x, layers = rows(), layers_of(name)
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x, 5)
    model, found = HybridParallel(layers, GRAPH, execution="auto"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        given = x.clone()
        loss = loss_of(model(given))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    same(found, want, 1e-12)
    assert model.execution.way.first == NARROW and model._runner.known.placed[x.device].sums._rows is None
    assert f"{KEPT}: not tried, x is another tensor in every epoch" in model.execution.report()


def test_other_layers_are_planned_for_anew_and_other_rows_go_as_without_a_plan():
    x = rows()
    model = HybridParallel(layers_of("gcn"), GRAPH, execution="auto")
    train(model, x, 1)
    before = model.execution
    trained = x.clone().requires_grad_()
    model(trained).sum().backward()
    assert model.execution is before and model._way(trained) == AS_GIVEN
    model.layers[1] = nn.Tanh()
    train(model, x, 1)
    assert model.execution is not before


def test_passes_without_a_backward_end_a_contest_in_vain():
    x, model = rows(), HybridParallel(layers_of("PyG's sage"), GRAPH, execution="auto")
    for _ in range(4 * PASSES):
        model(x)
    assert model.execution.way == AS_GIVEN and "passes have no backward" in model.execution.report()
