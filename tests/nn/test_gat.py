"""GATConv beside PyG's with copied weights: heads, bipartite graphs, edge features, self loops, attention weights."""

import pytest
import torch

from gnnsys.nn import GATConv
from gnnsys.ops import CSC

pyg = pytest.importorskip("torch_geometric.nn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "option",
    [
        {},
        {"heads": 4},
        {"heads": 4, "concat": False},
        {"heads": 2, "add_self_loops": False, "negative_slope": 0.05},
        {"residual": True, "bias": False},
    ],
)
def test_equals_pyg(edge_index, rows, assert_same_layer, dtype, option):
    ours, peer = GATConv(12, 5, **option), pyg.GATConv(12, 5, **option)
    assert_same_layer(ours, peer, [rows(40, 12, dtype=dtype)], lambda layer, x: layer(x, edge_index))


@pytest.mark.parametrize("in_channels", [(12, 12), 12])
@pytest.mark.parametrize("add_self_loops", [True, False])
def test_equals_pyg_on_a_bipartite_graph(bipartite, rows, assert_same_layer, in_channels, add_self_loops):
    ours = GATConv(in_channels, 5, heads=2, add_self_loops=add_self_loops)
    peer = pyg.GATConv(in_channels, 5, heads=2, add_self_loops=add_self_loops)
    inputs = [rows(40, 12), rows(25, 12, seed=1)]
    assert_same_layer(ours, peer, inputs, lambda layer, src, dst: layer((src, dst), bipartite))


@pytest.mark.parametrize("fill_value", ["mean", 0.5])
@pytest.mark.parametrize("add_self_loops", [True, False])
def test_equals_pyg_with_edge_features(edge_index, rows, assert_same_layer, fill_value, add_self_loops):
    options = {"heads": 3, "edge_dim": 4, "fill_value": fill_value, "add_self_loops": add_self_loops}
    ours, peer = GATConv(12, 5, **options), pyg.GATConv(12, 5, **options)
    inputs = [rows(40, 12), rows(200, 4, seed=1)]
    assert_same_layer(ours, peer, inputs, lambda layer, x, edge_attr: layer(x, edge_index, edge_attr))


def test_a_block_gives_the_destinations_rows_of_the_whole_graph(edge_index, rows):
    """A block holds all in-edges of its destinations, so attention over it is attention over the graph."""
    csc = CSC.from_edge_index(edge_index, 40)
    block = CSC(csc.indptr[:11], csc.indices[: int(csc.indptr[10])], 40)
    conv, x = GATConv(12, 5, heads=2).double(), rows(40, 12)
    torch.testing.assert_close(conv(x, block), conv(x, csc)[:10])


def test_attention_weights_are_pygs_edge_by_edge(edge_index, rows):
    simple = edge_index.unique(dim=1)  # parallel edges cannot be told apart
    ours, peer = GATConv(12, 5, heads=2).double(), pyg.GATConv(12, 5, heads=2).double()
    ours.load_state_dict(peer.state_dict())
    out, (edges, alpha) = ours(rows(40, 12), simple, return_attention_weights=True)
    expected_out, (expected_edges, expected_alpha) = peer(rows(40, 12), simple, return_attention_weights=True)
    torch.testing.assert_close(out, expected_out)
    order, expected_order = (edges[0] * 40 + edges[1]).argsort(), (expected_edges[0] * 40 + expected_edges[1]).argsort()
    assert torch.equal(edges[:, order], expected_edges[:, expected_order])
    torch.testing.assert_close(alpha[order], expected_alpha[expected_order])


def test_attention_dropout_repeats_with_torchs_seed_and_is_off_in_evaluation(edge_index, rows):
    conv, x = GATConv(12, 5, heads=2, dropout=0.5).double(), rows(40, 12)

    def train_once(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return conv(x, edge_index)

    assert torch.equal(train_once(1), train_once(1))
    assert not torch.equal(train_once(1), train_once(2))
    assert not torch.equal(train_once(1), conv.eval()(x, edge_index))


def test_attention_dropout_keeps_the_expected_value(edge_index, rows):
    torch.manual_seed(0)
    conv, x = GATConv(12, 5, heads=2, dropout=0.3).double(), rows(40, 12)
    with torch.no_grad():
        mean = torch.stack([conv(x, edge_index) for _ in range(800)]).mean(0)
        expected = conv.eval()(x, edge_index)
    assert float((mean - expected).abs().max()) < 0.1 * float(expected.abs().max())


@pytest.mark.parametrize("option, message", [({"dropout": 1.0}, "dropout"), ({"fill_value": "max"}, "fill_value")])
def test_bad_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        GATConv(4, 4, **option)


def test_destinations_that_are_not_the_first_sources_are_not_taken_for_them():
    x, edges = torch.randn(4, 4) * 5, torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    layer = GATConv(4, 4, add_self_loops=False)
    every_second = x[::2]
    torch.testing.assert_close(layer((x, every_second), edges), layer((x, every_second.clone()), edges))


@pytest.mark.parametrize("edge_dim", [None, 2])
def test_autocast_gives_rows_of_its_dtype(edge_dim):
    layer = GATConv(4, 4, edge_dim=edge_dim)
    edges = torch.tensor([[0, 1], [1, 2]])
    x, edge_attr = torch.rand(3, 4), None if edge_dim is None else torch.rand(2, edge_dim)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, edges, edge_attr)
    torch.testing.assert_close(out.float(), layer(x, edges, edge_attr), rtol=0.05, atol=0.05)


def test_a_detached_half_has_no_gradient(edge_index, rows):
    """Rows of destinations that share their memory with the sources, and nothing else."""
    edges = edge_index[:, edge_index[1] < 10]
    ours, peer = GATConv(6, 4, heads=2).double(), pyg.GATConv(6, 4, heads=2).double()
    ours.load_state_dict(peer.state_dict())
    cuts = {
        "detached": lambda x: x[:10].detach(),
        "a parameter of its own": lambda x: x.detach()[:10].requires_grad_(),
        "the first rows": lambda x: x[:10],
        "scaled": lambda x: 2 * x[:10],
    }
    for name, cut in cuts.items():
        found = []
        for layer in (ours, peer):
            x = rows(40, 6).requires_grad_()
            dst = cut(x)
            out = layer((x, dst), edges)
            out.pow(2).sum().backward()
            found.append((out, x.grad, dst.grad if dst.is_leaf else None))
        for ours_, peers in zip(*found, strict=True):
            assert ours_ is peers or torch.allclose(ours_, peers, rtol=1e-10, atol=1e-10), name
