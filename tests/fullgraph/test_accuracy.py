"""Accuracy on a real graph beside PyG's single-process full-graph training. Skipped, with the reason, without the data.

Two trainings from the same parameters differ by their dropout masks alone, which are torch's there and keyed by node
here. Such differences spread by 0.009 on cora (ten seeds of GCN; 1000 test nodes), so means of two or three seeds may
be apart by what is said below, three standard errors and more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from gnnsys.graph import Graph
from gnnsys.graph.datasets import available_datasets, dataset
from gnnsys.nn import GCNConv, SAGEConv
from gnnsys.partition import PartitionOptions, assign_parts
from tests.fullgraph.thread_ranks import run_ranks

pyg = pytest.importorskip("torch_geometric.nn")

EPOCHS, HIDDEN = 40, 16
KINDS = {  # ours, PyG's, seeds, how far apart the means may be, what ours must reach whatever PyG does
    "GCN": (GCNConv, pyg.GCNConv, 3, 0.016, 0.77),
    "SAGE": (SAGEConv, pyg.SAGEConv, 2, 0.03, 0.74),
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    if "cora" not in available_datasets():
        pytest.skip("cora is not there: set GNNSYS_DATA to the folder that has cora.npz")
    return dataset("cora")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layers_of(conv: Callable[..., nn.Module], graph: Graph, seed: int, dropout: float = 0.5) -> list[nn.Module]:
    torch.manual_seed(seed)
    rows = graph.node_data["node"]
    width, num_classes = rows["x"].shape[1], int(rows["y"].max()) + 1
    return [conv(width, HIDDEN), nn.ReLU(), nn.Dropout(dropout), conv(HIDDEN, num_classes)]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)


def by_pyg(layers: list[nn.Module], graph: Graph, epochs: int = EPOCHS) -> float:
    """Test accuracy of the layers trained by PyG alone."""
    rows, edges = graph.node_data["node"], graph.edge_index()
    model = nn.ModuleList(layers)
    optimizer = adam(list(model.parameters()))

    def forward():
        first, relu, drop, last = model
        return last(drop(relu(first(rows["x"], edges))), edges)

    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(forward()[rows["train_mask"]], rows["y"][rows["train_mask"]]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = forward().argmax(1) == rows["y"]
    return float(right[rows["test_mask"]].float().mean())


def by_ranks(layers: list[nn.Module], graph: Graph, world_size: int, seed: int, epochs: int = EPOCHS) -> float:
    """The same by `HybridParallel`."""
    ranks = assign_parts(graph, world_size, options=PartitionOptions(objective="communication")).assignment.subpart[
        "node"
    ]
    schedule = BinSchedule(packing=Packing(num_bins=2))

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, schedule=schedule, group=group, timeout=60, seed=seed
        )
        x, y, train, test = (model.share.rows(name) for name in ("x", "y", "train_mask", "test_mask"))
        optimizer, count = adam(list(model.parameters())), model.total(train.sum())
        for _ in range(epochs):
            optimizer.zero_grad()
            (F.cross_entropy(model(x)[train], y[train], reduction="sum") / count).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x).argmax(1) == y
        return model.total((right & test).sum()) / model.total(test.sum())

    (score,) = set(run_ranks(world_size, work))
    return score


@pytest.mark.long  # test_exact.py compares gradients with plain modules, and the next test ends where PyG does
@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_is_that_of_pyg_on_one_process_to_within_noise(kind, graph):
    ours, theirs, num_seeds, noise, at_least = KINDS[kind]
    want = [by_pyg(layers_of(theirs, graph, seed), graph) for seed in range(num_seeds)]
    got = [by_ranks(layers_of(ours, graph, seed), graph, 1, seed) for seed in range(num_seeds)]
    on_three = by_ranks(layers_of(ours, graph, 0), graph, 3, 0)
    print(f"cora {kind}: PyG {want}, one rank {got}, three ranks {on_three}")
    mean, pyg_mean = sum(got) / len(got), sum(want) / len(want)
    assert abs(mean - pyg_mean) <= noise and mean >= at_least
    assert abs(on_three - got[0]) <= 0.003, "the same masks: sums are rounded in another order, no more"


def test_without_dropout_pygs_own_layers_end_where_pyg_does(graph):
    made = layers_of(pyg.GCNConv, graph, 0, dropout=0.0)
    alone = by_pyg(copy.deepcopy(made), graph, epochs=15)
    assert abs(by_ranks(made, graph, 3, 0, epochs=15) - alone) <= 0.003
