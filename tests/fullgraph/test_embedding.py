"""Embeddings of parts in front of full-graph training: what one process does with `nn.Embedding`, on several ranks."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.fullgraph import ByNodeType, HybridParallel
from gnnsys.graph import Graph, typed_graph
from gnnsys.nn import RGCN, InputEncoder, SAGEConv, TypedRGCNConv
from gnnsys.partition import partition_graph
from gnnsys.store import DistEmbedding, SparseAdam, SparseSGD
from tests.fullgraph.dense import random_graph
from tests.support.processes import run_ranks

DIM, STEPS = 6, 3
OPTIMIZERS: dict[str, tuple[Any, Any, Any, float]] = {  # of parameters, of torch's embedding, of ours; learning rate
    "sgd": (torch.optim.SGD, torch.optim.SGD, SparseSGD, 0.3),
    "adam": (torch.optim.Adam, torch.optim.SparseAdam, SparseAdam, 0.05),
}
TRAIN = """
import sys, torch, gnnsys
from tests.fullgraph.test_embedding import OPTIMIZERS, train_parts
for folder in sys.argv[1:]:
    with gnnsys.init(timeout=120) as session:
        graph = gnnsys.open(f"{folder}/parts")
        torch.save({name: train_parts(graph, name) for name in OPTIMIZERS}, f"{folder}/{session.rank}")
"""


def make_typed() -> Graph:
    graph = typed_graph(80, num_features=DIM)
    del graph.node_data["author"]["x"]
    return graph


def make_plain() -> Graph:
    graph = random_graph(60, 300, 1)
    return Graph.from_edge_index(graph.edge_index(), 60, {"y": torch.arange(60) % 3})


def make_model(graph: Any) -> Any:
    torch.manual_seed(3)
    if graph.is_homogeneous:
        return nn.ModuleList([SAGEConv(DIM, 8), nn.ReLU(), SAGEConv(8, 3)])
    return RGCN(DIM, 8, 2, 3, metadata=graph, targets=["paper"])


def loss_of(out: Any, original_ids: Any) -> Tensor:
    """A rank's share of a sum over all nodes that have a result: each wants something of its own."""
    rows, ids = (out, original_ids) if isinstance(out, Tensor) else (out["paper"], original_ids["paper"])
    want = torch.stack([torch.sin(ids * 1.0), torch.cos(ids * 2.0), torch.sin(ids * 3.0)], 1)
    return (rows - want).square().sum() / 100


def train_parts(graph: Any, name: str) -> dict[str, Any]:
    """First values of an embedding, its rows after the steps, both by the user's ids, and the losses of all ranks."""
    node_type = "node" if graph.is_homogeneous else "author"
    dense_kind, _, sparse_kind, lr = OPTIMIZERS[name]
    model = HybridParallel(make_model(graph), graph)
    embedding = DistEmbedding(graph, dim=DIM, node_type=node_type, name=name, init=("uniform", -1.0, 1.0, 7))
    dense = dense_kind(model.parameters(), lr=lr)
    sparse = sparse_kind([embedding], lr=lr, reduction="sum")
    by_user = graph.global_ids(torch.arange(graph.num_nodes(node_type)), node_type)
    first, losses = embedding.table[:][by_user], []
    for _ in range(STEPS):
        rows = embedding(model.share.global_ids(node_type))
        out = model(rows if graph.is_homogeneous else {**model.share.rows("x"), node_type: rows})
        loss = loss_of(out, model.nodes)
        dense.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
        losses.append(model.total(loss.detach()))
    return {"first": first, "rows": embedding.table[:][by_user], "losses": losses}


def train_whole(graph: Graph, name: str, first: Tensor) -> tuple[Tensor, list[float]]:
    """The same by torch alone, on the whole graph."""
    dense_kind, sparse_kind, _, lr = OPTIMIZERS[name]
    model, embedding = make_model(graph), nn.Embedding.from_pretrained(first.clone(), freeze=False, sparse=True)
    optimizers = [dense_kind(model.parameters(), lr=lr), sparse_kind(embedding.parameters(), lr=lr)]
    losses = []
    for _ in range(STEPS):
        rows = embedding(torch.arange(first.shape[0]))
        if graph.is_homogeneous:
            one, relu, two = model
            loss = loss_of(two(relu(one(rows, graph.csc())), graph.csc()), torch.arange(60))
        else:
            x = {t: data["x"] for t, data in graph.node_data.items() if "x" in data}
            out = model({**x, "author": rows}, {t: graph.csc(t) for t in graph.edge_types})
            loss = loss_of(out, {"paper": torch.arange(graph.num_nodes("paper"))})
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return embedding.weight.detach(), losses


def test_rows_train_on_two_ranks_as_an_embedding_of_torch_does_on_the_whole_graph(tmp_path):
    graphs = {tmp_path / "plain": make_plain(), tmp_path / "typed": make_typed()}
    for folder, graph in graphs.items():
        partition_graph(graph, 2, folder / "parts", objective="communication")
    run_ranks(TRAIN, [1, 1], *graphs)
    for folder, rank in itertools.product(graphs, range(2)):
        graph, found = graphs[folder], torch.load(folder / str(rank), weights_only=True)
        for name, of in found.items():
            want, losses = train_whole(graph, name, of["first"])
            assert float((want - of["first"]).abs().max()) > 0.01, "the steps do something"
            torch.testing.assert_close(of["rows"], want, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert of["losses"] == pytest.approx(losses, rel=1e-5)


def test_an_embedding_inside_the_model_is_refused_with_what_to_write(tmp_path):
    typed, plain = make_typed(), make_plain()
    conv = TypedRGCNConv(DIM, 3, typed.edge_types)
    partition_graph(plain, 2, tmp_path / "parts")
    inside = nn.Sequential(nn.Sequential(nn.Embedding(40, DIM)), nn.ReLU())
    for layers, graph, nodes in (
        ([nn.Embedding(60, DIM), SAGEConv(DIM, 3)], plain, "model.nodes"),
        ([ByNodeType({"author": nn.Embedding(40, DIM), "paper": nn.Identity()}), conv], typed, "model.nodes['author']"),
        ([ByNodeType({"author": inside, "paper": nn.Identity()}), conv], typed, "model.nodes['author']"),
        ([nn.Embedding(40, DIM), conv], typed, "model.nodes['paper']"),
    ):
        match = rf"^Embedding looks rows up by id.* x(\['\w+'\])? = embedding\({re.escape(nodes)}\)"
        with pytest.raises(ValueError, match=match):
            HybridParallel(layers, graph)
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(tmp_path / "parts")
        layers = [DistEmbedding(graph, dim=DIM, node_type="node"), SAGEConv(DIM, 3)]
        with pytest.raises(ValueError, match=r"^DistEmbedding looks.* x = embedding\(model.share.global_ids\(\)\)"):
            HybridParallel(layers, graph)
        by_type = ByNodeType({"author": DistEmbedding(graph, dim=DIM, node_type="node", name="other")})
        with pytest.raises(ValueError, match=r"^DistEmb.* = embedding\(model.share.global_ids\('author'\)\)"):
            HybridParallel([by_type, conv], typed)


def test_an_input_encoder_among_the_layers_is_refused_when_the_model_is_made():
    typed = make_typed()
    conv = TypedRGCNConv(DIM, 3, typed.edge_types)
    encoder = InputEncoder(typed, DIM, embed=["author"])
    for first in (encoder, nn.Sequential(encoder), ByNodeType({"author": encoder, "paper": nn.Identity()})):
        with pytest.raises(ValueError, match=r"^InputEncoder takes a batch .* layers are given rows: .* ByNodeType"):
            HybridParallel([first, conv], typed)


class Categories(nn.Module):
    """Rows of a category, which the first column has, and a linear layer on the others: no ids of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.linear = nn.Embedding(4, DIM), nn.Linear(DIM - 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.category(x[:, 0].long().clamp(0, 3)) + self.linear(x[:, 1:])


def test_an_embedding_that_a_users_own_encoder_calls_is_the_users_own():
    graph = make_typed()
    encode, conv = ByNodeType({t: Categories() for t in graph.node_types}), TypedRGCNConv(DIM, 3, graph.edge_types)
    x = {t: torch.rand(graph.num_nodes(t), DIM) * 4 for t in graph.node_types}
    edges = {t: graph.edge_index(t) for t in graph.edge_types}
    found, want = HybridParallel([encode, conv], graph)(x), conv(encode(x), edges)
    assert found.keys() == want.keys()
    for node_type, rows in found.items():
        torch.testing.assert_close(rows, want[node_type])
