"""SAGEConv beside PyG's and DGL's with copied weights, in every shape it takes its edges in."""

import pytest
import torch
from torch import nn

from gnnsys.nn import SAGEConv
from gnnsys.nn import order as order_module
from gnnsys.ops import CSC
from gnnsys.sampling import Block

pyg = pytest.importorskip("torch_geometric.nn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize("out_channels", [3, 20])
def test_equals_pyg_on_an_edge_index(edge_index, rows, assert_same_layer, dtype, aggr, out_channels):
    ours, peer = SAGEConv(12, out_channels, aggr=aggr), pyg.SAGEConv(12, out_channels, aggr=aggr)
    assert_same_layer(ours, peer, [rows(40, 12, dtype=dtype)], lambda layer, x: layer(x, edge_index))


@pytest.mark.parametrize("option", [{"normalize": True}, {"root_weight": False}, {"project": True}, {"bias": False}])
def test_equals_pyg_with_every_option(edge_index, rows, assert_same_layer, option):
    ours, peer = SAGEConv(12, 6, **option), pyg.SAGEConv(12, 6, **option)
    assert_same_layer(ours, peer, [rows(40, 12)], lambda layer, x: layer(x, edge_index))


def test_equals_pyg_on_a_bipartite_graph(bipartite, rows, assert_same_layer):
    ours, peer = SAGEConv((12, 7), 5), pyg.SAGEConv((12, 7), 5)
    inputs = [rows(40, 12), rows(25, 7, seed=1)]
    assert_same_layer(ours, peer, inputs, lambda layer, src, dst: layer((src, dst), bipartite))


def test_equals_pyg_when_destinations_have_no_rows(bipartite, rows, assert_same_layer):
    ours, peer = SAGEConv(12, 5), pyg.SAGEConv(12, 5)
    ours.lin_r, peer.lin_r = nn.Identity(), nn.Identity()
    assert_same_layer(ours, peer, [rows(40, 12)], lambda layer, x: layer((x, None), bipartite, size=(40, 25)))


@pytest.mark.parametrize("aggr", ["mean", "pool"])
def test_equals_dgl_on_a_block(bipartite, rows, assert_same_layer, aggr):
    dgl = pytest.importorskip("dgl")
    if aggr == "pool":
        ours, peer = SAGEConv(12, 5, aggr="max", project=True), dgl.nn.SAGEConv(12, 5, "pool")
    else:
        ours, peer = SAGEConv(12, 5), dgl.nn.SAGEConv(12, 5, "mean")
    dgl_block = dgl.create_block((bipartite[0], bipartite[1]), num_src_nodes=40, num_dst_nodes=25)
    block = Block({("node", "to", "node"): CSC.from_edge_index(bipartite, 40, 25)}, {"node": 40}, {"node": 25})

    def copy() -> None:
        with torch.no_grad():
            ours.lin_l.weight.copy_(peer.fc_neigh.weight)
            ours.lin_r.weight.copy_(peer.fc_self.weight)
            peer.fc_self.bias.normal_()
            ours.lin_l.bias.copy_(peer.fc_self.bias)
            if aggr == "pool":
                ours.lin.load_state_dict(peer.fc_pool.state_dict())

    assert_same_layer(
        ours, peer, [rows(40, 12)], lambda layer, x: layer(x, block), lambda layer, x: layer(dgl_block, x), copy
    )


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_both_orders_of_the_two_halves_give_one_result(edge_index, rows, monkeypatch, aggr):
    conv, x = SAGEConv(12, 6, aggr=aggr).double(), rows(40, 12)
    results = []
    for first in (True, False):
        monkeypatch.setattr("gnnsys.nn.sage.transform_first", lambda *_, first=first: first)
        results.append(conv(x, edge_index))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_rows_are_transformed_first_only_when_that_is_less_work(edge_index, bipartite, rows):
    square = CSC.from_edge_index(edge_index, 40)
    assert order_module.transform_first(square, rows(40, 64).requires_grad_(), 8)
    assert not order_module.transform_first(square, rows(40, 8).requires_grad_(), 64)
    few_destinations = CSC.from_edge_index(bipartite[:, :4] % 2, 40, 2)
    assert not order_module.transform_first(few_destinations, rows(40, 64).requires_grad_(), 60)


def test_the_two_halves_compose_to_the_layer(edge_index, rows):
    conv, x, csc = SAGEConv(12, 6).double(), rows(40, 12), CSC.from_edge_index(edge_index, 40)
    by_hand = conv.transform(conv.aggregate(csc, x)) + conv.lin_l.bias + conv.lin_r(x)
    torch.testing.assert_close(by_hand, conv(x, csc))


@pytest.mark.parametrize("first", [True, False])
def test_an_aggregation_of_the_users_own_is_what_is_used(edge_index, rows, monkeypatch, first):
    class Doubled(SAGEConv):
        def aggregate(self, csc: CSC, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().aggregate(csc, rows)

    monkeypatch.setattr("gnnsys.nn.sage.transform_first", lambda *_: first)
    conv, x = Doubled(12, 6).double(), rows(40, 12).requires_grad_()
    by_hand = conv.transform(conv.aggregate(CSC.from_edge_index(edge_index, 40), x)) + conv.lin_l.bias + conv.lin_r(x)
    torch.testing.assert_close(conv(x, edge_index), by_hand)


def test_what_a_hook_has_seen_of_a_product_stays_as_it_was(edge_index, rows):
    conv, x, seen = SAGEConv(12, 60).double(), rows(40, 12), []
    conv.lin_l.register_forward_hook(lambda module, given, out: seen.append((out, out.clone())))
    conv.lin_l.register_full_backward_hook(lambda *_: None)
    conv(x.requires_grad_(), edge_index).sum().backward()
    assert torch.equal(*seen[0])


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="aggr must be one of sum, mean, max, min, got 'median'"):
        SAGEConv(4, 4, aggr="median")
