"""Node types without features in RGCN: node ids stand for one-hot rows, which are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.graph import Graph, typed_graph
from gnnsys.nn import RGCN, InputEncoder, RGCNConv, TypedRGCNConv, to_homogeneous
from gnnsys.ops import CSC
from gnnsys.partition import partition_graph
from gnnsys.session.open_parts import open_alone

BARE = ("author", "institution")  # of typed_graph; papers have features


def bare_graph() -> Graph:
    made = typed_graph(60)
    for node_type in BARE:
        del made.node_data[node_type]["x"]
    return made


GRAPH = bare_graph()


@pytest.fixture
def graph() -> Graph:
    return GRAPH


def batch_of(graph: Graph, **options: Any) -> gnnsys.Batch:
    seeds = ("paper", torch.arange(12))
    return next(iter(gnnsys.NeighborLoader(graph, [4, 3], input_nodes=seeds, batch_size=12, **options)))


def widths(graph: Graph) -> dict[str, int | None]:
    return {t: None if t in BARE else graph.node_data[t]["x"].shape[1] for t in graph.node_types}


def one_hot_peer(model: nn.Module, graph: Graph, **options: Any) -> nn.Module:
    """The same weights in a model of rows as wide as there are nodes."""
    wide = {t: graph.num_nodes(t) if w is None else w for t, w in widths(graph).items()}
    peer = RGCN(wide, 8, 2, 3, metadata=graph, **options)
    first, of_peer = model.convs[0], peer.convs[0]
    peer.convs[1] = model.convs[1]
    with torch.no_grad():
        for edge_type, (slot, row) in of_peer.weight_of.items():
            src = edge_type[0]
            if src in BARE:
                by_type = first.by_id.edge_types[src]
                weight = first.by_id.relation_weights(src)[by_type.index(edge_type)]
            else:
                of_rows = first.weight_of[edge_type]
                weight = first.relation_weights()[of_rows[0]][of_rows[1]]
            of_peer.weight[slot][row] = weight
        for node_type in of_peer.makes:
            own = first.by_id.root if node_type in BARE else first.root
            of_peer.root[node_type].copy_(own[node_type])
    return peer


def rows_of(given: gnnsys.Batch | Graph) -> dict[str, Tensor]:
    """Features of papers, and ids."""
    values = given.node_data if isinstance(given, Graph) else given.nodes
    return InputEncoder(GRAPH, 4, ids=BARE)(given) | {"paper": values["paper"]["x"]}


def one_hot(x: dict[str, Tensor], graph: Graph) -> dict[str, Tensor]:
    return {t: nn.functional.one_hot(r, graph.num_nodes(t)).float() if t in BARE else r for t, r in x.items()}


@pytest.mark.parametrize("option", [{}, {"num_bases": 2}, {"aggr": "sum"}], ids=["mean", "bases", "sum"])
def test_node_ids_give_what_one_hot_rows_give(graph: Graph, option: dict[str, Any]):
    torch.manual_seed(0)
    model = RGCN(widths(graph), 8, 2, 3, metadata=graph, targets=["paper"], **option)
    peer = one_hot_peer(model, graph, targets=["paper"], **{k: v for k, v in option.items() if k == "aggr"})
    batch, framed = batch_of(graph), batch_of(graph, expand="frontier")
    trim = {"num_sampled_nodes": batch.num_sampled_nodes_dict}
    whole = {t: graph.csc(t) for t in graph.edge_types}
    for given, edges, options in (
        (batch, batch.edge_index_dict, {}),
        (batch, batch.edge_index_dict, trim),
        (framed, framed.blocks, {}),
        (graph, whole, {}),
    ):
        x = rows_of(given)
        out, expected = model(x, edges, **options), peer(one_hot(x, graph), edges, **options)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        wanted = torch.autograd.grad(expected["paper"].square().sum(), [peer.convs[0].root["author"]])[0]
        got = torch.autograd.grad(out["paper"].square().sum(), [model.convs[0].by_id.root["author"]])[0]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_it_is_the_layer_of_one_type_without_features():
    """PyG's RGCNConv with x=None has the same parameters as ours of one type."""
    made = typed_graph(40)
    edges = {("n", str(i), "n"): made.edge_index(("paper", "cites", "paper")).roll(i, 1) for i in range(3)}
    edges["n", "1", "n"] = edges["n", "1", "n"][:, ::2]
    graph = Graph.from_edge_indices(edges, {"n": 40})
    model = RGCN(None, 6, 1, metadata=graph)
    flat = RGCNConv(40, 6, 3)
    with torch.no_grad():
        flat.weight.copy_(model.convs[0].by_id.weight["n"])
        flat.root.copy_(model.convs[0].by_id.root["n"])
    whole = {t: graph.csc(t) for t in graph.edge_types}
    out = model(None, whole)["n"]
    one = to_homogeneous(next(iter(gnnsys.NeighborLoader(graph, [-1], batch_size=40))))
    order = one.n_id.argsort()
    torch.testing.assert_close(out, flat(one.n_id.long(), one.edge_index, one.edge_type)[order])
    assert torch.equal(out, model({"n": torch.arange(40)}, whole)["n"])
    weight = model.convs[0].by_id.weight["n"]
    (out.sum()).backward()
    assert weight.grad.shape == (3, 40, 6)


def test_a_state_dict_gives_the_same_in_memory_and_on_parts(tmp_path: Path):
    """Ids of parts are others than the user's: rows are by the user's."""
    graph, seeds = typed_graph(60), torch.arange(60)
    partition_graph(graph, 2, tmp_path / "parts")
    parts = open_alone(tmp_path / "parts", verify=False)
    whole = RGCN(None, 8, 2, 3, metadata=graph, targets=["paper"])
    of_parts = RGCN(None, 8, 2, 3, metadata=parts, targets=["paper"])
    of_parts.load_state_dict(whole.state_dict())
    assert set(of_parts.state_dict()) == set(whole.state_dict())
    loader = gnnsys.NeighborLoader(parts, [-1, -1], input_nodes=parts.from_global(seeds, "paper"), batch_size=60)
    batch = next(iter(loader))
    ids = {t: batch[t].n_id.long() for t in graph.node_types}
    original = parts.original_ids(ids["paper"][:60], "paper")
    assert not torch.equal(original, ids["paper"][:60])
    out = of_parts(ids, batch.edge_index_dict)["paper"][:60]
    expected = whole(None, {t: graph.csc(t) for t in graph.edge_types})["paper"][original]
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="x is None, which is all nodes of a graph in memory"):
        of_parts(None, batch.edge_index_dict)


def test_layers_with_tables_of_different_lengths_share_structures():
    edge_types = [("n", str(i), "n") for i in range(3)]
    edges = {t: CSC.from_edge_index(torch.randint(40, (2, 60)), 40, 40) for t in edge_types[:2]}
    ids = {"n": torch.arange(40)}
    large, small = (TypedRGCNConv({}, 4, edge_types[:count], num_ids={"n": 40}) for count in (3, 2))
    with torch.no_grad():
        small.by_id.weight["n"].copy_(large.by_id.weight["n"][:2])
        small.by_id.root["n"].copy_(large.by_id.root["n"])
    torch.testing.assert_close(small(ids, edges), large(ids, edges))
    torch.testing.assert_close(small(ids, edges), large(ids, edges))


def test_what_cannot_be_looked_up_is_refused_with_a_remedy(graph: Graph):
    batch = batch_of(graph)
    model = RGCN(widths(graph), 8, 2, 3, metadata=graph, targets=["paper"])
    x = rows_of(batch)
    with pytest.raises(ValueError, match=r"ids of node type 'author', which has no features: give int64 node ids"):
        model(x | {"author": torch.randn(x["author"].numel(), 4)}, batch.edge_index_dict)
    with pytest.raises(ValueError, match=r"ids of node type 'author' must be in \[0, 30\), got 59"):
        model(x | {"author": x["author"] + graph.num_nodes("author")}, batch.edge_index_dict)
    with pytest.raises(ValueError, match=r"x is None, and the model was made for features of \['paper'\]"):
        model(None, batch.edge_index_dict)
    with pytest.raises(ValueError, match="metadata must be the graph, not tuple"):
        RGCN(None, 8, 2, metadata=(graph.node_types, graph.edge_types))
    with pytest.raises(ValueError, match="num_blocks needs features"):
        RGCN(None, 8, 2, metadata=graph, num_blocks=2)
    with pytest.raises(ValueError, match="ids: there are no nodes of 'editor'"):
        InputEncoder(graph, 8, ids=["editor"])
