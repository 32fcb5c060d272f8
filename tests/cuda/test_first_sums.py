"""What the host does for a GPU: sums of the first layer, and sampling. Batches and training stay the same."""

import pytest
import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.graph import EDGE, NODE, Graph, sbm
from gnnsys.nn import GAT, GIN, GraphSAGE
from gnnsys.ops import SummedRows
from gnnsys.planning import CACHED, DEVICE, PINNED, ExecutionPlan, Way
from gnnsys.store import DeviceCache
from tests.cuda.test_planned import GRAPH, _are_the_same, _loader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
FEATURES, CLASSES = 64, int(GRAPH.node_data[NODE]["y"].max()) + 1
AHEAD = "sums of the first layer made ahead"
ROWS = GRAPH.node_data[NODE]["x"].nbytes


def model_of(kind=GraphSAGE, dtype=torch.float32):
    torch.manual_seed(0)
    return kind(FEATURES, 16, 2, CLASSES).to("cuda", dtype)


def planned(way, model, graph=GRAPH, **options):
    made_for = _loader(graph, execution="auto", model=model, **options).plan.made_for
    plan = ExecutionPlan([Way(), way], made_for=made_for, chosen=1)
    return _loader(graph, execution=plan, model=model, **options)


def losses(model, loader, num_steps=50):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _, batch in zip(range(num_steps), loader, strict=False):
        out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        found.append(torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]))
        optimizer.step()
    return torch.stack(found)


WAYS = [
    Way(place=PINNED, sums=(True,)),
    Way(place=PINNED, sums=(True, False, True)),
    Way(place=CACHED, sums=(True,), device_bytes=ROWS // 4),
    Way(place=DEVICE, sums=(True,)),
    Way(sums=(True,)),
]


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_losses_and_gradients_are_the_same(way, dtype, bound):
    rows = GRAPH.node_data[NODE]["x"].to(dtype)
    graph = Graph({NODE: GRAPH.num_nodes()}, {EDGE: GRAPH.csc()}, {NODE: {"x": rows, "y": GRAPH.node_data[NODE]["y"]}})
    models = [model_of(dtype=dtype) for _ in range(2)]
    expected, found = losses(models[0], _loader(graph)), losses(models[1], planned(way, models[1], graph))
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_all_rows_are_there_for_whoever_asks(way):
    _are_the_same(planned(way, model_of()), _loader())


def test_a_layer_takes_sums_without_a_look_at_rows():
    model = model_of(GIN)
    for batch, _ in zip(planned(WAYS[0], model), range(3), strict=False):
        assert isinstance(batch.x, SummedRows)
        model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes).sum().backward()
        assert not batch.x.is_gathered


@pytest.mark.parametrize("place, taken", [(PINNED, 0), (CACHED, ROWS // 4)])
def test_batches_that_the_host_samples_are_the_same(place, taken):
    way = Way(place=place, by_host=(True, False, True), device_bytes=taken)
    _are_the_same(planned(way, None), _loader())


def test_a_cache_of_the_users_own_is_part_of_the_sums():
    pinned = GRAPH.pin_memory()
    x, y = pinned.node_data[NODE]["x"], pinned.node_data[NODE]["y"]
    cache = DeviceCache(x, torch.arange(0, GRAPH.num_nodes(), 3), "cuda")
    graph = Graph({NODE: GRAPH.num_nodes()}, {EDGE: pinned.csc()}, {NODE: {"x": cache, "y": y}})
    models = [model_of() for _ in range(2)]
    loader = planned(Way(sums=(True,)), models[1], graph)
    torch.testing.assert_close(losses(models[1], loader), losses(models[0], _loader()), rtol=1e-5, atol=1e-5)
    plan = _loader(graph, execution="auto", model=models[0]).plan
    assert {way.place for way in plan.ways} == {"as given"} and AHEAD not in plan.passed_over, plan.report()


def test_what_a_model_takes_decides_what_is_tried():
    pinned = GRAPH.pin_memory()
    with gnnsys.store.limited("cuda", ROWS):
        of_sums = _loader(pinned, execution="auto", model=model_of()).plan
        others = _loader(pinned, execution="auto", model=model_of(GAT)).plan
    assert AHEAD not in of_sums.passed_over and not any(any(way.sums) for way in others.ways)
    assert "GATConv" in others.passed_over[AHEAD]


def test_a_plan_with_sums_is_chosen_and_goes_on():
    graph, model = sbm(20_000, avg_degree=10, num_features=FEATURES).pin_memory(), model_of()
    with gnnsys.store.limited("cuda", ROWS):
        loader = _loader(graph, execution="auto", model=model)
        for _ in range(6):
            if loader.plan.chosen is None:
                losses(model, loader, 10_000)
        assert loader.plan.chosen is not None and not loader.plan.trial.refused, loader.plan.report()
        losses(model, loader, 10_000)
