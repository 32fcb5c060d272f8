"""The explanation graph of a part against the whole graph, and what masks are made of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnnsys.explain import (
    EXPLAINERS,
    Degrees,
    Guide,
    TrainedMasks,
    explain_part,
    pool_part,
    remote_ids,
)
from gnnsys.explain import explainers as explainers_module
from gnnsys.explain.explanation_graph import ExplanationGraph
from gnnsys.graph import sbm
from gnnsys.partition import open_parts, partition_graph
from gnnsys.session import init
from tests.explain.models import CLASSES, WIDTH, sage


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    partition_graph(sbm(600, num_classes=CLASSES, num_features=WIDTH, avg_degree=6), 3, folder / "parts")
    return folder / "parts"


def edges_between_parts(folder, part: int) -> set[tuple[int, int]]:
    """(source, destination) in global ids of the edges that lead into a part from another, from the merged graph."""
    parts = open_parts(folder)
    whole = parts.merge()
    of_original = torch.cat([parts.part(p).global_of_original() for p in range(3)]).long()
    src, dst = of_original[whole.edge_index().long()]
    own = parts.book.part_range(part)
    into = (dst >= own.start) & (dst < own.stop) & ~((src >= own.start) & (src < own.stop))
    return set(zip(src[into].tolist(), dst[into].tolist(), strict=True))


@pytest.mark.parametrize("num_pools", [1, 4])
def test_its_edges_are_those_that_lead_into_the_core_from_other_parts(folder, num_pools: int):
    parts = open_parts(folder)
    for part in range(3):
        pooled = pool_part(parts.part(part), num_pools)
        first = parts.book.part_range(part).start
        expected = {(s, int(pooled.pool_of[d - first])) for s, d in edges_between_parts(folder, part)}
        edges = pooled.edge_index[:, : -pooled.num_pools]
        found = set(zip(pooled.ids[edges[0] - pooled.num_pools].tolist(), edges[1].tolist(), strict=True))
        assert found == expected and edges.shape[1] == len(expected)
        loops = pooled.edge_index[:, -pooled.num_pools :]
        assert loops.tolist() == [list(range(num_pools))] * 2
        assert int(pooled.degree.sum()) >= len(expected) and bool((pooled.ids.diff() > 0).all())
        assert torch.bincount(pooled.pool_of, minlength=num_pools).min() > 0


def test_one_pool_has_the_mean_row_and_the_mean_prediction_of_the_core(folder):
    parts = open_parts(folder)
    model = sage().eval()
    pooled = pool_part(parts.part(1), 1)
    x = torch.cat([parts.part(p).node_data["node"]["x"] for p in range(3)])
    core = parts.part(1).node_data["node"]["x"]
    graph = explain_part(pooled, model, core, x[pooled.ids])
    torch.testing.assert_close(graph.x[0], core.mean(0))
    predicted = model(torch.cat([core, x[pooled.ids]]), pooled.core_edges)[: core.shape[0]].softmax(1)
    torch.testing.assert_close(graph.target[0], predicted.mean(0))
    torch.testing.assert_close(graph.mean_row, torch.cat([core, x[pooled.ids]]).mean(0))
    assert torch.equal(graph.x[1:], x[pooled.ids])


def test_slices_have_the_edges_of_their_nodes_and_together_all_of_them(folder):
    parts = open_parts(folder)
    x = torch.cat([parts.part(p).node_data["node"]["x"] for p in range(3)])
    pooled = pool_part(parts.part(0), 4)
    whole = explain_part(pooled, sage(), parts.part(0).node_data["node"]["x"], x[pooled.ids])
    seen = set()
    for number in range(3):
        present = torch.arange(number, pooled.num_remote, 3)
        graph = explain_part(pooled, sage(), whole_rows(parts), x[pooled.ids[present]], present)
        assert graph.ids.tolist() == pooled.ids[present].tolist()
        assert torch.equal(graph.degree, pooled.degree[present])
        seen |= pairs(graph)
    assert seen == pairs(whole)


def whole_rows(parts) -> Tensor:
    return parts.part(0).node_data["node"]["x"]


def pairs(graph: ExplanationGraph) -> set[tuple[int, int]]:
    edges = graph.edge_index[:, graph.edge_index[0] >= graph.num_pools]
    return set(zip(graph.ids[edges[0] - graph.num_pools].tolist(), edges[1].tolist(), strict=True))


def test_remote_ids_of_a_graph_are_those_of_the_explanation_graph(folder):
    with init() as session:
        graph = session.open(folder)
        for part in range(3):
            assert torch.equal(remote_ids(graph, part), pool_part(graph.parts.part(part)).ids)


class OneColumn(nn.Module):
    """A score that is the mean over in-neighbours of the first column, written without our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 6))
        self.weight.data[0, 0] = 3.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        score = x @ self.weight.t()
        total = torch.zeros_like(score).index_add_(0, edge_index[1], score[edge_index[0]])
        count = torch.zeros(len(x), 1).index_add_(0, edge_index[1], torch.ones(edge_index.shape[1], 1))
        return total / count.clamp(min=1)


def one_column_graph() -> ExplanationGraph:
    """Two pools with three remote nodes each, of which the first has a row that deviates in the column that counts."""
    x = torch.zeros(8, 6)
    x[2, 0], x[5, 0] = 4.0, -4.0
    x[3, 1], x[4, 2], x[6, 3], x[7, 4] = 4.0, 4.0, 4.0, 4.0
    edges = torch.tensor([[2, 3, 4, 5, 6, 7, 0, 1], [0, 0, 0, 1, 1, 1, 0, 1]])
    score = OneColumn()(x, edges)[:2].detach()
    target = torch.cat([torch.zeros_like(score), score], 1).softmax(1)
    return ExplanationGraph(0, x, edges, target, torch.arange(10, 16), torch.ones(6, dtype=torch.int64), torch.zeros(6))


@pytest.mark.parametrize("explainer", ["trained", "gradient", "mixed", "norms"])
def test_the_column_and_the_nodes_that_the_model_reads_are_the_most_important(explainer: str):
    model = OneColumn()
    guide = Guide(model="a.b:c", explainer=explainer, threshold=0.0)
    masks = guide.make_explainer().importance(model, one_column_graph())
    assert int(masks.sf.argmax()) == 0 and (masks.sf > 0.9 * masks.sf.max()).sum() == 1
    assert set(masks.sn.argsort(descending=True)[:2].tolist()) == {0, 3}
    assert masks.ids.tolist() == list(range(10, 16)) and model.training and model.weight.requires_grad


def test_training_stops_at_the_threshold_and_masks_come_out_the_same_for_a_seed():
    graph, model = one_column_graph(), OneColumn()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    first = TrainedMasks(threshold=0.0, num_steps=40).importance(model, graph)
    assert len(calls) == 41  # one for the whole graph
    calls.clear()
    TrainedMasks(threshold=1e9, min_steps=3).importance(model, graph)
    assert len(calls) == 1 + 3 + 1
    again = TrainedMasks(threshold=0.0, num_steps=40).importance(model, graph)
    assert torch.equal(first.sn, again.sn) and torch.equal(first.sf, again.sf)
    assert first.divergence == again.divergence > 0


def test_trained_masks_take_pygs_models():
    pyg = pytest.importorskip("torch_geometric.nn")
    graph = one_column_graph()
    model = pyg.GraphSAGE(6, 8, 2, 2)
    masks = TrainedMasks(num_steps=5).importance(model, graph)
    assert masks.sn.numel() == 6 and masks.sf.numel() == 6


@pytest.mark.parametrize("explainer", EXPLAINERS)
def test_a_part_without_remote_nodes_has_masks_of_columns_alone(explainer: str):
    edges = torch.zeros(2, 1, dtype=torch.int64)
    nothing = torch.empty(0, dtype=torch.int64)
    graph = ExplanationGraph(0, torch.ones(1, 6), edges, torch.tensor([[0.5, 0.5]]), nothing, nothing, torch.ones(6))
    masks = Guide(model="a.b:c", explainer=explainer).make_explainer().importance(OneColumn(), graph)
    assert masks.sn.numel() == 0 and masks.sf.numel() == 6


def test_degrees_count_edges_into_the_core(folder):
    parts = open_parts(folder)
    pooled = pool_part(parts.part(2), 1)
    sources = torch.tensor(sorted(edges_between_parts(folder, 2)))[:, 0]
    graph = ExplanationGraph(
        2, torch.zeros(1 + pooled.num_remote, 4), pooled.edge_index, torch.ones(1, 2) / 2, pooled.ids, pooled.degree,
        torch.zeros(4),
    )  # fmt: skip
    masks = Degrees().importance(sage(), graph)
    counted = torch.stack([(sources == node).sum() for node in pooled.ids])
    assert bool((pooled.degree >= counted).all())  # which has no parallel edges
    assert int(masks.sn[pooled.degree.argmax()]) == 255


def test_rows_in_pieces_have_the_masks_and_gradients_of_all_at_once(folder, monkeypatch):
    parts = open_parts(folder)
    pooled, model = pool_part(parts.part(0), 4), sage().eval()
    x = torch.cat([parts.part(p).node_data["node"]["x"] for p in range(3)])
    graph = explain_part(pooled, model, parts.part(0).node_data["node"]["x"], x[pooled.ids])
    whole = {
        name: Guide(model="a.b:c", explainer=name).make_explainer().importance(model, graph) for name in EXPLAINERS
    }
    monkeypatch.setattr(explainers_module, "_PIECE_VALUES", 7 * WIDTH)
    for name, expected in whole.items():
        found = Guide(model="a.b:c", explainer=name).make_explainer().importance(model, graph)
        assert int((found.sn.int() - expected.sn.int()).abs().max()) <= 1
        torch.testing.assert_close(found.sf, expected.sf, rtol=1e-3, atol=1e-3)
    s, f = torch.rand(pooled.num_remote, requires_grad=True), torch.rand(WIDTH, requires_grad=True)
    masked = graph.mean_row + (graph.x[4:] - graph.mean_row) * s[:, None] * f
    weight = torch.randn(4 + pooled.num_remote, WIDTH)
    expected_gradients = torch.autograd.grad((masked * weight[4:]).sum(), (s, f))
    rows = explainers_module._MaskedRows.apply(s, f, graph)
    torch.testing.assert_close(rows, torch.cat([graph.x[:4], masked]))
    torch.testing.assert_close(torch.autograd.grad((rows * weight).sum(), (s, f)), expected_gradients)


def test_predictions_are_inferred_only_where_an_explainer_reads_them(folder):
    parts = open_parts(folder)
    pooled, model, calls = pool_part(parts.part(0), 2), sage(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    rows = torch.randn(pooled.num_remote, WIDTH)
    core = parts.part(0).node_data["node"]["x"]
    assert explain_part(pooled, model, core, rows, with_target=False).target.shape == (2, 0) and not calls
    assert explain_part(pooled, model, core, rows).target.shape == (2, CLASSES) and calls
    needing = [name for name in EXPLAINERS if Guide(model="a.b:c", explainer=name).make_explainer().needs_target]
    assert needing == ["trained", "mixed"]
