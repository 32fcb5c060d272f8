"""Typed models on batches, blocks and whole graphs: the same rows however the structure is given, and PyG's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gnnsys
import gnnsys.nn as ours
from gnnsys.graph import Graph, typed_graph
from gnnsys.nn import GATConv, HeteroConv, HeteroGAT, HeteroSAGE, SAGEConv, to_homogeneous, to_typed
from gnnsys.ops import CSC
from gnnsys.sampling import Block

pyg = pytest.importorskip("torch_geometric.nn")
SEEDS = torch.arange(24)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return typed_graph(200)


def batch_of(graph: Graph, **options: Any) -> gnnsys.loader.Batch:
    return next(iter(gnnsys.NeighborLoader(graph, [4, 3], input_nodes=("paper", SEEDS), batch_size=24, **options)))


def models(graph: Graph, **options: Any) -> dict[str, nn.Module]:
    return {
        "sage": HeteroSAGE(64, 16, 2, 5, metadata=graph, **options),
        "sage, max": HeteroSAGE(-1, 16, 2, 5, aggr="max", metadata=graph, norm="layer", **options),
        "gat": HeteroGAT(64, 16, 2, 5, heads=4, metadata=graph, **options),
    }


def test_a_trimmed_batch_gives_the_first_rows_of_the_untrimmed_one(graph: Graph):
    batch = batch_of(graph)
    for name, model in models(graph).items():
        whole = model(batch.x_dict, batch.edge_index_dict)
        trimmed = model(batch.x_dict, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)
        assert trimmed["paper"].shape == (24, 5), name
        torch.testing.assert_close(trimmed["paper"], whole["paper"][:24])
        gradients = torch.autograd.grad(trimmed["paper"].sum(), list(model.parameters()), allow_unused=True)
        assert any(g is not None and bool(g.any()) for g in gradients)


def test_blocks_give_what_the_same_edges_give_as_an_edge_index(graph: Graph):
    framed = batch_of(graph, expand="frontier")
    for model in models(graph, targets=["paper"]).values():
        out = model(framed.x_dict, framed.blocks)["paper"]
        x = framed.x_dict
        for block, conv, last in zip(framed.blocks, model.convs, [False, True], strict=True):
            edges = {t: torch.stack([c.indices, c.dst()]) for t, c in block.csc.items() if t in conv.edge_types}
            x = conv({t: x[t] for t in x}, edges)
            x = {t: rows[: block.num_dst[t]] for t, rows in x.items()}
            if not last:
                x = {t: model._between(0, t, rows) for t, rows in x.items()}
        torch.testing.assert_close(out, x["paper"])


def test_a_whole_graph_is_given_as_edge_index_or_as_csc(graph: Graph):
    x = {t: graph.node_data[t]["x"] for t in graph.node_types}
    for model in models(graph).values():
        a = model(x, {t: graph.csc(t) for t in graph.edge_types})
        b = model(x, {t: graph.edge_index(t) for t in graph.edge_types})
        assert list(a) == list(b) == graph.node_types
        for node_type in a:
            torch.testing.assert_close(a[node_type], b[node_type])


def test_an_edge_type_that_is_not_given_is_one_without_edges(graph: Graph):
    batch, framed = batch_of(graph), batch_of(graph, expand="frontier")
    left_out, num_sampled = graph.edge_types[0], batch.num_sampled_nodes_dict
    none = torch.empty(2, 0, dtype=torch.int64)
    empty = {t: none if t == left_out else index for t, index in batch.edge_index_dict.items()}
    without = {t: index for t, index in empty.items() if t != left_out}
    blocks = [Block({t: c for t, c in b.csc.items() if t != left_out}, b.num_src, b.num_dst) for b in framed.blocks]
    as_empty = [
        Block(
            {
                t: CSC(torch.zeros_like(c.indptr), c.indices[:0], c.num_src) if t == left_out else c
                for t, c in b.csc.items()
            },
            b.num_src,
            b.num_dst,
        )
        for b in framed.blocks
    ]
    others = {"rgcn": ours.TypedRGCN(64, 16, 2, 5, metadata=graph), "hgt": ours.HGT(64, 16, 2, 5, metadata=graph)}
    for name, model in (models(graph) | others).items():
        for given, peer, x, options in (
            (without, empty, batch.x_dict, {}),
            (without, empty, batch.x_dict, {"num_sampled_nodes": num_sampled}),
            (blocks, as_empty, framed.x_dict, {}),
        ):
            torch.testing.assert_close(
                model(x, given, **options), model(x, peer, **options), msg=lambda said, name=name: f"{name}: {said}"
            )
    lone, expected = model(batch.x_dict, {}), model(batch.x_dict, dict.fromkeys(graph.edge_types, none))
    torch.testing.assert_close(lone, expected)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min", "cat", None])
def test_hetero_conv_is_pygs_of_the_same_layers(graph: Graph, aggr: str | None):
    batch = batch_of(graph)

    def layers(lib: Any) -> dict[Any, nn.Module]:
        return {
            t: lib.GATConv((64, 64), 3, heads=2, add_self_loops=False) if "writes" in t[1] else lib.SAGEConv(64, 6)
            for t in graph.edge_types
        }

    made, peer = HeteroConv(layers(ours), aggr), pyg.HeteroConv(layers(pyg), aggr)
    made.load_state_dict(peer.state_dict())
    mixed = pyg.HeteroConv(layers(ours), aggr)  # PyG's takes our layers
    mixed.load_state_dict(peer.state_dict())
    some = {t: index for t, index in batch.edge_index_dict.items() if t != graph.edge_types[0]}  # leaves layers out
    torch.testing.assert_close(made(batch.x_dict, some), peer(batch.x_dict, some))
    expected = peer(batch.x_dict, batch.edge_index_dict)
    grads = torch.autograd.grad(sum(rows.square().sum() for rows in expected.values()), list(peer.parameters()))
    for conv in (made, mixed):
        out = conv(batch.x_dict, batch.edge_index_dict)
        assert out.keys() == expected.keys()
        for node_type, rows in expected.items():
            torch.testing.assert_close(out[node_type], rows, rtol=1e-4, atol=1e-4)
        got = torch.autograd.grad(sum(rows.square().sum() for rows in out.values()), list(conv.parameters()))
        for found, wanted in zip(got, grads, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


def test_a_node_type_that_no_edge_leads_to_keeps_rows_of_its_own():
    edges = {("a", "to", "b"): torch.tensor([[0, 1, 2], [0, 0, 1]])}
    x = {"a": torch.randn(3, 4), "b": torch.randn(2, 4)}
    model = HeteroSAGE(4, 8, 2, 3, metadata=(["a", "b"], list(edges)))
    out = model(x, edges)
    assert out["a"].shape == (3, 3) and out["b"].shape == (2, 3)
    first, second = model.convs
    torch.testing.assert_close(out["a"], second.alone["a"](first.alone["a"](x["a"]).relu()))


def test_weights_that_the_targets_do_not_depend_on_are_not_made(graph: Graph):
    """DDP waits for a gradient of every parameter."""
    model = HeteroSAGE(64, 8, 2, 3, metadata=graph, targets=["institution"])
    assert [t[1] for t in model.convs[1].edge_types] == ["affiliated_with"]
    x = {t: graph.node_data[t]["x"] for t in graph.node_types}
    out = model(x, {t: graph.csc(t) for t in graph.edge_types})
    assert list(out) == ["institution"]
    out["institution"].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_empty_relation_and_a_type_without_nodes_work(graph: Graph):
    batch = batch_of(graph)
    x = {**batch.x_dict, "institution": batch.x_dict["institution"][:0]}
    edges = {t: i if "institution" not in t else i[:, :0] for t, i in batch.edge_index_dict.items()}
    for model in models(graph).values():
        out = model(x, edges)
        assert out["institution"].shape == (0, 5) and bool(out["paper"].isfinite().all())
        sum(rows.sum() for rows in out.values()).backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_model_trains_on_batches_of_a_loader(graph: Graph):
    torch.manual_seed(0)
    model = HeteroSAGE(64, 32, 2, 8, metadata=graph, targets=["paper"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        for batch in gnnsys.NeighborLoader(graph, [5, 5], input_nodes="paper", batch_size=100, shuffle=True):
            out = model(batch.x_dict, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)["paper"]
            loss = nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_what_cannot_be_computed_is_refused_with_a_remedy(graph: Graph):
    batch = batch_of(graph)
    x, edges, numbers = batch.x_dict, batch.edge_index_dict, batch.num_sampled_nodes_dict
    model = HeteroSAGE(64, 8, 2, 3, metadata=graph)
    without = {t: rows for t, rows in x.items() if t != "author"}
    cases: list[tuple[str, Any]] = [
        ("'author' has no rows.*features or an embedding", lambda: model(without, edges)),
        ("does not know edge type.*leave this one out", lambda: model(x, {**edges, ("a", "b", "c"): SEEDS})),
        ("does not know edge type", lambda: model.convs[0](x, {("paper", "b", "paper"): SEEDS})),
        ("blocks for 2 layers", lambda: model(x, [edges])),
        ("adds up to", lambda: model(x, edges, num_sampled_nodes={t: [1] for t in x})),
        ("no entry for type", lambda: model(x, edges, num_sampled_nodes={})),
        ("rows by node type", lambda: model.convs[0](x["paper"], edges)),
        ("by edge type", lambda: model.convs[0](x, x["paper"])),
        ("same out_channels", lambda: HeteroConv({t: SAGEConv(64, 3 + (t[1] == "cites")) for t in edges})(x, edges)),
        ("add_self_loops=False", lambda: HeteroConv({("a", "to", "b"): GATConv((1, 1), 1)})),
        ("targets has", lambda: HeteroSAGE(64, 8, 2, 3, metadata=graph, targets=["papers"])),
        ("no width for node types", lambda: HeteroSAGE({"paper": 3}, 8, 2, 3, metadata=graph)),
        ("edge type", lambda: HeteroSAGE(3, 8, 2, 3, metadata=(["a"], [("a", "to", "b")]))),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    wrong = {t: [sum(n) - 1, 1, 0] if t == "author" else n for t, n in numbers.items()}
    wrong["author"] = [0, 0, sum(numbers["author"])]
    with pytest.raises(ValueError, match="does not belong to these edges"):
        model(x, edges, num_sampled_nodes=wrong)


def test_a_batch_becomes_one_of_a_single_type_and_back(graph: Graph):
    batch = batch_of(graph)
    one = to_homogeneous(batch)
    assert one.batch_size == 24 and torch.equal(one.n_id[:24], SEEDS)
    back = to_typed(one, graph)
    for node_type in graph.node_types:
        assert torch.equal(back[node_type].x, batch[node_type].x)
        assert back[node_type].x.untyped_storage().data_ptr() == one.x.untyped_storage().data_ptr()  # no copy
    for edge_type in graph.edge_types:
        assert torch.equal(back[edge_type].edge_index, batch[edge_type].edge_index)
    assert back.input_type == "paper" and back.batch_size == 24
    again = to_homogeneous(back)
    assert again.x.data_ptr() == one.x.data_ptr()
    assert torch.equal(again.edge_index, one.edge_index) and torch.equal(again.edge_type, one.edge_type)


def test_a_batch_of_seeds_of_several_types_becomes_one_of_a_single_type(graph: Graph):
    links = {t: graph.edge_index(t)[:, :5] for t in graph.edge_types[:2]}
    loaders = [
        gnnsys.NeighborLoader(graph, [4, 3], input_nodes={"paper": SEEDS, "author": SEEDS[:9]}, batch_size=24),
        gnnsys.LinkNeighborLoader(graph, [4, 3], edge_label_index=links, batch_size=10),
    ]
    for loader in loaders:
        batch = next(iter(loader))
        one = to_homogeneous(batch)
        assert batch.input_type is None and "batch_size" not in one
        assert torch.equal(one.n_id, torch.cat([batch[t].n_id for t in batch.node_types]))
        back = to_typed(one, graph)
        for edge_type in graph.edge_types:
            assert torch.equal(back[edge_type].edge_index, batch[edge_type].edge_index)


def test_nodes_of_types_in_any_order_are_sorted_out(graph: Graph):
    one = to_homogeneous(batch_of(graph))
    order = torch.randperm(one.n_id.numel(), generator=torch.Generator().manual_seed(0))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    mixed = gnnsys.loader.Batch(
        {"node": gnnsys.loader.TypeValues(x=one.x[order], n_id=one.n_id[order], node_type=one.node_type[order])},
        {("node", "to", "node"): gnnsys.loader.TypeValues(edge_index=place[one.edge_index], edge_type=one.edge_type)},
        is_homogeneous=True,
    )
    back = to_typed(mixed, graph)
    model = HeteroSAGE(64, 8, 1, 3, metadata=graph)
    expected = model(to_typed(one, graph).x_dict, to_typed(one, graph).edge_index_dict)
    for node_type, rows in model(back.x_dict, back.edge_index_dict).items():
        at = order[one.node_type[order] == graph.node_types.index(node_type)]
        first = int((one.node_type == graph.node_types.index(node_type)).nonzero()[0])
        torch.testing.assert_close(rows, expected[node_type][at - first])
    with pytest.raises(ValueError, match="node_type must be given"):
        mixed.nodes["node"].pop("node_type")
        to_typed(mixed, graph)
