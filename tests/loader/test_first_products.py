"""Products of the first layer made by the host: the same training, and all rows for whoever looks at them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnnsys import NeighborLoader
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import first_products as of_products
from gnnsys.loader.first_products import first_products
from gnnsys.loader.loader import Loader
from gnnsys.nn import GAT, GCN, GIN, GINConv, GraphSAGE, SAGEConv
from gnnsys.ops import CSC, HostMultiplier, MultipliedRows
from gnnsys.planning import PRODUCTS, ExecutionPlan, Way
from tests.loader.first_layer_training import (
    ALL,
    CLASSES,
    FEATURES,
    SOME,
    assert_same,
    batches_of,
    graph_of,
    model_of,
    of_blocks,
    planned_loader,
    train,
    trimmed,
)

GRAPH = graph_of()


def loader_of(model, pattern=None, graph=GRAPH, **options):
    return planned_loader(graph, model, pattern and Way(products=pattern), **options)


def whole(model, batch):
    return model(batch.x, batch.edge_index)


def weighted(model, batch):
    return model(batch.x, batch.edge_index, edge_weight=batch.w)


MODELS = [
    (GraphSAGE, {}, trimmed),
    (GraphSAGE, {"aggr": "sum", "dropout": 0.3, "norm": "batch"}, whole),
    (GCN, {}, whole),
    (GCN, {}, weighted),
    (GIN, {"train_eps": True}, trimmed),
]


@pytest.mark.parametrize("dtype, bound, pattern", [(torch.float64, 1e-12, ALL), (torch.float32, 1e-5, SOME)])
@pytest.mark.parametrize("kind, options, forward", MODELS)
def test_losses_and_gradients_are_the_same_over_50_steps(kind, options, forward, pattern, dtype, bound):
    graph, found = graph_of(dtype), []
    for turn in (None, pattern):
        model = model_of(kind, dtype, **options)
        torch.manual_seed(4)  # dropout between layers
        found.append(train(model, loader_of(model, turn, graph), 50, forward))
    assert_same(*found, bound)


def test_blocks_are_multiplied_too():
    models = [model_of(GraphSAGE) for _ in range(2)]
    options = {"expand": "frontier"}
    expected = train(models[0], loader_of(models[0], **options), 10, of_blocks)
    loader = loader_of(models[1], ALL, **options)
    assert_same(train(models[1], loader, 10, of_blocks), expected, 1e-12)
    assert loader.plan.chosen == 1, loader.plan.report()


@pytest.mark.parametrize("kind, forward", [(GraphSAGE, trimmed), (GCN, whole), (GIN, trimmed)])
def test_a_layer_multiplies_without_a_look_at_rows_and_others_get_all_of_them(kind, forward):
    model = model_of(kind)
    made, plain = (next(iter(loader_of(model, pattern))) for pattern in (ALL, None))
    assert isinstance(made.x, MultipliedRows)
    forward(model, made).sum().backward()
    assert not made.x.is_gathered
    assert made.x.shape == plain.x.shape and torch.equal(made.x + 0, plain.x) and made.x.is_gathered
    assert torch.equal(made.n_id, plain.n_id) and torch.equal(made.edge_index, plain.edge_index)


def test_batches_in_turn():
    batches = list(batches_of(loader_of(model_of(GraphSAGE), SOME), 6))
    assert [isinstance(batch.x, MultipliedRows) for batch in batches] == [True, False, True] * 2


def test_dropout_on_rows_is_no_such_way_and_the_loader_says_so():
    def forward(model, batch):
        return model(F.dropout(batch.x, 0.4), batch.edge_index)

    found, loaders = [], []
    for pattern in (None, ALL):
        model = model_of(GraphSAGE)
        torch.manual_seed(4)
        loaders.append(loader_of(model, pattern))
        found.append(train(model, loaders[-1], 20, forward))
    assert_same(*found, 1e-12)
    plan = loaders[1].plan
    assert plan.chosen == 0 and "before SAGEConv multiplied them: dropout" in plan.trial.refused[1], plan.report()
    assert "not possible: rows were asked for" in plan.report()


def test_a_plan_whose_only_way_turns_out_to_be_none_goes_it_plainly_and_says_so():
    def forward(model, batch):
        return model(F.dropout(batch.x, 0.4), batch.edge_index)

    found, given = [], {"batch_size": 32, "shuffle": True, "seed": 5}
    for is_planned in (False, True):
        model = model_of(GraphSAGE)
        loader = loader_of(model)
        if is_planned:
            made_for = NeighborLoader(GRAPH, [4, 3], execution="auto", model=model, **given).plan.made_for
            plan = ExecutionPlan([Way(products=ALL)], made_for=made_for)
            loader = NeighborLoader(GRAPH, [4, 3], execution=plan, model=model, **given)
        torch.manual_seed(4)
        found.append(train(model, loader, 20, forward))
    assert_same(*found, 1e-12)
    assert loader.plan.ways == (Way(),) and loader.plan.chosen == 0
    assert "not tried, rows were asked for before SAGEConv multiplied them" in loader.plan.report()
    assert ExecutionPlan.from_json(loader.plan.to_json()).ways == (Way(),)


@pytest.mark.parametrize("kind, forward", [(GraphSAGE, trimmed), (GCN, whole), (GIN, trimmed)])
def test_autocast_and_layers_with_hooks_take_the_rows_themselves(kind, forward):
    graph, outputs = graph_of(torch.float32), []
    for pattern in (ALL, None):
        model = model_of(kind, torch.float32)
        batches = batches_of(loader_of(model, pattern, graph), 3)
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(forward(model, next(batches)))
        model.convs[0].register_forward_hook(lambda module, given, out: out * 2)
        outputs.append(forward(model, next(batches)))
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[3])


def test_a_look_at_rows_behind_the_first_layer_changes_nothing():
    model = model_of(GraphSAGE)
    loader = loader_of(model, ALL)
    for batch in batches_of(loader, 4):
        trimmed(model, batch).sum().backward()
        assert batch.x.mean().isfinite()
    assert loader.plan.chosen == 1, loader.plan.report()


def test_rows_that_were_written_before_they_were_multiplied_are_told():
    graph, model = graph_of(), model_of(GraphSAGE)
    batch = next(iter(loader_of(model, ALL, graph, num_threads=0)))
    out = trimmed(model, batch)
    graph.node_data[NODE]["x"].add_(1)
    with pytest.raises(RuntimeError, match="written since this batch was made"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="written since this batch was made"):
        trimmed(model, batch)


def test_seeds_without_neighbours_and_rows_without_edges():
    indptr = torch.tensor([0, 0, 1, 1, 3])  # nodes 0 and 2 have none
    rows = torch.randn(4, FEATURES, dtype=torch.float64)
    arrays = {"x": rows, "y": torch.zeros(4, dtype=torch.int64)}
    graph = Graph({NODE: 4}, {EDGE: CSC(indptr, torch.tensor([0, 1, 2]), 4)}, {NODE: arrays})
    for kind, forward in ((GraphSAGE, trimmed), (GCN, whole), (GIN, trimmed)):
        for size in (1, 4):
            models = [model_of(kind) for _ in range(2)]
            loaders = [loader_of(m, p, graph, batch_size=size) for m, p in zip(models, (None, ALL), strict=True)]
            found = [train(model, loader, 8, forward) for model, loader in zip(models, loaders, strict=True)]
            assert_same(*found, 1e-12)


def test_a_batch_whose_rows_are_on_the_host_is_copied_and_moved_whole():
    model = model_of(GraphSAGE)
    expected = next(iter(loader_of(model))).x
    for take in (lambda batch: copy.deepcopy(batch.x), lambda batch: batch.to("cpu").x, lambda batch: batch.x.clone()):
        assert torch.equal(take(next(iter(loader_of(model, ALL)))), expected)
    assert "x=" in repr(next(iter(loader_of(model, ALL))))


def test_to_where_a_batch_is_already_reads_no_rows():
    loader = loader_of(model_of(GraphSAGE), ALL)
    x = next(iter(loader)).to("cpu").x
    assert isinstance(x, MultipliedRows) and not x.is_gathered
    assert x.to("cpu", non_blocking=True) is x and x.to(torch.float64) is x and x.to(device=torch.device("cpu")) is x
    assert not x.is_gathered
    assert type(x.to(torch.float32)) is torch.Tensor and x.is_gathered
    loader.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.x.mul_(2),
        lambda batch: batch.x[:3].zero_(),
        lambda batch: setattr(batch, "edge_index", batch.edge_index.flip(1)),
        lambda batch: batch.x.numpy().__imul__(2),
    ],
    ids=["rows", "some rows", "edges", "numpy"],
)
def test_what_a_user_changes_counts(change):
    outputs = []
    for pattern in (ALL, None):
        model = model_of(GraphSAGE)
        batch = next(iter(loader_of(model, pattern)))
        change(batch)
        outputs.append(whole(model, batch)[: batch.batch_size])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_evaluation_without_gradients():
    model = model_of(GCN)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = [whole(model, next(iter(loader_of(model, pattern)))) for pattern in (ALL, None)]
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    train(model, loader_of(model, ALL), 2, whole)


class Projected(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize(
    "model, why",
    [
        (GAT(FEATURES, 8, 2, CLASSES), "GATConv, does other things"),
        (GraphSAGE(FEATURES, 8, 2, CLASSES, aggr="max"), "takes the max of rows before"),
        (Projected(SAGEConv(FEATURES, 8, project=True)), "projects rows before"),
        (
            Projected(GINConv(nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, 8)))),
            "does not begin with torch's own linear",
        ),
        (nn.Linear(FEATURES, 8), "no layer of gnnsys"),
        (None, "model= was not given"),
    ],
)
def test_a_layer_that_does_not_multiply_first_is_named(model, why):
    assert why in first_products(model)


@pytest.mark.parametrize(
    "model, why",
    [(model_of(GCN, torch.float32), r"rows are torch.float64 and"), (model_of(GAT), "GATConv, does other things")],
)
def test_a_plan_with_products_is_refused_where_there_can_be_none(model, why):
    with pytest.raises(ValueError, match=f"this plan makes products of the first layer on the host, and here .*{why}"):
        loader_of(model, ALL)


def test_the_report_says_why_products_are_not_tried_where_batches_stay_on_the_host():
    report = NeighborLoader(GRAPH, [4, 3], batch_size=8, execution="auto", model=model_of(GCN)).plan.report()
    assert f"{PRODUCTS}: not tried, batches stay on the host" in report
    report = NeighborLoader(GRAPH, [4, 3], batch_size=8, execution="auto", model=model_of(GAT)).plan.report()
    assert f"{PRODUCTS}: not tried, the first layer, GATConv" in report


def test_ways_in_turn_are_one_training_and_both_are_measured():
    ways = [Way(), Way(products=ALL)]
    models = [model_of(GraphSAGE) for _ in range(2)]
    made_for = NeighborLoader(GRAPH, [4, 3], batch_size=8, shuffle=True, execution="auto").plan.made_for
    loader = NeighborLoader(
        GRAPH, [4, 3], batch_size=8, shuffle=True, execution=ExecutionPlan(ways, made_for=made_for), model=models[1]
    )
    trial = loader.plan.trial
    trial.warm, trial.measured, trial.rounds = 1, 2, 2
    found = train(models[1], loader, 60, trimmed)
    plain = NeighborLoader(GRAPH, [4, 3], batch_size=8, shuffle=True)
    assert_same(found, train(models[0], plain, 60, trimmed), 1e-12)
    assert loader.plan.chosen is not None and not trial.refused and set(trial.seconds) == {0, 1}, loader.plan.report()


def first_batch(monkeypatch, model, graph=GRAPH, **options):
    """What a plan for a device would look at."""
    seen = {}
    plans = Loader._plan_execution
    monkeypatch.setattr(
        Loader, "_plan_execution", lambda self, *args, **kw: seen.update(kw) or plans(self, *args, **kw)
    )
    NeighborLoader(graph, [4, 3], batch_size=32, execution="auto", model=model, **options)
    return seen["first"]


@pytest.mark.parametrize("expand", ["new", "frontier"])
def test_products_of_the_first_batch_are_measured_and_their_bytes_are_counted(monkeypatch, expand):
    first = first_batch(monkeypatch, model_of(GraphSAGE, aggr="mean").double(), expand=expand)
    batch = next(iter(loader_of(None, expand=expand, shuffle=False, seed=0)))
    load = first.measure_products()
    assert isinstance(load, str) and "makes 16 values of the 12" in load
    narrow = GraphSAGE(FEATURES, 3, 2, CLASSES).double()
    load = first_batch(monkeypatch, narrow, expand=expand).measure_products()
    num_own = batch.num_nodes - batch.num_sampled_nodes[-1]
    assert load.num_bytes == 8 * 3 * (batch.num_nodes + num_own) and load.seconds > 0


def test_of_many_rows_some_are_measured(monkeypatch):
    monkeypatch.setattr(of_products, "_MOST_MEASURED", 1)
    monkeypatch.setattr(of_products, "_LEAST_MEASURED", 10)
    asked = []
    products = HostMultiplier.products
    monkeypatch.setattr(
        HostMultiplier, "products", lambda self, ids, w, counts: asked.append(counts) or products(self, ids, w, counts)
    )
    narrow = GraphSAGE(FEATURES, 3, 2, CLASSES).double()
    load = first_batch(monkeypatch, narrow).measure_products()
    assert asked and all(counts[0] == 10 for counts in asked) and load.seconds > 0


def test_of_a_batch_that_has_most_rows_a_part_of_the_table_is_measured_as_it_lies(monkeypatch):
    monkeypatch.setattr(of_products, "_MOST_MEASURED", 1)
    monkeypatch.setattr(of_products, "_LEAST_MEASURED", 10)
    asked = []
    products = HostMultiplier.products
    monkeypatch.setattr(
        HostMultiplier,
        "products",
        lambda self, ids, w, counts: asked.append((counts, self.table)) or products(self, ids, w, counts),
    )
    first = first_batch(monkeypatch, GraphSAGE(FEATURES, 3, 2, CLASSES).double())
    table = first.products.table.rows
    made, gradients = first.products.measure(torch.arange(table.shape[0]), table.shape[0] // 4)
    assert made > 0 and gradients > 0 and len(asked) > 0
    for counts, part in asked:
        assert part.shape[0] == 10 and part.data_ptr() == table.data_ptr() and counts[0] == 10
