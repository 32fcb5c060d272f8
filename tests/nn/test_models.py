"""The reference models: equal to PyG's with copied weights; the same on whole graphs, trimmed batches and blocks."""

import pytest
import torch
from torch import nn

from gnnsys.nn import GAT, GCN, GIN, HGT, RGCN, GATConv, GCNConv, GraphSAGE, HeteroConv, SAGEConv
from gnnsys.nn.stack import Stack, hop_prefixes
from gnnsys.ops import CSC
from tests.support.grid import grid


@pytest.mark.parametrize("name, option", [("GraphSAGE", {}), ("GCN", {}), ("GAT", {"heads": 2})])
def test_equals_pygs_model_of_the_same_name(edge_index, rows, assert_same_layer, name, option):
    pyg = pytest.importorskip("torch_geometric.nn")
    ours = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GAT": GAT}[name](12, 8, 3, 5, **option)
    peer = getattr(pyg, name)(12, 8, 3, 5, **option)
    assert_same_layer(ours, peer, [rows(40, 12)], lambda model, x: model(x, edge_index))


def two_hop_batch() -> tuple[torch.Tensor, list[int]]:
    """Nodes hop by hop (2 seeds, 3, 4) and their in-edges, hop by hop."""
    row = torch.tensor([2, 3, 3, 4, 0, 5, 6, 6, 7, 8, 2])
    col = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4])
    return torch.stack([row, col]), [2, 3, 4]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("model", [GraphSAGE, GIN, GAT])
def test_trimmed_layers_give_the_seeds_rows_of_the_untrimmed_model(rows, model, num_layers):
    edge_index, num_sampled_nodes = two_hop_batch()
    network, x = model(12, 8, num_layers, 5).double(), rows(9, 12)
    trimmed = network(x, edge_index, num_sampled_nodes=num_sampled_nodes)
    whole = network(x, edge_index)
    assert trimmed.shape[0] == 2
    torch.testing.assert_close(trimmed, whole[:2])


class Wrapped(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x, edges):
        return self.conv(x, edges)


def test_gcn_refuses_to_be_trimmed_instead_of_giving_other_numbers(rows):
    edge_index, num_sampled_nodes = two_hop_batch()
    x, inside, mixed, unscaled = rows(9, 12), GraphSAGE(12, 8, 2, 5), GraphSAGE(12, 8, 2, 5), GraphSAGE(12, 8, 2, 5)
    mixed.convs[0] = GCNConv(12, 8)
    inside.convs[1] = Wrapped(GCNConv(8, 5))
    for network in (GCN(12, 8, 2, 5), mixed, inside):
        with pytest.raises(ValueError, match=r"GCNConv divides by degrees .* drop num_sampled_nodes"):
            network.double()(x, edge_index, num_sampled_nodes=num_sampled_nodes)
    unscaled.convs[0] = GCNConv(12, 8, normalize=False)
    unscaled.double()
    trimmed = unscaled(x, edge_index, num_sampled_nodes=num_sampled_nodes)
    torch.testing.assert_close(trimmed, unscaled(x, edge_index)[:2])


@pytest.mark.parametrize("model", [GraphSAGE, GCN, GAT, GIN])
def test_a_model_evaluated_in_inference_mode_goes_on_to_train(rows, model):
    edge_index, _ = two_hop_batch()
    network, x = model(12, 8, 2, 5).double(), rows(9, 12)
    with torch.inference_mode():
        seen = network(x, edge_index)
    out = network(x, edge_index)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), seen.clone())


def test_prefixes_shrink_hop_by_hop():
    edge_index, num_sampled_nodes = two_hop_batch()
    layers = hop_prefixes(CSC.from_edge_index(edge_index, 9), num_sampled_nodes, num_layers=2)
    assert [(layer.num_src, layer.num_dst, layer.num_edges) for layer in layers] == [(9, 5, 11), (5, 2, 5)]


def test_hops_that_do_not_add_up_are_refused(rows):
    edge_index, _ = two_hop_batch()
    with pytest.raises(ValueError, match="num_sampled_nodes adds up to 8, but x has 9 rows"):
        GraphSAGE(12, 8, 2, 5).double()(rows(9, 12), edge_index, num_sampled_nodes=[2, 3, 3])


def test_a_list_of_blocks_is_one_block_per_layer(edge_index, rows):
    model, x = GraphSAGE(12, 8, 2, 5).double(), rows(40, 12)
    csc = CSC.from_edge_index(edge_index, 40)
    seeds_block = CSC(csc.indptr[:7], csc.indices[: int(csc.indptr[6])], 40)
    torch.testing.assert_close(model(x, [csc, seeds_block]), model(x, csc)[:6])
    with pytest.raises(ValueError, match="edges has 1 blocks for 2 layers"):
        model(x, [csc])


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_every_model_learns_to_copy_a_label_through_normalised_layers(edge_index, rows, norm):
    torch.manual_seed(0)
    x, labels = rows(40, 12, dtype=torch.float32), torch.arange(40) % 3
    edge_type = torch.arange(edge_index.shape[1]) % 4
    models = [
        (GraphSAGE(12, 16, 2, 3, norm=norm), {}),
        (GCN(12, 64, 2, 3, norm=norm), {}),
        (GAT(12, 64, 2, 3, norm=norm, heads=2), {}),
        (GIN(12, 64, 2, 3, norm=norm), {}),
        (RGCN(12, 16, 2, 3, norm=norm, num_relations=4, num_bases=2), {"edge_type": edge_type}),
    ]
    for model, edge_rows in models:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        for _ in range(300):
            loss = torch.nn.functional.cross_entropy(model(x, edge_index, **edge_rows), labels)
            if loss.item() < 0.3:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < 0.3, type(model).__name__


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        GCN(4, 4, 0)
    with pytest.raises(ValueError, match="heads=3 must divide hidden_channels=8"):
        GAT(4, 8, 2, heads=3)
    with pytest.raises(ValueError, match="norm must be None or one of layer, batch"):
        GIN(4, 8, 2, norm="group")


def test_numbers_of_nodes_that_add_up_but_are_others_are_refused_or_right(rows):
    """Never read beyond the rows of a layer: refused where an edge would, else the first rows of the whole result."""
    edge_index, num_sampled_nodes = two_hop_batch()
    network, x = GraphSAGE(12, 8, 2, 5).double(), rows(9, 12)
    whole, refused = network(x, edge_index), 0
    for seeds in range(10):
        for first in range(10 - seeds):
            given = [seeds, first, 9 - seeds - first]
            try:
                out = network(x, edge_index, num_sampled_nodes=given)
            except ValueError as error:
                assert "does not belong to these edges" in str(error)
                assert given != num_sampled_nodes
                refused += 1
            else:
                torch.testing.assert_close(out, whole[:seeds])
    assert refused > 10
    for given in ([2, -1, 8], []):
        with pytest.raises(ValueError, match="a number >= 0 for each hop"):
            network(x, edge_index, num_sampled_nodes=given)


def test_what_a_batch_knows_of_its_hops_spares_looking_at_its_edges():
    edge_index, (seeds, first, _) = two_hop_batch()
    known = CSC.from_sorted(edge_index, 9, 9, ends={2: 5, 5: 11, 9: 11})
    assert known.comes_by_hops(seeds + first, seeds) and known.comes_by_hops(9, seeds + first)
    assert known.comes_by_hops(9, 9) and known.comes_by_hops(9, seeds)
    assert not known.comes_by_hops(4, 2) and not known.comes_by_hops(9, 3) and not known.comes_by_hops(2, 2)
    assert not CSC.from_sorted(edge_index, 9, 9).comes_by_hops(9, 9)
    short = CSC.from_edge_index(edge_index, 9, 5)  # as a block's: the last hop has no in-edges
    assert [layer.num_dst for layer in hop_prefixes(short, [2, 3, 4], 2)] == [5, 2]
    with pytest.raises(ValueError, match="asks for 9 destinations, but edges has 5"):
        hop_prefixes(short, [2, 3, 4], 3)


EDGES, TYPED = torch.tensor([[0, 1], [1, 0]]), ("a", "to", "a")
REFUSED = {  # call, what is said
    "edges of hops": (
        lambda x: GraphSAGE(12, 8, 2)(x, EDGES, num_sampled_nodes=[2, 0, 0], num_sampled_edges=[2, 0]),
        r"GraphSAGE has no argument 'num_sampled_edges': SAGEConv takes no rows of edges\. .*num_sampled_nodes alone",
    ),
    "PyG's word": (
        lambda x: GAT(12, 8, 2)(x, EDGES, num_sampled_nodes_per_hop=[2, 0, 0]),
        "GAT has no argument 'num_sampled_nodes_per_hop': GATConv takes edge_attr. .*num_sampled_nodes alone",
    ),
    "another layer's rows": (
        lambda x: GCN(12, 8, 2)(x, EDGES, edge_attr=torch.ones(2, 1)),
        "GCN has no argument 'edge_attr': GCNConv takes edge_weight$",
    ),
    "no rows of edges at all": (
        lambda x: GAT(12, 8, 2)(x, EDGES, return_attention_weights=True),
        "GAT has no argument 'return_attention_weights'",
    ),
    "nodes of hops by type, of a typed layer": (
        lambda x: HeteroConv({TYPED: GATConv(12, 8)})({"a": x}, {TYPED: EDGES}, num_sampled_nodes_dict={"a": [2, 0]}),
        "HeteroConv has no argument 'num_sampled_nodes_dict': GATConv takes edge_attr_dict",
    ),
    "edges of hops by type": (
        lambda x: HeteroConv({TYPED: SAGEConv(12, 8)})({"a": x}, {TYPED: EDGES}, num_sampled_edges_dict={TYPED: [2]}),
        "HeteroConv has no argument 'num_sampled_edges_dict': SAGEConv takes no rows of edges",
    ),
    "a typed model without rows of edges": (
        lambda x: HGT(12, 8, 2, metadata=(["a"], [TYPED]))({"a": x}, {TYPED: EDGES}, edge_attr_dict={TYPED: x}),
        "HGT has no argument 'edge_attr_dict': HGTConv takes no rows of edges",
    ),
}


@grid(case=REFUSED)
def test_a_keyword_that_no_layer_takes_is_refused_by_name(case):
    call, said = case
    with pytest.raises(ValueError, match=said):
        call(torch.ones(2, 12))


def test_a_layer_of_a_users_own_may_take_whatever_it_is_given():
    class Own(nn.Module):
        def forward(self, *args, **kwargs):
            return args[0] * kwargs["scale"]

    assert torch.equal(Stack([Own()], [12], None, 0.0)(torch.ones(2, 12), EDGES, scale=3), torch.full((2, 12), 3.0))
