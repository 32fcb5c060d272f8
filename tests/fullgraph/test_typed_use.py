"""Typed graphs in full-graph training: what cannot be computed is refused, in one line that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import ByNodeType, Dropout, HybridParallel, JoinKept, Keep, Residual
from gnnsys.graph import Graph, to_pyg
from gnnsys.nn import HGT, RGAT, RGCN, GCNConv, HeteroConv, HeteroGAT, HeteroSAGE, SAGEConv, TypedRGCNConv
from tests.fullgraph.dense import random_graph
from tests.fullgraph.thread_ranks import run_ranks

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


@pytest.fixture(scope="module")
def graph() -> Graph:
    draws = torch.Generator().manual_seed(1)
    edges = {CITES: torch.randint(12, (2, 30), generator=draws), WRITES: torch.randint(5, (2, 20), generator=draws)}
    return Graph.from_edge_indices(edges, {"paper": 12, "author": 5})


def x_of(paper: int = 4, author: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"paper": torch.zeros(12, paper, dtype=dtype), "author": torch.zeros(5, author, dtype=dtype)}


def test_layers_that_are_not_for_typed_graphs_are_refused_when_the_model_is_made(graph):
    def rgcn(**options: Any) -> nn.Module:
        return RGCN(4, 8, 2, 3, metadata=graph, **options)

    plain, typed = random_graph(12, 30, 1), TypedRGCNConv(4, 4, graph.edge_types)
    other = (["paper", "author"], [CITES])
    for layers, on, said in (
        ([SAGEConv(4, 4)], graph, r"SAGEConv takes rows of one type, and this graph has 2 edge types: use RGCN.*"),
        ([Residual(SAGEConv(4, 4))], graph, "Residual is for graphs of one type.*: use Keep and JoinKept"),
        ([typed, nn.BatchNorm1d(4)], graph, "BatchNorm1d would normalise over the nodes of all types.*: use nn.Layer"),
        (rgcn(norm="batch"), graph, 'batch normalisation per node type.*: make it with norm="layer"'),
        (
            RGCN({"paper": 4, "author": None}, 8, 2, metadata=graph),
            graph,
            "looks nodes of 'author' up by id.*: give it",
        ),
        (rgcn(), plain, "TypedRGCN is for typed graphs, and this one has one node type and one edge type"),
        (RGCN(4, 8, 2, 3, metadata=other), graph, "made for other types than the graph has.*: make it with metadata"),
        ([ByNodeType({"venue": nn.Linear(4, 4)}), typed], graph, "ByNodeType has a module for 'venue', and the graph"),
        ([TypedRGCNConv(4, 4, [("venue", "of", "paper")])], graph, "TypedRGCNConv has edge types of 'venue'"),
    ):
        with pytest.raises(ValueError, match=said):
            HybridParallel(layers, on)


def test_layers_whose_rows_depend_on_the_piece_are_refused_in_the_first_pass(graph):
    degrees = HeteroConv({CITES: GCNConv(4, 4), WRITES: SAGEConv(4, 4)})
    for layers, said in (
        (RGAT(4, 8, 2, 3, metadata=graph, attention_dropout=0.5), "gives other rows every time while it trains"),
        (HeteroGAT(4, 8, 2, 3, metadata=graph, attention_dropout=0.5), "HeteroConv gives other rows every time"),
        ([degrees], "HeteroConv gives other rows on a piece of a graph than on the whole"),
        ([TwoHops(graph)], "TwoHops gives other rows on a piece of a graph than on the whole"),
    ):
        with pytest.raises(ValueError, match=said):
            HybridParallel(layers, graph)(x_of())
    HybridParallel(RGAT(4, 8, 2, 3, metadata=graph, attention_dropout=0.5).eval(), graph).eval()(x_of())


def by_type(**modules: nn.Module) -> ByNodeType:
    return ByNodeType(modules)


def test_a_layer_that_reads_a_type_which_nobody_makes_is_refused(graph):
    """Authors are sources alone: a layer by its edge types makes rows of papers."""
    first, second = (TypedRGCNConv(width, 4, graph.edge_types) for width in (4, 4))
    for layers, said in (
        (
            [first, nn.ReLU(), second],
            r"reads rows of 'author' for .*TypedRGCNConv before it has rows of \['paper'\] alone",
        ),
        (
            [by_type(paper=nn.Linear(4, 4)), second],
            "reads rows of 'author' for .*ByNodeType before it .*: let that make",
        ),
        ([first, HeteroConv({WRITES: SAGEConv(4, 4)})], "HeteroConv reads rows of 'author'"),
        ([Keep("x"), first, nn.LayerNorm(4), JoinKept("x"), second], "JoinKept.'x'. joins rows of 'author', which no"),
    ):
        with pytest.raises(ValueError, match=said):
            HybridParallel(layers, graph)(x_of())
    with pytest.raises(ValueError, match="reads rows of 'author'"):  # which x has none of to keep
        cites = TypedRGCNConv(4, 4, [CITES])
        HybridParallel([Keep("x"), cites, JoinKept("x"), second], graph)({"paper": x_of()["paper"]})


def test_layers_are_given_the_types_that_are_there(graph):
    """Brought back by a JoinKept; papers alone where a layer reads no others, also one that says nothing of types."""
    torch.manual_seed(2)
    x = {t: torch.randn(rows.shape) for t, rows in x_of().items()}
    edges = {t: graph.csc(t) for t in graph.edge_types}
    first, second = (TypedRGCNConv(4, 4, graph.edge_types) for _ in range(2))
    cites, norm = {CITES: edges[CITES]}, by_type(paper=nn.LayerNorm(4), author=nn.LayerNorm(4))
    made = first(x, edges)
    back = {"paper": norm(made)["paper"] + x["paper"], "author": x["author"]}
    sage = HeteroConv({CITES: SAGEConv(4, 4)})
    for layers, want in (
        ([Keep("x"), first, norm, JoinKept("x"), second], second(back, edges)),
        ([first, sage], sage(made, cites)),
        ([first, Doubled()], {"paper": 2 * made["paper"]}),
    ):
        got = HybridParallel(layers, graph)(x)
        assert list(got) == list(want)
        torch.testing.assert_close(got["paper"], want["paper"])


def test_types_that_a_pass_has_rows_of_are_read_in_it(graph):
    """What the first pass had no rows of, a JoinKept brings back in the next one, and not in one without them again."""
    torch.manual_seed(2)
    x = {t: torch.randn(rows.shape) for t, rows in x_of().items()}
    model = HybridParallel([Keep("x"), TypedRGCNConv(4, 4, [CITES]), JoinKept("x"), Doubled()], graph)
    alone = model({"paper": x["paper"]})
    both = model(x)
    again, last = model({"paper": x["paper"]}), model(x)
    assert list(alone) == list(again) == ["paper"] and set(both) == set(last) == set(x)
    torch.testing.assert_close(both["author"], 2 * x["author"])
    torch.testing.assert_close(both["paper"], alone["paper"])
    ends = HybridParallel([Keep("x"), TypedRGCNConv(4, 4, [CITES]), JoinKept("x")], graph)
    assert [list(ends(given)) for given in (x, {"paper": x["paper"]}, x)] == [["paper", "author"], ["paper"], [*x]]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_over_other_types_leaves_the_gradients_of_the_one_before_it(graph, recompute):
    torch.manual_seed(2)
    x = {t: torch.randn(rows.shape) for t, rows in x_of().items()}
    layers = [Keep("x"), TypedRGCNConv(4, 4, [CITES]), JoinKept("x"), CountsTypes()]
    model, found = HybridParallel(layers, graph, recompute=recompute), []
    for others in ([], [{"paper": x["paper"]}]):
        model.zero_grad()
        out = model(x)
        for other in others:
            model(other)
        sum(rows.square().sum() for rows in out.values()).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*found)


class CountsTypes(nn.Module):
    """A layer whose rows tell how many types it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, edges: Any) -> Any:
        return {t: len(x) * self.linear(rows[: edges.num_dst[t]]) for t, rows in x.items()}


class Doubled(nn.Module):
    """A layer that does not say what types it reads, and takes whatever has rows."""

    def forward(self, x: Any, edges: Any) -> Any:
        assert {t for e in edges.csc for t in (e[0], e[2])} <= set(x)
        return {t: 2 * rows[: edges.num_dst[t]] for t, rows in x.items()}


def test_a_first_module_for_all_types_takes_rows_of_one_width_and_one_by_type_takes_its_own(graph):
    torch.manual_seed(3)
    x, edges = (
        {t: torch.randn(rows.shape) for t, rows in x_of(6, 3).items()},
        {t: graph.csc(t) for t in graph.edge_types},
    )
    equal, conv, own = (
        {**x, "author": torch.randn(5, 6)},
        TypedRGCNConv(4, 3, graph.edge_types),
        {"paper": 6, "author": 3},
    )
    unequal = TypedRGCNConv(own, 3, graph.edge_types)
    for layers in ([nn.LayerNorm(6), unequal], [Keep("x"), unequal]):
        with pytest.raises(ValueError, match=r"different widths.*which comes first.*: begin the list with ByNodeType"):
            HybridParallel(layers, graph)(x)
    linear = nn.Linear(6, 4)
    got = HybridParallel([linear, nn.ReLU(), conv], graph)(equal)["paper"]
    torch.testing.assert_close(got, conv({t: linear(rows).relu() for t, rows in equal.items()}, edges)["paper"])
    torch.testing.assert_close(
        HybridParallel([Dropout(0.5), unequal], graph).eval()(x)["paper"], unequal(x, edges)["paper"]
    )
    with pytest.raises(ValueError, match="TypedRGCNConv"):  # it takes 4 columns, and gets 6: none is left out
        HybridParallel([nn.LayerNorm(6), conv], graph)(equal)
    for encode in (
        by_type(**{t: nn.LazyLinear(4) for t in own}),
        by_type(**{t: nn.Sequential(nn.LayerNorm(w), nn.Linear(w, 4)) for t, w in own.items()}),
    ):
        got = HybridParallel([encode, conv], graph)(x)["paper"]
        torch.testing.assert_close(got, conv(encode(x), edges)["paper"])


def test_types_that_the_first_layer_does_not_read_widen_nobody(graph):
    conv = TypedRGCNConv(4, 3, [CITES])
    parallel = HybridParallel([conv], graph)
    assert "TypedRGCNConv, 4 -> 3" in parallel.describe(x_of(4, 100))
    with_authors, without = (parallel(x)["paper"] for x in (x_of(4, 100), {"paper": x_of()["paper"]}))
    assert torch.equal(with_authors, without)


def test_modules_by_node_type_are_named_by_type_whatever_the_order_they_came_in():
    one = ByNodeType({"paper": nn.Linear(4, 3), "author.x": nn.Linear(2, 3), "keys": nn.Identity()})
    other = ByNodeType({"keys": nn.Identity(), "author.x": nn.Linear(2, 3), "paper": nn.Linear(4, 3)})
    assert list(one.state_dict()) == list(other.state_dict()) and "by_type.paper.weight" in one.state_dict()
    other.load_state_dict(one.state_dict())
    x = {"paper": torch.randn(2, 4), "author.x": torch.randn(3, 2), "keys": torch.randn(1, 3)}
    assert all(torch.equal(rows, other(x)[t]) for t, rows in one(x).items())


def test_rows_of_a_type_that_a_graph_of_one_type_has_not_are_refused():
    plain = random_graph(12, 30, 1)
    plain.node_data[plain.node_types[0]]["x"] = torch.randn(12, 4)
    share = HybridParallel([SAGEConv(4, 4)], plain).share
    assert torch.equal(share.rows("x", plain.node_types[0]), share.rows("x"))
    with pytest.raises(ValueError, match=r"node_type must be one of .* got 'paper'"):
        share.rows("x", "paper")


class TwoHops(nn.Module):
    """A model as one layer: its second layer would need rows that no bin has."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.convs = nn.ModuleList(TypedRGCNConv(4, 4, [CITES]) for _ in range(2))

    def forward(self, x: Any, edges: Any) -> Any:
        num_dst, csc = edges.num_dst["paper"], edges.csc[CITES]
        index = torch.stack([csc.indices.long(), csc.dst()])
        rows = {"paper": x["paper"]}
        for conv in self.convs:
            rows = conv(rows, {CITES: index})
        return {"paper": rows["paper"][:num_dst]}


def test_rows_that_do_not_fit_are_refused_on_all_ranks(graph):
    model = RGCN({"paper": 4, "author": 2}, 8, 2, 3, metadata=graph)
    lazy = HeteroSAGE(-1, 8, 2, 3, metadata=graph)
    good = x_of(4, 2)
    for layers, x, said in (
        (model, torch.zeros(17, 4), "x must be rows by node type, as model.share.rows"),
        (model, {"paper": good["paper"]}, r"x has no rows of 'author', which the first layer reads: .*embedding"),
        (model, good | {"venue": good["paper"]}, "x has rows of 'venue', and the graph has nodes of"),
        (model, good | {"author": torch.zeros(4, 2)}, r"x\['author'\] must be float \[5, width\]"),
        (model, good | {"author": torch.zeros(5, 2).long()}, r"x\['author'\] must be float \[5, width\]"),
        (model, good | {"author": torch.zeros(5, 2).double()}, "x must have rows of one dtype on one device"),
        (model, x_of(4, 3), r"x\['author'\] is 3 wide, and the first layer takes 2 of that type"),
        (lazy, good, "x has rows of different widths.*: give it in_channels by node type, or begin .* ByNodeType"),
    ):
        with pytest.raises(ValueError, match=said):
            HybridParallel(layers, graph)(x)

    ranks = {"paper": torch.arange(12) % 2, "author": torch.zeros(5, dtype=torch.int64)}

    def work(rank: int, group: Any) -> str:
        torch.manual_seed(0)
        parallel = HybridParallel(RGCN(4, 8, 1, metadata=graph), graph, ranks=ranks, group=group, timeout=60)
        own = {t: rows[parallel.nodes[t]] for t, rows in x_of().items()}
        with pytest.raises(ValueError, match=r"x has no rows of 'paper'|another rank refused them") as error:
            parallel({t: rows for t, rows in own.items() if t != "paper" or rank == 0})
        return str(error.value)

    assert ["'paper'" in said for said in run_ranks(2, work)] == [False, True]


def test_ranks_and_edge_data_of_another_kind_are_refused(graph):
    model, plain = RGCN(4, 8, 1, metadata=graph), random_graph(12, 30, 1)
    for layers, on, options, said in (
        (model, graph, {"ranks": torch.zeros(17).long()}, "ranks must say the rank of every node by node type"),
        (model, graph, {"ranks": {"paper": torch.zeros(12).long()}}, "there is none of 'author'"),
        (model, graph, {"ranks": {"paper": torch.ones(12).long(), "author": torch.zeros(5).long()}}, r"in \[0, 1\)"),
        (model, graph, {"ranks": {"paper": torch.zeros(9), "author": torch.zeros(5)}}, r"int \[12\], a rank per node"),
        (model, graph, {"edge_data": {"edge_weight": "w"}}, "edge_data is for graphs of one node type and one edge"),
        ([SAGEConv(4, 4)], plain, {"ranks": {"node": torch.zeros(12).long()}}, r"ranks must be int \[12\]"),
    ):
        with pytest.raises(ValueError, match=said):
            HybridParallel(layers, on, **options)


def test_typed_layers_of_pyg_are_refused(graph):
    pyg = pytest.importorskip("torch_geometric.nn")
    with pytest.raises(
        ValueError, match=r"HGTConv of PyG is for graphs of one type here.*: use a typed layer of gnnsys"
    ):
        HybridParallel([pyg.HGTConv(4, 4, (graph.node_types, graph.edge_types))], graph)
    with pytest.raises(ValueError, match=r"graph is PyG's HeteroData: pass gnnsys.graph.from_pyg\(data\)"):
        HybridParallel([TypedRGCNConv(4, 4, graph.edge_types)], to_pyg(graph))


def test_a_layer_that_was_changed_is_called_and_one_that_takes_its_place_is_seen(graph):
    """What a forward hook makes of results counts, and so does a layer that is put in another's place."""
    torch.manual_seed(0)
    model = HGT(4, 8, 2, 3, metadata=graph).double()
    x = {t: torch.randn(rows.shape, dtype=torch.float64) for t, rows in x_of().items()}
    parallel, edges = HybridParallel(model, graph), {t: graph.csc(t) for t in graph.edge_types}
    for change in (lambda: None, lambda: model.convs[0].register_forward_hook(doubled), lambda: swap(model, graph)):
        change()
        got, want = parallel(x), model(x, edges)
        assert got.keys() == want.keys()
        for node_type, rows in want.items():
            torch.testing.assert_close(got[node_type], rows)


def doubled(module: Any, args: Any, out: Any) -> Any:
    return {t: 2 * rows for t, rows in out.items()}


def swap(model: HGT, graph: Graph) -> None:
    model.convs[1] = TypedRGCNConv(8, 8, graph.edge_types, makes=graph.node_types).double()
