"""Rows, edges and devices that do not fit are refused in one line: what was given, what is taken, what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gnnsys.nn
from gnnsys.fullgraph import HybridParallel
from gnnsys.graph import Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GAT, GCN, GATConv, GCNConv, GINConv, GraphSAGE, HeteroConv, RGCNConv, SAGEConv
from tests.support.grid import grid

NUM_NODES, WIDTH = 6, 4
EDGES = torch.stack([torch.arange(NUM_NODES), (torch.arange(NUM_NODES) + 1) % NUM_NODES])
X = torch.rand(NUM_NODES, WIDTH)
GRAPH = Graph.from_edge_index(EDGES, NUM_NODES, {"x": X})

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "SAGEConv(4, 3": lambda: SAGEConv(WIDTH, 3),
    "SAGEConv(4, 3, aggr=max": lambda: SAGEConv(WIDTH, 3, aggr="max", project=True),
    "GCNConv(4, 3": lambda: GCNConv(WIDTH, 3),
    "GATConv(4, 3": lambda: GATConv(WIDTH, 3),
    "GINConv(": lambda: GINConv(nn.Linear(WIDTH, 3)),
    "RGCNConv(4, 3": lambda: Relations(),
    "SAGEConv(4, 8": lambda: GraphSAGE(WIDTH, 8, 2, 3),
    "GCNConv(4, 8": lambda: GCN(WIDTH, 8, 2, 3),
    "GATConv(4, 4": lambda: GAT(WIDTH, 8, 2, 3, heads=2),
}


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = RGCNConv(WIDTH, 3, 2)

    def forward(self, x: Any, edges: Any) -> Any:
        return self.conv(x, edges, edge_type=torch.zeros(NUM_NODES, dtype=torch.int64))


MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "wider": (torch.rand(NUM_NODES, 5), EDGES, "takes rows of width 4, x has shape [6, 5]: make the layer with in_cha"),
    "flat": (torch.rand(NUM_NODES), EDGES, "takes rows of width 4, x has shape [6]: pass rows of features"),
    "float64": (X.double(), EDGES, "has weights of float32, and x is float64: pass x.to(torch.float32), or model.to("),
    "whole numbers": (X.long(), EDGES, "has weights of float32, and x is int64: pass x.to(torch.float32)"),
    "numpy": (X.numpy(), EDGES, "takes rows as a torch.Tensor, x is of type ndarray: pass torch.as_tensor(x)"),
    "numpy edges": (X, EDGES.numpy(), "got ndarray: pass torch.as_tensor(edges)"),
    "edges as rows": (X, EDGES.t(), "got [6, 2], one edge a row: pass edge_index.t()"),
    "edges of floats": (
        X,
        EDGES.float(),
        "edge_index must be int64 or int32, got torch.float32: pass edge_index.long()",
    ),
}


@grid(layer=LAYERS.items(), mistake=MISTAKES)
def test_a_layer_says_which_it_is_and_what_does_not_fit(layer, mistake):
    (name, make), (x, edges, words) = layer, mistake
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()(x, edges)
    assert name in str(refused.value) or edges is not EDGES
    assert torch.isfinite(make()(X, EDGES)).all(), "what fits is computed"


def test_a_pair_is_looked_at_on_both_sides_and_a_relation_names_its_layer():
    with pytest.raises(ValueError, match=r"width 4, x\[1\] has shape \[6, 5\]"):
        SAGEConv(4, 3)((X, torch.rand(6, 5)), EDGES)
    with pytest.raises(ValueError, match=r"width 7, x\[0\] has shape \[6, 4\]"):
        SAGEConv((7, 4), 3)((X, X), EDGES)
    edge = ("a", "to", "a")
    with pytest.raises(ValueError, match=r"SAGEConv\(5, 3, aggr=mean\) .* width 5, x\['a'\] has shape \[6, 4\]"):
        HeteroConv({edge: SAGEConv(5, 3)})({"a": X}, {edge: EDGES})
    with pytest.raises(ValueError, match=r"SAGEConv\(5, 8, aggr=mean\) takes rows of width 5"):
        HybridParallel(GraphSAGE(5, 8, 2, 3), GRAPH)(X)


def test_an_error_that_has_nothing_to_do_with_rows_stays_what_it_is():
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        GINConv(Odd(WIDTH, 3))(X, EDGES)
    with pytest.raises(ValueError, match="x must be one tensor: GCNConv has no weights of its own for destinations"):
        GCNConv(4, 3)((X, X[:, :2]), EDGES)
    with torch.autocast("cpu", torch.bfloat16):
        assert SAGEConv(4, 3)(X.bfloat16(), EDGES).shape == (6, 3)


@grid(
    case={
        "numpy": (EDGES.numpy(), NUM_NODES, "got ndarray: pass torch.as_tensor(edge_index)"),
        "a list": (EDGES.tolist(), NUM_NODES, "got list: pass torch.as_tensor(edge_index)"),
        "rows": (EDGES.t(), NUM_NODES, "[2, num_edges], got [6, 2], one edge a row: pass edge_index.t()"),
        "one dimension": (EDGES[0], NUM_NODES, "[2, num_edges], got [6]"),
        "floats": (EDGES.double(), NUM_NODES, "int64 or int32, got torch.float64: pass edge_index.long()"),
        "no count": (EDGES, None, "num_nodes must be a whole number, got None: write int(edge_index.max()) + 1"),
        "text": (EDGES, "6", "num_nodes must be a whole number, got '6'"),
        "a count of numpy": (EDGES, np.int64(NUM_NODES), None),
    },
    is_typed=[False, True],
)
def test_edges_of_another_form_are_refused_with_what_to_write(case, is_typed):
    edges, num_nodes, words = case

    def make() -> Graph:
        edge = ("a", "to", "a")
        return (
            Graph.from_edge_indices({edge: edges}, {"a": num_nodes}) if is_typed else Graph.from_edge_index(*case[:2])
        )

    if words is None:
        assert make().num_nodes() == NUM_NODES
        return
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_a_count_of_nodes_without_types_is_refused():
    with pytest.raises(ValueError, match="num_nodes must be a dict by node type, got 6"):
        Graph.from_edge_indices({("a", "to", "a"): EDGES}, 6)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_whatever_asks_for_one_names_the_doctor():
    asks: list[Callable[[], Any]] = [
        lambda: GRAPH.to("cuda"),
        lambda: GRAPH.to("cuda:1"),
        lambda: GRAPH.pin_memory(),
        lambda: NeighborLoader(GRAPH, [2], device="cuda"),
    ]
    for ask in asks:
        with pytest.raises(ValueError, match=r"torch finds no.*\. Run gnnsys doctor: it says what is missing"):
            ask()
    with pytest.raises(ValueError, match="device must be one of torch's, such as 'cpu' or 'cuda:0', got 'gpu'"):
        GRAPH.to("gpu")
    assert GRAPH.to("cpu").device == torch.device("cpu")


def test_an_error_of_the_users_own_layer_or_of_memory_stays_what_it_is() -> None:
    class Projected(SAGEConv):
        def forward(self, x, edge_index, *others):
            raise RuntimeError("of the user's own")

    class Ours(SAGEConv):
        def transform(self, rows):
            raise torch.OutOfMemoryError("no memory")

    rows, edges = torch.ones(6, 8), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="of the user's own"):
        Projected(4, 3)(rows, edges)
    with pytest.raises(torch.OutOfMemoryError):
        Ours(4, 3)(rows, edges)


TYPED_EDGES = {("a", "to", "b"): EDGES, ("b", "of", "a"): EDGES.flip(0)}
TYPED_X = {"a": X, "b": X.flip(0)}
METADATA = (["a", "b"], list(TYPED_EDGES))
TYPED_MODELS = {"HeteroSAGE": "SAGEConv", "HeteroGAT": "GATConv", "HGT": "HGTConv", "RGAT": "RGATConv"}
TYPED_MODELS |= {"TypedRGCN": "TypedRGCNConv"}
TYPED_MISTAKES: dict[str, tuple[Any, str]] = {
    "float64": (X.double(), "has weights of float32, and x['b'] is float64: pass x['b'].to(torch.float32), or model"),
    "whole numbers": (X.long(), "has weights of float32, and x['b'] is int64: pass x['b'].to(torch.float32)"),
    "numpy": (X.numpy(), "takes rows as a torch.Tensor, x['b'] is of type ndarray: pass torch.as_tensor(x['b'])"),
    "a list": (X.tolist(), "takes rows as a torch.Tensor, x['b'] is of type list: pass torch.as_tensor(x['b'])"),
}


def typed_model(name: str) -> nn.Module:
    return getattr(gnnsys.nn, name)(WIDTH, 8, 2, 3, metadata=METADATA)


@grid(name=list(TYPED_MODELS), mistake=TYPED_MISTAKES)
def test_rows_by_type_are_refused_with_the_layer_and_the_node_type(name, mistake):
    rows, words = mistake
    model = typed_model(name)
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        model(TYPED_X | {"b": rows}, TYPED_EDGES)
    assert f"{TYPED_MODELS[name]}(" in str(refused.value)
    assert torch.isfinite(model(TYPED_X, TYPED_EDGES)["a"]).all(), "what fits is computed"


@grid(name=list(TYPED_MODELS))
def test_rows_by_type_of_another_width_are_refused_with_both_widths(name):
    with pytest.raises(ValueError, match=r"'b'.*\[6, 5\]") as refused:
        typed_model(name)(TYPED_X | {"b": torch.rand(NUM_NODES, 5)}, TYPED_EDGES)
    assert TYPED_MODELS[name] in str(refused.value) and f" {WIDTH}" in str(refused.value)


@grid(name=list(TYPED_MODELS))
def test_a_model_of_types_names_rows_that_are_not_by_type(name):
    with pytest.raises(ValueError, match=r"x must be rows by node type, as batch\.x_dict, got Tensor"):
        typed_model(name)(X, TYPED_EDGES)


def test_rows_of_types_without_edges_are_looked_at_too():
    with pytest.raises(ValueError, match=re.escape("x['b'] is float64")):
        typed_model("RGAT")(TYPED_X | {"b": X.double()}, {})
    model = gnnsys.nn.HeteroSAGE(WIDTH, 8, 1, metadata=(["a", "b", "c"], list(TYPED_EDGES)))
    with pytest.raises(ValueError, match=re.escape("x['c'] is float64: pass x['c'].to(torch.float32)")):
        model(TYPED_X | {"c": X.double()}, TYPED_EDGES)


def test_an_error_of_a_typed_model_that_has_another_cause_stays_what_it_is():
    class Odd(SAGEConv):
        def forward(self, x, edges):
            raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        HeteroConv({t: Odd(5, 3) for t in TYPED_EDGES})(TYPED_X, TYPED_EDGES)
    with pytest.raises(ValueError, match=r"got ndarray: pass torch\.as_tensor"):
        typed_model("HGT")(TYPED_X, {t: e.numpy() for t, e in TYPED_EDGES.items()})


@grid(name=list(TYPED_MODELS), argument=["num_sampled_edges", "num_sampled_edges_dict", "edge_atr_dict"])
def test_an_unknown_argument_of_a_typed_model_is_named_before_trimming(name, argument):
    given = {} if argument == "edge_atr_dict" else {t: [NUM_NODES] for t in TYPED_EDGES}
    sampled = {t: [NUM_NODES] for t in TYPED_X}
    words = f"{name} has no argument '{argument}': {TYPED_MODELS[name]} takes "
    for more in ({}, {"num_sampled_nodes": sampled}):
        with pytest.raises(ValueError, match=re.escape(words)):
            typed_model(name)(TYPED_X, TYPED_EDGES, **{argument: given}, **more)


def test_rows_of_edges_that_some_layer_takes_may_be_left_empty():
    to, back = TYPED_EDGES
    conv = HeteroConv({to: SAGEConv(4, 3), back: GATConv((4, 4), 3, edge_dim=2, add_self_loops=False)})
    conv(TYPED_X, TYPED_EDGES, edge_attr_dict={})
    conv(TYPED_X, TYPED_EDGES, edge_attr_dict={back: torch.rand(NUM_NODES, 2)})
    for name, given, words in (
        ("edge_atr_dict", {}, "HeteroConv has no argument 'edge_atr_dict'"),
        ("edge_attr_dict", {to: torch.rand(NUM_NODES, 2)}, "HeteroConv has no argument 'edge_attr_dict': SAGEConv"),
        ("edge_attr", torch.rand(NUM_NODES, 2), "write edge_attr_dict={edge type: edge_attr}"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            conv(TYPED_X, TYPED_EDGES, **{name: given})


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="of machines without it")
def test_a_device_that_is_not_there_is_one_line_with_what_is():
    for device in ("mps", "xpu", "hpu"):
        words = f"^device='{device}' is not available here: torch finds the CPU"
        with pytest.raises(ValueError, match=words) as refused:
            GRAPH.to(device)
        assert "\n" not in str(refused.value)
