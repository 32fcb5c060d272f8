"""GCNConv beside PyG's with copied weights, and beside DGL's on blocks, where PyG's has no answer."""

import pytest
import torch

from gnnsys.nn import GCNConv
from gnnsys.ops import CSC

pyg = pytest.importorskip("torch_geometric.nn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("out_channels", [3, 20])
def test_equals_pyg(edge_index, rows, assert_same_layer, dtype, out_channels):
    ours, peer = GCNConv(12, out_channels), pyg.GCNConv(12, out_channels)
    assert_same_layer(ours, peer, [rows(40, 12, dtype=dtype)], lambda layer, x: layer(x, edge_index))


@pytest.mark.parametrize(
    "option", [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}, {"bias": False}]
)
def test_equals_pyg_with_edge_weights_and_their_gradient(edge_index, rows, assert_same_layer, option):
    single_loops = edge_index.unique(dim=1)  # of several weighted loops PyG keeps an arbitrary one
    ours, peer = GCNConv(12, 6, **option), pyg.GCNConv(12, 6, **option)
    inputs = [rows(40, 12), rows(single_loops.shape[1], seed=2).abs() + 0.1]
    assert_same_layer(ours, peer, inputs, lambda layer, x, weight: layer(x, single_loops, weight))


def test_improved_loops_weigh_two_without_edge_weights_too(edge_index, rows):
    """PyG drops the 2 when there are no edge weights; with weights of one it agrees with us."""
    no_loops = edge_index[:, edge_index[0] != edge_index[1]]
    ours, peer = GCNConv(12, 6, improved=True).double(), pyg.GCNConv(12, 6, improved=True).double()
    ours.load_state_dict(peer.state_dict())
    ones = torch.ones(no_loops.shape[1], dtype=torch.float64)
    torch.testing.assert_close(ours(rows(40, 12), no_loops), peer(rows(40, 12), no_loops, ones))


def test_equals_dgl_on_a_block(bipartite, rows, assert_same_layer):
    dgl = pytest.importorskip("dgl")
    loops = torch.arange(25).repeat(2, 1)
    no_loops = bipartite[:, bipartite[0] != bipartite[1]]
    looped = torch.cat([no_loops, loops], 1)
    ours, peer = GCNConv(12, 5), dgl.nn.GraphConv(12, 5, norm="both")
    dgl_block = dgl.create_block((looped[0], looped[1]), num_src_nodes=40, num_dst_nodes=25)
    csc = CSC.from_edge_index(bipartite, 40, 25)

    def copy() -> None:
        with torch.no_grad():
            ours.lin.weight.copy_(peer.weight.T)
            peer.bias.normal_()
            ours.bias.copy_(peer.bias)

    assert_same_layer(
        ours, peer, [rows(40, 12)], lambda layer, x: layer(x, csc), lambda layer, x: layer(dgl_block, x), copy
    )


def test_weights_on_a_block_count_in_both_degrees(bipartite, rows):
    """The oracle is the dense matrix D_dst^-1/2 (A + I) D_src^-1/2."""
    no_loops = bipartite[:, bipartite[0] != bipartite[1]]
    csc = CSC.from_edge_index(no_loops, 40, 25)
    weight = rows(no_loops.shape[1], seed=5).abs()
    dense = torch.zeros(25, 40, dtype=torch.float64).index_put((no_loops[1], no_loops[0]), weight, accumulate=True)
    dense = dense + torch.eye(25, 40, dtype=torch.float64)
    dense = dense * dense.sum(1, keepdim=True).pow(-0.5) * dense.sum(0).clamp(min=1e-300).pow(-0.5)
    conv, x = GCNConv(12, 5).double(), rows(40, 12)
    by_position = weight if csc.edge_ids is None else weight[csc.edge_ids]
    torch.testing.assert_close(conv(x, csc, by_position), dense @ conv.lin(x) + conv.bias)


def test_self_loops_without_normalisation_are_refused():
    with pytest.raises(ValueError, match="add_self_loops=True needs normalize=True"):
        GCNConv(4, 4, add_self_loops=True, normalize=False)


def test_a_pair_of_inputs_is_refused(bipartite, rows):
    with pytest.raises(ValueError, match="x must be one tensor"):
        GCNConv(12, 4)((rows(40, 12), rows(25, 12)), bipartite)


def test_of_several_self_loops_the_last_one_counts_and_alone_has_a_gradient(rows):
    """PyG on the CPU keeps the last one's weight, and gives its gradient to the others too, which do not count."""
    edges = torch.tensor([[0, 1, 1, 2, 1, 0, 1, 2], [1, 1, 0, 2, 1, 2, 1, 2]])
    overwritten = torch.tensor([1, 3, 4])
    x, weight = rows(3, 4), (rows(8, seed=2).abs() + 0.1).requires_grad_()
    ours, peer = GCNConv(4, 2).double(), pyg.GCNConv(4, 2).double()
    ours.load_state_dict(peer.state_dict())
    found = []
    for layer in (ours, peer):
        out = layer(x, edges, weight)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), weight)
        found.append((out, grad))
    found[1][1][overwritten] = 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda w: ours(x, edges, w), weight)
