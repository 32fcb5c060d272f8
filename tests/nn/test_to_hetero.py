"""PyG's transformations of models take our layers as they take PyG's own, or say that they cannot."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import gnnsys.nn as ours
from tests.support.customise import CHANGES

EDGE_TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "self", "a")]
METADATA = (["a", "b"], EDGE_TYPES)
SIZES = {"a": 10, "b": 7}


class Model(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = first, nn.Linear(6, 6), second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.between(self.first(x, edge_index).relu()), edge_index)


class ByName(nn.Module):
    """Calls one layer by keywords, and one with a keyword for the edges alone."""

    def __init__(self, lib: Any, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first or lib.SAGEConv(5, 6), lib.SAGEConv(6, 3)
        self.edges = "edges" if lib is ours else "edge_index"

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = {self.edges: edge_index}
        return self.second(self.first(x=x, **edges).relu(), **edges)


def typed_graph(equal_widths: bool = False) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = {t: torch.randn(n, 5 if t == "a" or equal_widths else 4, generator=generator) for t, n in SIZES.items()}
    edges = {}
    for src, name, dst in EDGE_TYPES:
        ends = [torch.randint(SIZES[t], (30,), generator=generator) for t in (src, dst)]
        edges[src, name, dst] = torch.stack(ends)
    return x, edges


# One with lazily sized layers, as PyG's users write it, one with sizes.
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "sage": lambda lib, _, num_out: lib.SAGEConv((-1, -1), num_out),
    "sage, max": lambda lib, num_in, num_out: lib.SAGEConv(num_in, num_out, aggr="max"),
    "gat": lambda lib, _, num_out: lib.GATConv((-1, -1), num_out, heads=2, concat=False, add_self_loops=False),
    "gat, residual": lambda lib, _, o: lib.GATConv((-1, -1), o, add_self_loops=False, residual=True),
    "gin": lambda lib, num_in, num_out: lib.GINConv(nn.Linear(num_in, num_out)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_transformed_model_is_pygs_transformed(name: str):
    x, edges = typed_graph(equal_widths=name in ("sage, max", "gin"))
    make, outputs, gradients = LAYERS[name], [], []
    models = [Model(make(lib, 5, 6), make(lib, 6, 3)) for lib in (ours, pyg)]
    typed = [pyg.to_hetero(model, METADATA, aggr="mean") for model in models]
    assert type(models[0].first) is type(make(ours, 5, 6))  # as it was
    for model in typed:
        with torch.no_grad():
            model(x, edges)  # gives sizes to what has none
    typed[0].load_state_dict(typed[1].state_dict())
    for model in typed:
        out = model(x, edges)
        sum(rows.pow(2).sum() for rows in out.values()).backward()
        outputs.append(out)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_a_model_that_calls_layers_by_keywords_is_pygs_transformed():
    x, edges = typed_graph(equal_widths=True)
    typed = [pyg.to_hetero(ByName(lib), METADATA) for lib in (ours, pyg)]
    typed[0].load_state_dict(typed[1].state_dict())
    torch.testing.assert_close(typed[0](x, edges), typed[1](x, edges), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="transform that"):
        pyg.to_hetero(ByName(ours, first=ours.GraphSAGE(5, 6, 2)), METADATA)


def test_bipartite_layers_that_add_self_loops_are_refused_as_pygs_are():
    for lib in (ours, pyg):
        with pytest.raises(ValueError, match="add_self_loops"):
            pyg.to_hetero(Model(lib.GATConv((-1, -1), 6), lib.GATConv((-1, -1), 3)), METADATA)


def test_what_weighs_messages_and_what_is_no_layer_is_refused_with_the_remedy():
    model = Model(ours.SAGEConv(5, 6), ours.SAGEConv(6, 3))
    with pytest.raises(ValueError, match=r"use to_hetero, gnnsys.nn.RGCNConv\(num_bases=...\), or PyG's layer"):
        pyg.to_hetero_with_bases(model, METADATA, num_bases=2)
    assert type(model.first) is ours.SAGEConv
    for whole in (ours.GraphSAGE(5, 6, 2), Model(ours.GraphSAGE(5, 6, 2), ours.SAGEConv(6, 3))):
        with pytest.raises(ValueError, match="transform that"):
            pyg.to_hetero(whole, METADATA)


def test_a_layer_that_was_only_traced_works_copies_and_pickles():
    from torch_geometric.nn.fx import symbolic_trace

    model = Model(ours.SAGEConv(5, 6), ours.SAGEConv(6, 3))
    x, edges = typed_graph()
    given = x["a"], edges["a", "self", "a"]
    expected = model(*given)
    symbolic_trace(model)
    assert isinstance(model.first, pyg.MessagePassing) and isinstance(model.first, ours.SAGEConv)
    assert torch.equal(model(*given), expected)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.first) is ours.SAGEConv
        assert torch.equal(again(*given), expected)


@pytest.mark.parametrize("change", ["plain", "LoRA around"])
def test_heteroconv_of_our_layers_is_that_of_pygs(change: str):
    x, edges = typed_graph()
    both = []
    for lib in (ours, pyg):
        widths = {t: rows.shape[1] for t, rows in x.items()}
        convs = {
            EDGE_TYPES[0]: lib.SAGEConv((widths["a"], widths["b"]), 4),
            EDGE_TYPES[1]: lib.GATConv((widths["b"], widths["a"]), 4, add_self_loops=False),
            EDGE_TYPES[2]: lib.GCNConv(widths["a"], 4),
        }
        both.append(pyg.HeteroConv(convs, aggr="sum"))
    both[0].load_state_dict(both[1].state_dict())
    outputs = [CHANGES[change](conv)(x, edges) for conv in both]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_lazily_sized_layers_take_their_sizes_from_the_first_rows(edge_index: Tensor):
    x = torch.rand(40, 5)
    told = {"edge_attr": torch.rand(200, 3)}
    layers = [(ours.SAGEConv(-1, 4), {}), (ours.GCNConv(-1, 4), {}), (ours.GATConv(-1, 4, edge_dim=-1), told)]
    for layer, given in layers:
        layer.reset_parameters()
        first = layer(x, edge_index, **given)
        linears = [child for child in layer.modules() if isinstance(child, nn.Linear)]
        assert linears and all(type(linear) is nn.Linear for linear in linears)
        torch.testing.assert_close(layer(x, edge_index, **given), first)
        again = type(layer)(-1, 4, **({"edge_dim": -1} if given else {}))
        again.load_state_dict(layer.state_dict())
        torch.testing.assert_close(again(x, edge_index, **given), first)
    refused = [
        (ours.SAGEConv, (-1, 4), {"project": True}),
        (ours.RGCNConv, (-1, 4, 2), {}),
        (ours.GCNConv, (-3, 4), {}),
    ]
    for kind, args, options in refused:
        with pytest.raises(ValueError, match="in_channels"):
            kind(*args, **options)
