"""Sums of the first layer made ahead: the same training, and all rows for whoever looks at them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader.first_sums import first_layer
from gnnsys.nn import GIN, GraphSAGE
from gnnsys.ops import CSC, SummedRows
from gnnsys.pipeline import Stage
from gnnsys.planning import Way
from tests.loader.first_layer_training import (
    ALL,
    FEATURES,
    SOME,
    assert_same,
    graph_of,
    model_of,
    of_blocks,
    planned_loader,
    train,
    trimmed,
)


@pytest.fixture(scope="module")
def graph():
    return graph_of()


def loader_of(graph, model, sums=None, **options):
    return planned_loader(graph, model, sums and Way(sums=sums), **options)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("pattern", [ALL, SOME])
@pytest.mark.parametrize("kind, options", [(GraphSAGE, {}), (GraphSAGE, {"aggr": "sum"}), (GIN, {})])
def test_losses_and_gradients_are_the_same_over_50_steps(graph, kind, options, pattern, dtype, bound):
    rows = graph.node_data[NODE]["x"].to(dtype)
    own = Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()}, {NODE: {"x": rows, "y": graph.node_data[NODE]["y"]}})
    models = [model_of(kind, dtype, **options) for _ in range(2)]
    expected = train(models[0], loader_of(own, models[0]), 50, trimmed)
    found = train(models[1], loader_of(own, models[1], pattern), 50, trimmed)
    assert_same(found, expected, bound)


def test_blocks_take_sums_too(graph):
    models = [model_of(GraphSAGE) for _ in range(2)]
    options = {"expand": "frontier"}
    expected = train(models[0], loader_of(graph, models[0], **options), 10, of_blocks)
    loader = loader_of(graph, models[1], ALL, **options)
    assert not next(iter(loader)).x.is_gathered
    found = train(models[1], loader_of(graph, models[1], ALL, **options), 10, of_blocks)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-12)


def test_a_layer_takes_sums_without_a_look_at_rows_and_others_get_all_of_them(graph):
    model = model_of(GraphSAGE)
    with_sums, without = (next(iter(loader_of(graph, model, sums))) for sums in (ALL, None))
    assert isinstance(with_sums.x, SummedRows)
    trimmed(model, with_sums)
    assert not with_sums.x.is_gathered
    assert with_sums.x.shape == without.x.shape
    assert torch.equal(with_sums.x + 0, without.x)
    assert with_sums.x.is_gathered
    assert torch.equal(with_sums.n_id, without.n_id) and torch.equal(with_sums.edge_index, without.edge_index)


def test_batches_in_turn(graph):
    batches = list(loader_of(graph, model_of(GraphSAGE), SOME))[:6]
    assert [isinstance(batch.x, SummedRows) for batch in batches] == [True, False, True] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.x.mul_(2),
        lambda batch: batch.x[:3].zero_(),
        lambda batch: batch.x.__setitem__(slice(0, 7), 1.0),
        lambda batch: setattr(batch, "x", F.dropout(batch.x, 0.0) * 3),
        lambda batch: setattr(batch, "edge_index", batch.edge_index.flip(1)),
        lambda batch: batch.edge_index[0].clamp_(max=5),
        lambda batch: batch.x.data.mul_(2),
        lambda batch: batch.x.numpy().__imul__(2),
    ],
    ids=[
        "rows in place",
        "own rows in place",
        "rows by index",
        "other rows",
        "other edges",
        "edges in place",
        "data",
        "numpy",
    ],
)
def test_what_a_user_changes_counts(graph, change):
    model = model_of(GraphSAGE)
    outputs = []
    for sums in (ALL, None):
        batch = next(iter(loader_of(graph, model, sums)))
        change(batch)
        outputs.append(model(batch.x, batch.edge_index)[: batch.batch_size])
        outputs.append(trimmed(model, batch) if batch.edge_index[1].diff().min() >= 0 else outputs[-1])
    torch.testing.assert_close(outputs[0], outputs[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs[1], outputs[3], rtol=1e-12, atol=1e-12)


def test_a_view_and_its_rows_are_one(graph):
    batch = next(iter(loader_of(graph, model_of(GraphSAGE), ALL)))
    first = batch.x[:32]
    batch.x.sum()
    first.zero_()
    assert not batch.x[:32].any()


def test_edges_of_blocks_that_are_written_count(graph):
    model, outputs = model_of(GraphSAGE), []
    for sums in (ALL, None):
        batch = next(iter(loader_of(graph, model, sums, expand="frontier")))
        csc = next(iter(batch.blocks[0].csc.values()))
        csc.indices.copy_(csc.indices.flip(0))
        outputs.append(of_blocks(model, batch))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_rows_that_were_written_before_a_batch_has_read_them_are_told(graph):
    rows = graph.node_data[NODE]["x"].clone()
    own = Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()}, {NODE: {"x": rows, "y": graph.node_data[NODE]["y"]}})
    loader = loader_of(own, model_of(GraphSAGE), ALL, num_threads=0)
    batch = next(iter(loader))
    rows.add_(1)
    with pytest.raises(RuntimeError, match="written since this batch was made"):
        batch.x.sum()


def test_evaluation_in_inference_mode(graph):
    model = model_of(GraphSAGE)
    with torch.inference_mode():
        for threads in (0, 1):
            pairs = [next(iter(loader_of(graph, model, sums, num_threads=threads))) for sums in (ALL, None)]
            torch.testing.assert_close(*(trimmed(model, batch) for batch in pairs), rtol=1e-12, atol=1e-12)


def test_what_is_compiled_or_has_stages_is_left_alone(graph):
    model = model_of(GraphSAGE)
    model.convs[0] = torch.compile(model.convs[0])
    assert "compiled" in str(first_layer(model))
    with pytest.raises(ValueError, match=r"must be the torch\.nn\.Module that is trained, got str"):
        first_layer("sage")
    stages = [Stage("look", lambda sampled: sampled, after="fetch")]
    with pytest.raises(ValueError, match="stages of your own"):
        loader_of(graph, model_of(GraphSAGE), ALL, stages=stages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_of_precision(graph, dtype):
    rows = (1000 * graph.node_data[NODE]["x"]).to(dtype)
    own = Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()}, {NODE: {"x": rows, "y": graph.node_data[NODE]["y"]}})
    model = model_of(GraphSAGE, dtype)
    pairs = [next(iter(loader_of(own, model, sums))) for sums in (ALL, None)]
    torch.testing.assert_close(*(trimmed(model, batch) for batch in pairs), rtol=0.02, atol=0.02 * 1000)


def test_a_gradient_of_rows_is_asked_of_all_of_them(graph):
    model, grads = model_of(GraphSAGE), []
    for sums in (ALL, None):
        batch = next(iter(loader_of(graph, model, sums)))
        rows = batch.x.requires_grad_()
        model(rows, batch.edge_index)[: batch.batch_size].sum().backward()
        grads.append(rows.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_seeds_without_neighbours_and_rows_without_edges():
    indptr = torch.tensor([0, 0, 1, 1, 3])  # nodes 0 and 2 have none
    rows = torch.randn(4, FEATURES, dtype=torch.float64)
    csc = CSC(indptr, torch.tensor([0, 1, 2]), 4)
    own = Graph({NODE: 4}, {EDGE: csc}, {NODE: {"x": rows, "y": torch.zeros(4, dtype=torch.int64)}})
    model = model_of(GraphSAGE)
    for size in (1, 4):
        pairs = zip(loader_of(own, model, ALL, batch_size=size), loader_of(own, model, batch_size=size), strict=True)
        for with_sums, without in pairs:
            torch.testing.assert_close(trimmed(model, with_sums), trimmed(model, without), rtol=1e-12, atol=1e-12)


def test_a_batch_with_sums_is_copied_and_pickled_whole(graph):
    batch = next(iter(loader_of(graph, model_of(GraphSAGE), ALL)))
    expected = next(iter(loader_of(graph, model_of(GraphSAGE)))).x
    assert torch.equal(copy.deepcopy(batch.x), expected)
    assert torch.equal(batch.to("cpu").x, expected)
    assert "x=" in repr(batch)
