"""Typed RGCN, RGAT and HGT: PyG's results where PyG has the layer, one type's results where it has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.graph import Graph, typed_graph
from gnnsys.nn import (
    HGT,
    RGAT,
    RGCN,
    HGTConv,
    RGATConv,
    RGCNConv,
    TypedRGCN,
    TypedRGCNConv,
    to_homogeneous,
    typed_groups,
)
from gnnsys.ops import CSC, spmm

pyg = pytest.importorskip("torch_geometric.nn")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return typed_graph(150)


@pytest.fixture(scope="module")
def batch(graph: Graph) -> Any:
    loader = gnnsys.NeighborLoader(graph, [4, 3], input_nodes=("paper", torch.arange(20)), batch_size=20)
    return next(iter(loader))


def double(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {t: r.double().requires_grad_() for t, r in rows.items()}


def assert_same(out: Any, expected: Any, inputs: list[Tensor], peer_inputs: list[Tensor]) -> None:
    """Results and the gradients of inputs."""
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad(out, inputs, cotangent)
    wanted = torch.autograd.grad(expected, peer_inputs, cotangent)
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, n=number: f"gradient of input {n}: {m}")


@pytest.mark.parametrize("option", [{}, {"num_bases": 2}, {"num_blocks": 4}, {"aggr": "sum"}])
def test_typed_rgcn_is_rgcn_on_the_same_nodes_as_one_type(graph: Graph, batch: Any, option: dict[str, Any]):
    one = to_homogeneous(batch)
    layer = RGCNConv(64, 8, len(graph.edge_types), **option).double()
    conv = TypedRGCNConv(64, 8, graph.edge_types, **option).double()
    with torch.no_grad():
        conv.weight[0].copy_(layer.weight)
        if layer.comp is not None:
            conv.comp[0].copy_(layer.comp)
        for t in graph.node_types:
            conv.root[t].copy_(layer.root)
            conv.bias[t].fill_(0.5)
        layer.bias.fill_(0.5)
    x = double(batch.x_dict)
    out = conv(x, batch.edge_index_dict)
    order = sorted(graph.node_types, key=lambda t: t != "paper")  # to_homogeneous has the seeds' type first
    expected = layer(torch.cat([x[t] for t in order]), one.edge_index, one.edge_type)
    ours = [*x.values(), conv.weight[0], *conv.comp]
    peers = [*x.values(), layer.weight, *([] if layer.comp is None else [layer.comp])]
    assert_same(torch.cat([out[t] for t in order]), expected, ours, peers)


def test_wide_features_are_summed_up_first_and_give_the_same(graph: Graph, monkeypatch: pytest.MonkeyPatch):
    """Rows that need a gradient go the other way. Few seeds, so that there are fewer destinations than sources."""
    calls: list[Any] = []
    monkeypatch.setattr(typed_groups, "spmm", lambda *args, **options: calls.append(0) or spmm(*args, **options))
    given = next(iter(gnnsys.NeighborLoader(graph, [4, 4], input_nodes=("paper", torch.arange(3)), batch_size=3)))
    edges, trim = given.edge_index_dict, {"num_sampled_nodes": given.num_sampled_nodes_dict}
    for aggr in ("mean", "sum"):
        model = TypedRGCN(64, 8, 2, 5, metadata=graph, targets=["paper"], aggr=aggr).double()
        x = {t: rows.double() for t, rows in given.x_dict.items()}
        for frozen in (["paper"], ["author"], list(x)):
            wants = {t: rows.clone().requires_grad_(t not in frozen) for t, rows in x.items()}
            out = model(wants, edges, **trim)["paper"]
            got = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
            assert calls, frozen
            calls.clear()
            every = {t: rows.clone().requires_grad_() for t, rows in x.items()}
            expected = model(every, edges, **trim)["paper"]
            wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
            assert not calls
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close([g for g in got if g is not None], [g for g in wanted if g is not None])


def test_sums_are_those_of_the_relations_even_where_slots_have_the_same_numbers():
    """A second layer on the same structures: the slot that was c's is b's, as `x` has one more node type before it."""
    torch.manual_seed(0)
    edge_types = [("b", "to", "d"), ("c", "to", "d")]
    edges = {t: CSC.from_edge_index(torch.randint(3, (2, 40)), 50, 3) for t in edge_types}
    rows = {"z": torch.randn(2, 4), "b": torch.randn(50, 64), "c": torch.randn(50, 4), "d": torch.randn(3, 4)}
    wide_c = TypedRGCNConv({"b": 4, "c": 64, "d": 4}, 8, edge_types)
    wide_b = TypedRGCNConv({"b": 64, "c": 4, "d": 4}, 8, edge_types)
    wide_c({"b": rows["c"], "c": rows["b"], "d": rows["d"]}, edges)
    with torch.no_grad():
        expected = wide_b(rows, edges)["d"]
    torch.testing.assert_close(wide_b(rows, edges)["d"], expected)


@pytest.mark.parametrize("root_weight", [True, False])
def test_edges_to_types_that_a_layer_does_not_make_are_left_out(root_weight: bool):
    edge_types = [("author", "writes", "paper"), ("paper", "of", "author")]
    conv = TypedRGCNConv(4, 5, edge_types, makes=["paper"], root_weight=root_weight)
    x = {"paper": torch.randn(12, 4), "author": torch.randn(7, 4)}
    out = conv(x, {edge_types[1]: torch.randint(7, (2, 9))})
    assert list(out) == ["paper"]
    assert torch.equal(out["paper"], conv(x, {})["paper"])


def test_node_types_of_different_widths_have_weights_of_their_own(graph: Graph):
    widths = {"paper": 6, "author": 4, "institution": 6}
    conv = TypedRGCNConv(widths, 5, graph.edge_types).double()
    assert [tuple(w.shape) for w in conv.weight] == [(4, 6, 5), (2, 4, 5)]
    x = {t: torch.randn(graph.num_nodes(t), n, dtype=torch.float64) for t, n in widths.items()}
    out = conv(x, {t: graph.csc(t) for t in graph.edge_types})
    for node_type, rows in out.items():
        expected = x[node_type] @ conv.root[node_type] + conv.bias[node_type]
        for edge_type in graph.edge_types:
            if edge_type[2] == node_type:
                slot, row = conv.weight_of[edge_type]
                index = graph.edge_index(edge_type)
                sums = torch.zeros(graph.num_nodes(node_type), widths[edge_type[0]], dtype=torch.float64)
                sums.index_add_(0, index[1], x[edge_type[0]][index[0]])
                degree = torch.bincount(index[1], minlength=sums.shape[0]).clamp(min=1)
                expected = expected + sums / degree[:, None] @ conv.weight[slot][row]
        torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("option", [{}, {"num_bases": 2}, {"num_blocks": 2}, {"concat": False}])
def test_rgat_equals_pyg(edge_index: Tensor, mechanism: str, option: dict[str, Any]):
    types = torch.arange(edge_index.shape[1]) * 7 % 5
    types = torch.where(types == 3, 4, types)  # relation 3 has no edges
    settings = {"heads": 2, "attention_mechanism": mechanism, **option}
    ours, peer = RGATConv(12, 6, 5, **settings).double(), pyg.RGATConv(12, 6, 5, **settings).double()
    ours.load_state_dict({n: p for n, p in peer.state_dict().items() if n in ours.state_dict()})
    x = torch.randn(40, 12, dtype=torch.float64, requires_grad=True)
    names = [n for n, p in peer.named_parameters() if n in dict(ours.named_parameters())]
    assert set(names) == set(dict(ours.named_parameters()))
    assert_same(
        ours(x, edge_index, types),
        peer(x, edge_index, types),
        [x, *(ours.get_parameter(n) for n in names)],
        [x, *(peer.get_parameter(n) for n in names)],
    )


def test_typed_rgat_is_rgat_on_the_same_nodes_as_one_type(graph: Graph, batch: Any):
    one = to_homogeneous(batch)
    layer, conv = RGATConv(64, 4, 6, heads=2).double(), RGATConv(64, 4, graph.edge_types, heads=2).double()
    conv.load_state_dict(layer.state_dict())
    x = double(batch.x_dict)
    order = sorted(graph.node_types, key=lambda t: t != "paper")
    out = conv(x, batch.edge_index_dict)
    expected = layer(torch.cat([x[t] for t in order]), one.edge_index, one.edge_type)
    pairs = [[*x.values(), *each.parameters()] for each in (conv, layer)]
    assert_same(torch.cat([out[t] for t in order]), expected, *pairs)


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (16, 1)])
def test_hgt_equals_pyg(graph: Graph, batch: Any, width: int, heads: int):
    metadata = (graph.node_types, graph.edge_types)
    ours, peer = HGTConv(64, width, metadata, heads).double(), pyg.HGTConv(64, width, metadata, heads).double()
    with torch.no_grad():
        for parameter in peer.p_rel.values():
            parameter.uniform_(0.5, 1.5)
    ours.load_state_dict(peer.state_dict())
    x = double(batch.x_dict)
    out, expected = ours(x, batch.edge_index_dict), peer(x, batch.edge_index_dict)
    assert out.keys() == expected.keys()
    used = [n for n, _ in peer.named_parameters() if width == 64 or not n.startswith("skip")]
    inputs = [[*x.values(), *(layer.get_parameter(n) for n in used)] for layer in (ours, peer)]
    flat = [torch.cat([each[t].reshape(-1) for t in graph.node_types]) for each in (out, expected)]
    assert_same(*flat, *inputs)


def models(graph: Graph) -> dict[str, nn.Module]:
    return {
        "rgcn": RGCN(64, 16, 2, 5, metadata=graph, targets=["paper"]),
        "rgcn, bases": RGCN(64, 16, 2, 5, metadata=graph, targets=["paper"], num_bases=2),
        "rgat": RGAT(64, 16, 2, 5, heads=4, metadata=graph, targets=["paper"]),
        "hgt": HGT(64, 16, 2, 5, heads=4, metadata=graph, targets=["paper"], norm="layer"),
    }


def test_models_are_trimmed_and_every_weight_has_a_gradient(graph: Graph, batch: Any):
    assert isinstance(models(graph)["rgcn"], TypedRGCN)
    for name, model in models(graph).items():
        whole = model(batch.x_dict, batch.edge_index_dict)["paper"][:20]
        trimmed = model(batch.x_dict, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)
        assert list(trimmed) == ["paper"]
        torch.testing.assert_close(trimmed["paper"], whole, rtol=1e-4, atol=1e-4)
        trimmed["paper"].sum().backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == [], name


def test_edges_that_are_not_there_leave_the_nodes_own_rows(graph: Graph, batch: Any):
    for model in models(graph).values():
        empty = {t: index[:, :0] for t, index in batch.edge_index_dict.items()}
        out = model(batch.x_dict, empty)["paper"]
        torch.testing.assert_close(model(batch.x_dict, {})["paper"], out)
        assert bool(out.isfinite().all())
        out.sum().backward()


def seeded_rgcn(graph: Graph, targets: Any) -> Any:
    torch.manual_seed(4)
    return RGCN(64, 8, 2, 3, metadata=graph, targets=targets)


def test_bad_use_says_what_to_do(graph: Graph, batch: Any):
    x, edges = batch.x_dict, batch.edge_index_dict
    narrow = {**x, "author": x["author"][:, :3]}
    for name, model in models(graph).items():
        with pytest.raises(ValueError, match=r"made for 64 channels of node type 'author'.*one width"):
            model(narrow, edges)
        with pytest.raises(ValueError, match="does not know edge type"):
            model(x, {**edges, ("paper", "likes", "paper"): edges["paper", "cites", "paper"]})
        with pytest.raises(ValueError, match="'author' has no rows"):
            model({t: rows for t, rows in x.items() if t != "author"}, edges)
        assert name
    one, same = (seeded_rgcn(graph, targets) for targets in ("paper", ["paper"]))
    assert torch.equal(one(x, edges)["paper"], same(x, edges)["paper"])

    all_types, edge_types = dict.fromkeys(graph.node_types, 4), graph.edge_types

    def counted(by_hop: Any) -> Any:
        return same(x, edges, num_sampled_nodes=by_hop)

    for message, make in [
        ("rows of one width", lambda: RGAT({"paper": 3, "author": 4, "institution": 3}, 8, 1, metadata=graph)),
        ("heads=3 must divide", lambda: HGT(4, 8, 1, heads=3, metadata=graph)),
        ("give one of the two", lambda: RGCN(4, 8, 1, metadata=graph, num_relations=3)),
        ("RGCN needs num_relations.* or metadata=graph", lambda: RGCN(4, 8, 1)),
        ("got None: without features it is the number of nodes", lambda: RGCN(None, 8, 1, num_relations=3)),
        (r"RGCN\(..., metadata=graph\) takes None, and widths", lambda: RGCN({"paper": 4}, 8, 1, num_relations=3)),
        (r"for node types \['paper', .*which only RGCN takes.*InputEncoder", lambda: HGT(None, 8, 1, metadata=graph)),
        (r"for node types \['author'\], which", lambda: RGAT({"paper": 4, "author": None}, 8, 1, metadata=graph)),
        (
            r"None for node types \['author'\], which only",
            lambda: RGATConv({"paper": 4, "author": None}, 8, edge_types),
        ),
        (r"None for node types \['author'\], which only", lambda: HGTConv({**all_types, "author": None}, 8, graph)),
        (r"\['author'\].*num_ids=.*InputEnc", lambda: TypedRGCNConv({**all_types, "author": None}, 8, edge_types)),
        (r"has no width for node types \['author', ", lambda: TypedRGCNConv({"paper": 4}, 8, edge_types)),
        (r"^in_channels must be a whole number of features.*got 8\.0", lambda: RGCN(8.0, 8, 2, metadata=graph)),
        (r"^in_channels must be a whole number of features.*got 8\.0", lambda: HGT(8.0, 8, 2, metadata=graph)),
        (r"^in_channels must be a whole number of features.*got 8\.0", lambda: RGATConv(8.0, 8, 3)),
        (r"in_channels must be a whole number of features.*got 8\.0", lambda: RGCN(8.0, 8, 2, num_relations=3)),
        (r"in_channels must be a whole number of features.*got '8'", lambda: RGCN("8", 8, 2, num_relations=3)),
        ("num_blocks=3 must divide", lambda: RGCN(4, 8, 1, metadata=graph, num_blocks=3)),
        ("exclude each other", lambda: RGCN(4, 8, 1, metadata=graph, num_blocks=2, num_bases=2)),
        ("positive, RGATConv is not lazily sized: got", lambda: RGAT(-1, 8, 1, metadata=graph)),
        ("RGATConv does not look nodes up by id: got None", lambda: RGATConv(None, 8, 3)),
        (
            "by node type, got list: pass batch.num_sampled_nodes_dict",
            lambda: counted(batch["paper"].num_sampled_nodes),
        ),
        ("attention_mechanism", lambda: RGATConv(4, 8, 3, attention_mechanism="none")),
        (r"^metadata must be a graph, .* pair \(node types, edge types\)", lambda: HGTConv(4, 8, list(edge_types))),
        (r"^metadata must be a graph, .*got a list", lambda: RGCN(4, 8, 1, metadata=list(edge_types)[:2])),
        (r"^metadata must be a graph, .*got a tuple", lambda: HGT(4, 8, 1, metadata=edge_types[0][:2])),
        (r"^metadata must be a graph, .*got a int", lambda: HGT(4, 8, 1, metadata=3)),
        ("edge_type must be given", lambda: RGATConv(64, 8, 3)(x["paper"], edges["paper", "cites", "paper"])),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_half_precision_and_autocast_stay_near_float32(graph: Graph, batch: Any):
    for name, model in models(graph).items():
        expected = model(batch.x_dict, batch.edge_index_dict)["paper"]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(batch.x_dict, batch.edge_index_dict)["paper"]
        torch.testing.assert_close(rounded.float(), expected, rtol=0.1, atol=0.1, msg=lambda m, n=name: f"{n}: {m}")
        rounded.float().sum().backward()
        half = {t: rows.bfloat16() for t, rows in batch.x_dict.items()}
        out = model.bfloat16()(half, batch.edge_index_dict)["paper"]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
