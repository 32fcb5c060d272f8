"""RGCNConv beside PyG's with copied weights: plain, basis and block-diagonal weights, with features and without."""

import pytest
import torch

from gnnsys.nn import RGCNConv

pyg = pytest.importorskip("torch_geometric.nn")

NUM_RELATIONS = 6  # relation 4 has no edges


@pytest.fixture
def edge_type(edge_index):
    generator = torch.Generator().manual_seed(8)
    types = torch.randint(0, NUM_RELATIONS - 1, (edge_index.shape[1],), generator=generator)
    return torch.where(types == 4, 5, types)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
@pytest.mark.parametrize("option", [{}, {"num_bases": 2}, {"num_blocks": 3}])
def test_equals_pyg(edge_index, edge_type, rows, assert_same_layer, dtype, aggr, option):
    ours = RGCNConv(12, 6, NUM_RELATIONS, aggr=aggr, **option)
    peer = pyg.RGCNConv(12, 6, NUM_RELATIONS, aggr=aggr, **option)
    inputs = [rows(40, 12, dtype=dtype)]
    assert_same_layer(ours, peer, inputs, lambda layer, x: layer(x, edge_index, edge_type))


@pytest.mark.parametrize("option", [{}, {"num_bases": 2}, {"root_weight": False}, {"bias": False}])
def test_equals_pyg_without_features(edge_index, edge_type, option):
    ours, peer = RGCNConv(40, 6, NUM_RELATIONS, **option), pyg.RGCNConv(40, 6, NUM_RELATIONS, **option)
    ours.load_state_dict(peer.state_dict())
    out, expected = ours(None, edge_index, edge_type), peer(None, edge_index, edge_type)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(out.square().sum(), list(ours.parameters()))
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(peer.parameters()))
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_node_ids_choose_rows_of_the_weights(edge_index, edge_type):
    ours, peer = RGCNConv(100, 6, NUM_RELATIONS), pyg.RGCNConv(100, 6, NUM_RELATIONS)
    ours.load_state_dict(peer.state_dict())
    ids = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:40]
    torch.testing.assert_close(ours(ids, edge_index, edge_type), peer(ids, edge_index, edge_type))


def test_equals_pyg_on_a_bipartite_graph(bipartite, rows, assert_same_layer):
    types = torch.arange(bipartite.shape[1]) % NUM_RELATIONS
    ours, peer = RGCNConv((12, 7), 5, NUM_RELATIONS), pyg.RGCNConv((12, 7), 5, NUM_RELATIONS)
    inputs = [rows(40, 12, dtype=torch.float32), rows(25, 7, seed=1, dtype=torch.float32)]
    assert_same_layer(ours, peer, inputs, lambda layer, src, dst: layer((src, dst), bipartite, types))


def test_a_graph_without_edges_leaves_root_and_bias(rows):
    conv, x = RGCNConv(12, 6, NUM_RELATIONS).double(), rows(40, 12)
    nothing = torch.empty(2, 0, dtype=torch.int64)
    torch.testing.assert_close(conv(x, nothing, torch.empty(0, dtype=torch.int64)), x @ conv.root + conv.bias)


@pytest.mark.parametrize("bad", [NUM_RELATIONS, -1])
def test_a_relation_out_of_range_is_refused(edge_index, edge_type, rows, bad):
    edge_type[7] = bad
    with pytest.raises(ValueError, match=r"edge_type must be in \[0, 6\)"):
        RGCNConv(12, 6, NUM_RELATIONS)(rows(40, 12).float(), edge_index, edge_type)


def test_two_decompositions_at_once_are_refused():
    with pytest.raises(ValueError, match="num_bases and num_blocks exclude each other"):
        RGCNConv(12, 6, NUM_RELATIONS, num_bases=2, num_blocks=2)


def test_blocks_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="num_blocks=5 must divide"):
        RGCNConv(12, 6, NUM_RELATIONS, num_blocks=5)
