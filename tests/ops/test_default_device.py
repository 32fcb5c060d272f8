"""`torch.set_default_device` is for a user's own tensors: what ops and layers make is where their inputs are.

A default of "meta" shows on any machine what is made without a device: such a tensor has no values.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gnnsys.nn import GAT, GCN, GIN, RGCN, GATConv, GCNConv, GraphSAGE, RGCNConv, SAGEConv
from gnnsys.ops import (
    CSC,
    BufferPool,
    IdTable,
    PairTable,
    bfs_order,
    class_features,
    compact_scratch,
    degrees,
    induced_subgraph,
    parse_table,
    planted_edges,
    planted_labels,
    random_permutation,
    rmat_edges,
    spmm,
)
from gnnsys.ops.part_structure import empty_bits

EDGES = torch.tensor([[0, 1, 2, 2, 3, 4, 1, 0, 0], [0, 0, 1, 1, 2, 2, 2, 2, 0]])
X = torch.rand(5, 6)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def layers() -> list[tuple[nn.Module, dict[str, torch.Tensor]]]:
    weight, features, kinds = torch.rand(9), torch.rand(9, 3), torch.arange(9) % 2
    return [
        (SAGEConv(6, 2), {}),
        (SAGEConv(6, 2, aggr="max"), {}),
        (GCNConv(6, 2), {}),
        (GCNConv(6, 2), {"edge_weight": weight}),
        (GATConv(6, 2, dropout=0.5), {}),
        (GATConv(6, 2, edge_dim=3), {"edge_attr": features}),
        (GATConv(6, 2, edge_dim=3, fill_value=1.0), {"edge_attr": features}),
        (RGCNConv(6, 2, 2), {"edge_type": kinds}),
        *((model(6, 4, 2, 3), {}) for model in (GraphSAGE, GCN, GAT, GIN)),
        (RGCN(6, 4, 2, 3, num_relations=2), {"edge_type": kinds}),
    ]


def test_layers_run_where_their_rows_are(request: pytest.FixtureRequest):
    made = layers()
    request.getfixturevalue("elsewhere")
    for layer, told in made:
        x = X.clone().requires_grad_()
        out = layer(x, EDGES.clone(), **told)
        first = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)[0]
        first.pow(2).sum().backward()
        assert out.device.type == x.grad.device.type == "cpu", layer


@pytest.mark.usefixtures("elsewhere")
def test_ops_make_what_they_return_on_the_host():
    csc = CSC.from_edge_index(EDGES, 5)
    order = random_permutation(8, key=1)
    table = IdTable(100)
    made = {
        "dst": csc.dst(),
        "in_degrees": csc.in_degrees(),
        "transpose": csc.transpose().indices,
        "sorted": CSC.from_sorted(EDGES[:, EDGES[1].argsort(stable=True)], 5, 5).indptr,
        "spmm": spmm(csc, X, reduce="mean"),
        "degrees": degrees(csc.indices, 5),
        "induced": induced_subgraph(csc, EDGES[0, :2].clone()).indices,
        "bfs": bfs_order(csc, EDGES[0, :1].clone()),
        "rmat": rmat_edges(order, 16, 0.5, 0.2, 0.2, 1),
        "planted": planted_edges(order, order, 16, num_classes=2, homophily=0.9, key=1),
        "table": parse_table(b"0 1\n", "ii")[0],
        "empty table": parse_table(b"", "i")[0],
        "bits": empty_bits(100),
        "permutation": order,
        "labels": planted_labels(order, 2),
        "features": class_features(planted_labels(order, 2), X, 0.1, 3),
        "scratch": compact_scratch(10),
        "buffer": BufferPool(1).empty((3,), torch.float32),
        "pairs": PairTable(8).pairs()[1],
        "ids": table.insert(EDGES[0].clone())[0],
    }
    for name, tensor in made.items():
        assert tensor.device.type == "cpu", name
