"""Products of the first layer made by the host for a GPU: the same training, and only products cross the bus."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import gnnsys
from gnnsys.graph import EDGE, NODE, Graph, sbm
from gnnsys.loader.first_products import FirstProducts
from gnnsys.nn import GAT, GCN, GIN, GraphSAGE
from gnnsys.ops import HostMultiplier, MultipliedRows, RowsOnHost
from gnnsys.planning import CACHED, DEVICE, PINNED, PRODUCTS, ExecutionPlan, Way
from tests.cuda.test_planned import GRAPH, _are_the_same, _loader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
FEATURES, CLASSES = 64, int(GRAPH.node_data[NODE]["y"].max()) + 1
ROWS = GRAPH.node_data[NODE]["x"].nbytes
ALL, SOME = (True,), (True, False, True)
WAYS = [
    Way(products=ALL),
    Way(place=PINNED, products=ALL),
    Way(place=PINNED, products=SOME),
    Way(place=CACHED, products=ALL, device_bytes=ROWS // 4),
]


def model_of(kind=GraphSAGE, dtype=torch.float32):
    torch.manual_seed(0)
    return kind(FEATURES, 16, 2, CLASSES).to("cuda", dtype)


def graph_of(dtype):
    arrays = {"x": GRAPH.node_data[NODE]["x"].to(dtype), "y": GRAPH.node_data[NODE]["y"]}
    return Graph({NODE: GRAPH.num_nodes()}, {EDGE: GRAPH.csc()}, {NODE: arrays})


def planned(way, model, graph=GRAPH, staleness=0, **options):
    made_for = _loader(graph, execution="auto", model=model, **options).plan.made_for
    plan = ExecutionPlan([Way(), way], made_for=made_for, chosen=1)
    return _loader(graph, execution=plan, model=model, staleness=staleness, **options)


def whole(model, batch):
    return model(batch.x, batch.edge_index)[: batch.batch_size]


def trimmed(model, batch):
    return model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)


def losses(model, loader, forward=trimmed, num_steps=50, used=None):
    """Losses and gradients of all steps. `used(position)` are other values of parameters, by name."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    while len(found) < num_steps:
        for batch in loader:
            if used is None:
                out = forward(model, batch)
            else:
                sizes = {"num_sampled_nodes": batch.num_sampled_nodes}
                out = functional_call(model, used(len(found)), (batch.x, batch.edge_index), sizes)
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            found.append(torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]))
            optimizer.step()
            if len(found) == num_steps:
                break
    return torch.stack(found)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind, forward", [(GraphSAGE, trimmed), (GCN, whole), (GIN, trimmed)])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_losses_and_gradients_are_the_same(way, kind, forward, dtype, bound):
    graph, models = graph_of(dtype), [model_of(kind, dtype) for _ in range(2)]
    expected = losses(models[0], _loader(graph), forward)
    loader = planned(way, models[1], graph)
    found = losses(models[1], loader, forward)
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert loader.plan.chosen == 1 and not loader.plan.trial.refused, loader.plan.report()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_all_rows_are_there_for_whoever_asks(way):
    _are_the_same(planned(way, model_of()), _loader())


def test_rows_stay_on_the_host_and_weights_have_their_gradients_on_the_device():
    model = model_of()
    for batch, _ in zip(planned(WAYS[1], model), range(3), strict=False):
        assert isinstance(batch.x, MultipliedRows) and batch.x.is_cuda
        trimmed(model, batch).sum().backward()
        assert not batch.x.is_gathered and model.convs[0].lin_l.weight.grad.is_cuda


def test_products_wait_for_the_step_before_on_whatever_stream_it_runs():
    table, side = torch.randn(5_000, 512), torch.cuda.Stream()
    host = RowsOnHost(HostMultiplier(table, 2), torch.arange(5_000), lambda: None)
    rows = MultipliedRows(host, torch.device("cuda", torch.cuda.current_device()), lambda: table.cuda())
    with torch.cuda.stream(side):
        weight = torch.zeros(8, 512, device="cuda", requires_grad=True)
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            weight += 1  # what an optimizer does last
        (product,) = rows.times([weight], [5_000])
        out = torch.zeros_like(product)
        torch.cuda._sleep(50_000_000)
        out += product
        (out * 2).sum().backward()
    side.synchronize()
    torch.testing.assert_close(out.cpu(), table.sum(1, keepdim=True).expand(-1, 8), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(weight.grad.cpu(), 2 * table.sum(0).expand(8, -1), rtol=1e-4, atol=1e-2)
    assert not rows.is_gathered
    host.multiplier.close()


def test_dropout_on_rows_is_named_and_training_is_the_same():
    def dropped(model, batch):
        return model(F.dropout(batch.x, 0.4), batch.edge_index)[: batch.batch_size]

    found, models = [], [model_of() for _ in range(2)]
    loaders = [_loader(), planned(WAYS[1], models[1])]
    for model, loader in zip(models, loaders, strict=True):
        torch.manual_seed(3)
        found.append(losses(model, loader, dropped, 20))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    plan = loaders[1].plan
    assert plan.chosen == 0 and "dropout on rows" in plan.trial.refused[1], plan.report()


def test_autocast_goes_as_given():
    models = [model_of() for _ in range(2)]
    loaders = [_loader(), planned(WAYS[1], models[1])]
    with torch.autocast("cuda", torch.bfloat16):
        outputs = [trimmed(m, next(iter(loader))) for m, loader in zip(models, loaders, strict=True)]
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("staleness, pattern", [(1, ALL), (3, ALL), (2, SOME)])
@pytest.mark.parametrize("place", ["as given", PINNED])
def test_products_made_ahead_are_of_weights_as_old_as_allowed(place, staleness, pattern):
    dtype = torch.float64
    graph, models = graph_of(dtype), [model_of(dtype=dtype) for _ in range(2)]
    own, weights = dict(models[0].named_parameters()), []
    names = ("convs.0.lin_l.weight", "convs.0.lin_r.weight")

    def used(position):
        weights.append({name: own[name].detach().clone() for name in names})
        if position < staleness or not pattern[position % len(pattern)]:
            return {}
        old = weights[position - staleness]
        return {name: own[name] + (old[name] - own[name]).detach() for name in names}

    expected = losses(models[0], _loader(graph), used=used)
    way = Way(place=place, products=pattern)
    found = losses(models[1], planned(way, models[1], graph, staleness))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def told(graph, model, room):
    with gnnsys.store.limited("cuda", room):
        return _loader(graph, execution="auto", model=model)


@pytest.fixture(scope="module")
def wide():
    return sbm(20_000, avg_degree=10, num_features=2_000, num_classes=4).pin_memory()


def test_what_the_cores_take_decides_whether_products_are_tried(wide, monkeypatch):
    room, model = wide.node_data[NODE]["x"].nbytes // 4, GCN(2_000, 8, 2, 4).cuda()
    monkeypatch.setattr(FirstProducts, "measure", lambda self, ids, num_own: (10.0, 10.0))
    slow = told(wide, model, room).plan
    assert "take the cores 20000.0 ms" in slow.passed_over[PRODUCTS] and not any(any(w.products) for w in slow.ways)
    monkeypatch.setattr(FirstProducts, "measure", lambda self, ids, num_own: (1e-9, 1e-9))
    loader = told(wide, model, room)
    tried = [number for number, way in enumerate(loader.plan.ways) if any(way.products)]
    assert tried and all(loader.plan.ways[number].predicted is not None for number in tried), loader.plan.report()
    with gnnsys.store.limited("cuda", room):
        for _ in range(6):
            if loader.plan.chosen is None:
                losses(model, loader, whole, len(loader))
    assert loader.plan.chosen is not None and not loader.plan.trial.refused, loader.plan.report()
    assert all(loader.plan.trial.seconds[number] for number in tried), loader.plan.report()


def test_products_that_cannot_pay_are_not_tried_and_the_report_says_why(wide):
    room = wide.node_data[NODE]["x"].nbytes // 4
    broad, gat, narrow = GCN(2_000, 4_000, 2, 4).cuda(), GAT(2_000, 8, 2, 4).cuda(), GCN(2_000, 8, 2, 4).cuda()
    assert "makes 4000 values of the 2000" in told(wide, broad, room).plan.passed_over[PRODUCTS]
    assert "GATConv" in told(wide, gat, room).plan.passed_over[PRODUCTS]
    on_device = _loader(wide, execution="auto", model=narrow).plan
    assert "fits the device" in on_device.passed_over[PRODUCTS] and DEVICE in {way.place for way in on_device.ways}


def test_a_closed_loader_leaves_no_thread_that_multiplies():
    model = model_of()
    loader = planned(WAYS[1], model, staleness=1)
    losses(model, loader, num_steps=4)
    loader.close()
    assert not any(thread.name.startswith("gnnsys-products") for thread in threading.enumerate())
