"""GINConv beside PyG's with copied weights."""

import pytest
import torch
from torch import nn

from gnnsys.nn import GINConv

pyg = pytest.importorskip("torch_geometric.nn")


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("train_eps", [True, False])
def test_equals_pyg(edge_index, rows, assert_same_layer, dtype, train_eps):
    ours, peer = GINConv(mlp(12), 0.3, train_eps), pyg.GINConv(mlp(12), 0.3, train_eps)
    assert_same_layer(ours, peer, [rows(40, 12, dtype=dtype)], lambda layer, x: layer(x, edge_index))


def test_equals_pyg_on_a_bipartite_graph(bipartite, rows, assert_same_layer):
    ours, peer = GINConv(mlp(12), 0.3, True), pyg.GINConv(mlp(12), 0.3, True)
    inputs = [rows(40, 12), rows(25, 12, seed=1)]
    assert_same_layer(ours, peer, inputs, lambda layer, src, dst: layer((src, dst), bipartite))


def test_reset_parameters_draws_the_mlp_anew_and_restores_eps():
    conv = GINConv(mlp(12), 0.3, train_eps=True)
    before = {name: value.clone() for name, value in conv.state_dict().items()}
    with torch.no_grad():
        conv.eps.fill_(7.0)
    conv.reset_parameters()
    assert conv.eps.item() == pytest.approx(0.3)
    assert not torch.equal(conv.nn[0].weight, before["nn.0.weight"])
