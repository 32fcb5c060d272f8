"""Typed graphs: any number of ranks gives the rows and gradients of one dense computation, type by type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.fullgraph import (
    BinSchedule,
    BoundarySampling,
    ByNodeType,
    HybridParallel,
    JoinKept,
    Keep,
    Packing,
    Staleness,
    infer,
)
from gnnsys.fullgraph.plan import pass_planner
from gnnsys.fullgraph.run.typed_layer import TypedPiece
from gnnsys.graph import Graph
from gnnsys.nn import HGT, RGAT, RGCN, HeteroConv, HeteroGAT, HeteroSAGE, RGATConv, SAGEConv, TypedRGCNConv
from gnnsys.ops import STRUCTURES
from gnnsys.partition import partition_graph
from gnnsys.session.open_parts import open_alone
from gnnsys.store import DistEmbedding, SparseSGD
from tests.fullgraph.mixed import drawn
from tests.fullgraph.ranks import run_ranks as run_gloo_ranks
from tests.fullgraph.test_moves import LateStreams
from tests.fullgraph.thread_ranks import run_ranks

TOLERANCE = 1e-10
NUM_NODES = {"paper": 40, "author": 25, "venue": 6, "ghost": 0}
WIDTHS = {"paper": 6, "author": 4, "venue": 2, "ghost": 2}
EDGES = {
    ("author", "writes", "paper"): 120,
    ("paper", "written by", "author"): 90,
    ("paper", "cites", "paper"): 150,
    ("paper", "in", "venue"): 40,
    ("venue", "invites", "author"): 0,  # an edge type without edges
}
Rows = dict[str, Tensor]
make_piece = TypedPiece.of  # as it is


def make_graph(**node_data: Any) -> Graph:
    """With repeated edges, loops, nodes without in-edges, an edge type without edges and a node type without nodes."""
    draws = torch.Generator().manual_seed(5)
    edges = {}
    for (src, name, dst), count in EDGES.items():
        ends = [torch.randint(NUM_NODES[t] * 7 // 8, (count,), generator=draws) for t in (src, dst)]
        edges[src, name, dst] = torch.stack(ends)
    return Graph.from_edge_indices(edges, NUM_NODES, **node_data)


def rows_of(widths: dict[str, int] | int = 6, seed: int = 3) -> Rows:
    draws = torch.Generator().manual_seed(seed)
    width = dict.fromkeys(NUM_NODES, widths) if isinstance(widths, int) else widths
    return {t: torch.randn(n, width[t], dtype=torch.float64, generator=draws) for t, n in NUM_NODES.items()}


def ranks_of(size: int) -> Rows:
    """Papers are everywhere; authors on the last rank alone, which leaves the others without; venues but there."""
    draws = torch.Generator().manual_seed(7)
    return {
        "paper": torch.randint(size, (40,), generator=draws),
        "author": torch.full((25,), size - 1),
        "venue": torch.randint(max(1, size - 1), (6,), generator=draws),
        "ghost": torch.zeros(0, dtype=torch.int64),
    }


def loss_of(out: Rows, nodes: Rows) -> Tensor:
    """Depends on every row, and on which node it is of."""
    return sum((rows.sin() * (nodes[t] + 1)[:, None]).sum() for t, rows in out.items())  # type: ignore[return-value]


ALL = {t: torch.arange(n) for t, n in NUM_NODES.items()}


def close(got: Tensor | None, want: Tensor | None, scale: float) -> None:
    if got is None or want is None:
        assert (got is None or not got.any()) and (want is None or not want.any())
    elif want.numel():
        assert float((got - want).abs().max()) <= TOLERANCE * scale


def step(model: Any, x: Rows, nodes: Rows, *edges: Any) -> tuple[Rows, Rows, list[Tensor | None]]:
    """Rows, the gradients of x and those of the parameters."""
    x = {t: rows.clone().requires_grad_() for t, rows in x.items()}
    out = model(x, *edges)
    loss_of(out, nodes).backward()
    of_x = {t: rows.grad for t, rows in x.items()}
    return {t: rows.detach() for t, rows in out.items()}, of_x, [p.grad for p in model.parameters()]


def check(
    model: nn.Module, graph: Graph, x: Rows, size: int, dense: Callable[[Any, Rows, Graph], Rows] | None = None,
    run: Any = run_ranks, least_bins: int = 1, **options: Any,
) -> None:  # fmt: skip
    """That `size` ranks give what the model does on the whole graph in one process."""
    alone, edges = copy.deepcopy(model), {t: graph.csc(t) for t in graph.edge_types}
    if dense is None:
        want, x_grads, grads = step(alone, x, ALL, edges)
    else:
        want, x_grads, grads = step(_Dense(alone, dense, graph), x, ALL)
    largest = max(float(g.abs().max()) for g in grads if g is not None and g.numel())

    def work(rank: int, group: Any) -> Any:
        mine = copy.deepcopy(model)
        parallel = HybridParallel(mine, graph, ranks=ranks_of(size), group=group, timeout=60, **options)
        nodes = parallel.nodes
        out = step(parallel, {t: x[t][nodes[t]] for t in x}, nodes)
        (plan,) = parallel._planner.plans.values()
        assert all(len(each.bins) >= least_bins for each in plan.steps)
        return nodes, *out

    found = run(size, work)
    for node_type, count in NUM_NODES.items():
        assert torch.cat([nodes[node_type] for nodes, *_ in found]).sort().values.tolist() == list(range(count))
    for nodes, out, of_x, of_parameters in found:
        assert out.keys() == want.keys()
        for node_type, rows in out.items():
            close(rows, want[node_type][nodes[node_type]], 1.0)
        for node_type, grad in of_x.items():
            close(grad, None if x_grads[node_type] is None else x_grads[node_type][nodes[node_type]], largest)
        assert len(of_parameters) == len(grads)
        for got, expected in zip(of_parameters, grads, strict=True):
            close(got, expected, largest)


class _Dense(nn.Module):
    """A model computed by dense matrices, of which it only has the parameters."""

    def __init__(self, model: nn.Module, forward: Callable[[Any, Rows, Graph], Rows], graph: Graph) -> None:
        super().__init__()
        self.model, self._forward, self._graph = model, forward, graph

    def forward(self, x: Rows) -> Rows:
        return self._forward(self.model, x, self._graph)


def dense_rgcn(model: Any, x: Rows, graph: Graph, counts: Tensor | None = None) -> Rows:
    """Means over the in-edges of a type are a matrix; no code of ours is in it but the parameters.

    `counts` [v, u], by the ids of one graph, says how often node v counts the row of u.
    """
    sizes = list(NUM_NODES.values())
    for number, conv in enumerate(model.convs):
        out = {t: x[t] @ conv.root[t] + conv.bias[t] for t in conv.makes}
        for edge_type in conv.edge_types:
            src, _, dst = edge_type
            slot, row = conv.weight_of[edge_type]
            weight = conv.weight[slot]
            if len(conv.comp):
                weight = torch.einsum("b,bio->io", conv.comp[slot][row], weight)
            else:
                weight = weight[row] if weight.dim() == 3 else torch.block_diag(*weight[row])
            index = graph.edge_index(edge_type)
            a = torch.zeros(NUM_NODES[dst], NUM_NODES[src], dtype=torch.float64)
            a.index_put_((index[1], index[0]), torch.ones(index.shape[1], dtype=torch.float64), accumulate=True)
            mean = a / a.sum(1, keepdim=True).clamp(min=1)
            if counts is not None:
                rows_of_dst = counts.split(sizes)[list(NUM_NODES).index(dst)]
                mean = mean * rows_of_dst.split(sizes, dim=1)[list(NUM_NODES).index(src)]
            out[dst] = out[dst] + mean @ x[src] @ weight
        x = out if number == len(model.convs) - 1 else {t: rows.relu() for t, rows in out.items()}
    return x


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(1)
    return make().double()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return make_graph()


@pytest.mark.parametrize("size", [1, 4])
def test_rgcn_gives_the_rows_and_gradients_of_dense_matrices(graph, size):
    """Over gloo's connections where rows of types have widths of their own."""
    model = seeded(lambda: RGCN(WIDTHS, 8, 2, 4, metadata=graph))
    check(model, graph, rows_of(WIDTHS), size, dense_rgcn, run_gloo_ranks)
    model = seeded(lambda: RGCN(6, 8, 2, 4, metadata=graph, num_bases=2))
    check(model, graph, rows_of(6), size, dense_rgcn)
    model = seeded(lambda: RGCN(WIDTHS, 8, 2, 4, metadata=graph, num_blocks=2, targets=["paper"]))
    check(model, graph, rows_of(WIDTHS), size, dense_rgcn)


MODELS: dict[str, tuple[Callable[[Graph], nn.Module], Any]] = {
    "rgcn": (lambda g: RGCN(WIDTHS, 8, 3, 4, metadata=g, num_bases=3, norm="layer"), WIDTHS),
    "sage": (lambda g: HeteroSAGE(WIDTHS, 8, 2, 4, metadata=g, norm="layer"), WIDTHS),
    "sage, max": (lambda g: HeteroSAGE(-1, 8, 2, 4, aggr="max", metadata=g, targets=["author"]), 5),
    "gat": (lambda g: HeteroGAT(WIDTHS, 8, 2, 4, heads=2, metadata=g), WIDTHS),
    "rgat": (lambda g: RGAT(6, 8, 2, 4, heads=2, metadata=g), 6),
    "hgt": (lambda g: HGT(WIDTHS, 8, 2, 4, heads=2, metadata=g, targets=["paper", "venue"]), WIDTHS),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_typed_model_gives_on_ranks_and_in_bins_what_it_does_on_the_whole_graph(graph, name):
    make, widths = MODELS[name]
    model = seeded(lambda: make(graph))
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        model(rows_of(widths), {t: graph.csc(t) for t in graph.edge_types})
    for size, bins in ((1, 1), (1, 7), (2, 3), (4, 2)) if name == "rgcn" else ((1, 7), (2, 3)):
        schedule = BinSchedule(packing=Packing(num_bins=bins))
        check(model, graph, rows_of(widths), size, schedule=schedule, recompute=bins == 3)


def layer_list(graph: Graph) -> list[nn.Module]:
    """An encoder per type, layers of a list, a skip connection, and a head for one type."""
    encode = ByNodeType({t: nn.Sequential(nn.Linear(w, 8), nn.Tanh()) for t, w in WIDTHS.items()})
    attends = RGATConv(8, 4, graph.edge_types, heads=2)
    sage = {t: SAGEConv(8, 8) for t in graph.edge_types if t[2] == "paper"}
    return [encode, Keep("x"), TypedRGCNConv(8, 8, graph.edge_types), nn.LayerNorm(8), JoinKept("x"), attends,
            HeteroConv(sage, "mean"), ByNodeType({"paper": nn.Linear(8, 3)})]  # fmt: skip


class ListModel(nn.Module):
    """The list above on the whole graph."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Rows, edges: Any) -> Rows:
        encode, _, rgcn, norm, _, attends, sage, head = self.layers
        x = encode(x)
        kept, x = x, rgcn(x, edges)
        x = attends({t: (norm(rows) if t in x else 0) + kept[t] for t, rows in ({**kept, **x}).items()}, edges)
        return head(sage(x, {t: edges[t] for t in sage.edge_types}))


@pytest.mark.parametrize("size", [1, 3])
def test_a_list_of_typed_layers_gives_what_calling_them_one_by_one_does(graph, size):
    model = seeded(lambda: ListModel(layer_list(graph)))
    edges = {t: graph.csc(t) for t in graph.edge_types}
    x = rows_of(WIDTHS)
    want, x_grads, grads = step(copy.deepcopy(model), x, ALL, edges)
    largest = max(float(g.abs().max()) for g in grads if g is not None and g.numel())

    def work(rank: int, group: Any) -> Any:
        mine = HybridParallel(list(copy.deepcopy(model).layers), graph, ranks=ranks_of(size), group=group, timeout=60)
        return mine.nodes, *step(mine, {t: x[t][mine.nodes[t]] for t in x}, mine.nodes)

    for nodes, out, of_x, of_parameters in run_ranks(size, work):
        assert list(out) == ["paper"]
        close(out["paper"], want["paper"][nodes["paper"]], 1.0)
        for node_type in x:
            close(of_x[node_type], x_grads[node_type][nodes[node_type]], largest)
        for got, expected in zip(of_parameters, grads, strict=True):
            close(got, expected, largest)


class JoinedModel(nn.Module):
    """Papers alone have results of the last typed layer; the others come back behind it, and are projected."""

    def __init__(self, how: str) -> None:
        super().__init__()
        last = TypedRGCNConv(8, 8, [t for t in EDGES if t[2] == "paper"])
        head = nn.Linear(8 if how == "add" else 16, 3)
        self.layers = nn.ModuleList([ByNodeType({t: nn.Linear(w, 8) for t, w in WIDTHS.items()}), Keep("own"), last,
                                     nn.ReLU(), JoinKept("own", how), head])  # fmt: skip
        self.how = how

    def forward(self, x: Rows, edges: Any) -> Rows:
        encode, _, last, relu, join, head = self.layers
        own = encode(x)
        out = last(own, {t: edges[t] for t in last.edge_types})
        joined = {t: join(relu(out[t]) if t in out else torch.zeros_like(rows), rows) for t, rows in own.items()}
        return {t: head(rows) for t, rows in joined.items()}


@pytest.mark.parametrize("size, how", [(1, "cat"), (3, "add"), (3, "cat")])
def test_types_that_are_joined_behind_the_last_typed_layer_are_in_the_result(graph, size, how):
    model, x = seeded(lambda: JoinedModel(how)), rows_of(WIDTHS)
    edges = {t: graph.csc(t) for t in graph.edge_types}
    want, x_grads, grads = step(copy.deepcopy(model), x, ALL, edges)
    assert want.keys() == NUM_NODES.keys()
    largest = max(float(g.abs().max()) for g in grads if g is not None and g.numel())

    def work(rank: int, group: Any) -> Any:
        mine = HybridParallel(list(copy.deepcopy(model).layers), graph, ranks=ranks_of(size), group=group, timeout=60)
        return mine.nodes, *step(mine, {t: x[t][mine.nodes[t]] for t in x}, mine.nodes)

    for nodes, out, of_x, of_parameters in run_ranks(size, work):
        assert out.keys() == want.keys()
        for node_type, rows in out.items():
            close(rows, want[node_type][nodes[node_type]], 1.0)
            close(of_x[node_type], x_grads[node_type][nodes[node_type]], largest)
        for got, expected in zip(of_parameters, grads, strict=True):
            close(got, expected, largest)


def test_types_without_features_train_rows_of_their_own_on_any_number_of_ranks(graph):
    """Authors have an embedding, of which every rank trains the rows of its own nodes."""
    x = rows_of(6)
    model = seeded(lambda: RGCN(6, 8, 2, 4, metadata=graph, targets=["paper"]))
    embedding = x.pop("author")

    def train(rank: int, group: Any, size: int) -> Any:
        parallel = HybridParallel(copy.deepcopy(model), graph, ranks=ranks_of(size), group=group, timeout=60)
        nodes, authors = parallel.nodes, nn.Embedding.from_pretrained(embedding.clone(), freeze=False)
        optimizer = torch.optim.Adam([*parallel.parameters(), *authors.parameters()], lr=0.05)
        losses = []
        for _ in range(3):
            out = parallel({**{t: x[t][nodes[t]] for t in x}, "author": authors(nodes["author"])})
            loss = loss_of(out, nodes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(parallel.total(loss.detach()))
        return losses, nodes["author"], authors.weight.detach()[nodes["author"]]

    (want, _, trained), *_ = run_ranks(1, lambda rank, group: train(rank, group, 1))
    assert not torch.allclose(trained, embedding)
    for losses, nodes, rows in run_ranks(3, lambda rank, group: train(rank, group, 3)):
        assert losses == pytest.approx(want, rel=1e-9)
        close(rows, trained[nodes], 1.0)


def test_dropout_is_the_same_on_any_number_of_ranks(graph):
    model, x = seeded(lambda: RGCN(6, 8, 3, 4, metadata=graph, dropout=0.4)), rows_of(6)

    def work(rank: int, group: Any, size: int) -> Any:
        mine = HybridParallel(copy.deepcopy(model), graph, ranks=ranks_of(size), group=group, timeout=60, seed=2)
        return mine.nodes, *step(mine, {t: x[t][mine.nodes[t]] for t in x}, mine.nodes)

    ((_, want, _, grads),) = run_ranks(1, lambda rank, group: work(rank, group, 1))
    assert not torch.allclose(want["paper"], model.eval()(x, {t: graph.csc(t) for t in graph.edge_types})["paper"])
    model.train()
    for nodes, out, _, of_parameters in run_ranks(3, lambda rank, group: work(rank, group, 3)):
        for node_type, rows in out.items():
            close(rows, want[node_type][nodes[node_type]], 1.0)
        for got, expected in zip(of_parameters, grads, strict=True):
            close(got, expected, float(expected.abs().max()))


def test_dropout_inside_modules_by_node_type_is_the_same_on_any_number_of_ranks(graph):
    """Torch's dropout too: two of them in one stage drop other columns, and other ones again for another module."""

    def encoder() -> nn.Module:
        return ByNodeType(
            {t: nn.Sequential(nn.Dropout(0.4), nn.Linear(w, 8), nn.Dropout(0.4)) for t, w in WIDTHS.items()}
        )

    drop = ByNodeType(dict.fromkeys(NUM_NODES, nn.Dropout(0.4)))
    layers = seeded(lambda: nn.ModuleList([encoder(), drop, TypedRGCNConv(8, 4, graph.edge_types)]))
    x = rows_of(WIDTHS)

    def work(rank: int, group: Any, size: int) -> Any:
        mine = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks_of(size), group=group, timeout=60, seed=2,
            schedule=BinSchedule(packing=Packing(num_bins=size)), recompute=size == 3,
        )  # fmt: skip
        return mine.nodes, *step(mine, {t: x[t][mine.nodes[t]] for t in x}, mine.nodes)

    ((_, want, x_grads, grads),) = run_ranks(1, lambda rank, group: work(rank, group, 1))
    encode, _, conv = layers
    exact = conv(copy.deepcopy(encode).eval()(x), {t: graph.csc(t) for t in graph.edge_types})
    assert not torch.allclose(want["paper"], exact["paper"])
    for nodes, out, of_x, of_parameters in run_ranks(3, lambda rank, group: work(rank, group, 3)):
        for node_type, rows in out.items():
            close(rows, want[node_type][nodes[node_type]], 1.0)
            close(of_x[node_type], x_grads[node_type][nodes[node_type]], 1 + float(x_grads[node_type].abs().sum()))
        for got, expected in zip(of_parameters, grads, strict=True):
            close(got, expected, 1 + float(expected.abs().sum()))


def test_features_that_stay_travel_once_and_approximate_passes_give_the_rows_of_dense_matrices(graph):
    """While parameters stay, late rows are those of now and stale passes exact; sampled ones count what was drawn."""
    model, x = seeded(lambda: RGCN(6, 8, 2, 4, metadata=graph)), rows_of(6)
    ranks, ids = torch.cat(list(ranks_of(2).values())), torch.arange(sum(NUM_NODES.values()))

    def counts_of(policy: Any, number: int) -> Tensor | None:
        if not isinstance(policy, BoundarySampling):
            return None
        return drawn(ranks, policy.rate, lambda rank: policy.draw(ids, 9, number, rank))

    def check_pass(parallel: Any, number: int, policy: Any, out: Rows) -> None:
        alone = copy.deepcopy(model)
        want = dense_rgcn(alone, x, graph, counts_of(policy, number))
        loss_of(want, ALL).backward()
        for node_type, rows in out.items():
            close(rows.detach(), want[node_type].detach()[parallel.nodes[node_type]], 1.0)
        largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.numel())
        for p, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
            close(p.grad, expected.grad, largest)

    def work(rank: int, group: Any, policy: Any) -> list[int]:
        parallel = HybridParallel(
            copy.deepcopy(model), graph, ranks=ranks_of(2), group=group, timeout=60, approximate=policy, seed=9
        )
        own, sent = {t: x[t][parallel.nodes[t]] for t in x}, []
        once, each = parallel.least_bytes(own)
        assert once > 0 and "TypedRGCNConv + ReLU" in parallel.describe(own)
        for number in (1, 2, 3):
            parallel.zero_grad()
            out = parallel(dict(own))
            loss_of(out, parallel.nodes).backward()
            sent.append(parallel.times.num_bytes)
            check_pass(parallel, number, policy, out)
        if policy is None:
            assert sent == [once + each, each, each]
        return sent

    for policy in (None, Staleness(), BoundarySampling(0.5)):
        exact = run_ranks(2, lambda rank, group, policy=policy: work(rank, group, policy))
        assert all(sent[1] < sent[0] for sent in exact)


def test_structures_by_type_are_made_once_however_many_bins_there_are(graph, monkeypatch):
    monkeypatch.setattr(STRUCTURES, "_capacity", 8)
    made: list[Any] = []
    monkeypatch.setattr(TypedPiece, "of", classmethod(lambda cls, *given: made.append(cls) or make_piece(*given)))
    model = HybridParallel(
        seeded(lambda: RGCN(6, 8, 2, 4, metadata=graph)), graph, schedule=BinSchedule(packing=Packing(num_bins=30))
    )
    for number in range(3):
        made.clear()
        loss_of(model(rows_of(6)), ALL).backward()
        assert bool(made) == (number == 0)


def test_a_budget_and_bins_that_move_change_nothing_but_the_memory(graph, monkeypatch):
    def check_budget(name: str, num_bytes: int) -> None:
        make, widths = MODELS[name]
        check(seeded(lambda: make(graph)), graph, rows_of(widths), 1, least_bins=3, memory_budget=num_bytes)

    check_budget("rgcn", 20_000)
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    check_budget("hgt", 40_000)  # for two bins at a time
    make, widths = MODELS["rgcn"]
    check(seeded(lambda: make(graph)), graph, rows_of(widths), 2, schedule=BinSchedule(packing=Packing(num_bins=3)))


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_rows() -> Graph:
    x = rows_of(WIDTHS)
    return make_graph(node_data={t: {"x": x[t], "id": torch.arange(n)} for t, n in NUM_NODES.items()})


@pytest.mark.parametrize(("num_parts", "trainers", "size"), [(1, 1, 1), (3, 1, 1), (2, 2, 4), (3, 2, 2)])
def test_ranks_on_parts_give_what_one_gives_on_the_graph_in_memory(with_rows, tmp_path, num_parts, trainers, size):
    partition_graph(with_rows, num_parts, tmp_path / "parts", trainers_per_part=trainers, objective="communication")
    opened = open_alone(tmp_path / "parts", verify=True)
    model = seeded(lambda: RGCN(WIDTHS, 8, 2, 4, metadata=opened, dropout=0.3))

    def train(graph: Any, group: Any = None) -> Any:
        parallel = HybridParallel(copy.deepcopy(model), graph, group=group, timeout=60, seed=4)
        ids = parallel.share.rows("id")
        assert all(torch.equal(ids[t], parallel.nodes[t]) for t in NUM_NODES)
        assert torch.equal(parallel.share.rows("id", "author"), ids["author"])
        return parallel.nodes, *step(parallel, parallel.share.rows("x"), parallel.nodes)

    _, want, x_grads, grads = train(with_rows)
    for nodes, out, of_x, of_parameters in run_ranks(size, lambda rank, group: train(opened, group)):
        for node_type, rows in out.items():
            close(rows, want[node_type][nodes[node_type]], 1.0)
            close(of_x[node_type], x_grads[node_type][nodes[node_type]], 1 + float(x_grads[node_type].abs().sum()))
        for got, expected in zip(of_parameters, grads, strict=True):
            close(got, expected, float(expected.abs().max()))


def test_rows_of_every_node_come_from_a_trained_model(with_rows):
    model = seeded(lambda: HeteroSAGE(WIDTHS, 8, 2, 4, metadata=with_rows, dropout=0.5, targets=["paper"]))
    nodes, rows = infer(model, with_rows, "x")
    want = model.eval()(rows_of(WIDTHS), {t: with_rows.csc(t) for t in with_rows.edge_types})
    assert torch.equal(nodes["paper"], ALL["paper"]) and list(rows) == ["paper"]
    close(rows["paper"], want["paper"].detach(), 1.0)


def test_an_embedding_of_parts_gets_the_gradients_of_its_nodes(with_rows, tmp_path):
    """Beside rows of a graph in memory that need a gradient themselves."""
    partition_graph(with_rows, 2, tmp_path / "parts", objective="communication")
    model = seeded(lambda: RGCN(WIDTHS, 8, 2, 4, metadata=with_rows)).float()
    x = {t: rows.float() for t, rows in rows_of(WIDTHS).items()}
    with gnnsys.init(process_group=False):
        opened = gnnsys.open(tmp_path / "parts")
        parallel = HybridParallel(model, opened)
        nodes, ids = parallel.nodes, parallel.share.global_ids("author")
        embedding = DistEmbedding(opened, dim=WIDTHS["author"], node_type="author", init=("uniform", -1.0, 1.0, 3))
        optimizer, before = SparseSGD([embedding], lr=0.1), embedding(ids).detach().clone()
        own = {t: x[t][nodes[t]] for t in x}
        loss_of(parallel({**own, "author": embedding(ids)}), nodes).backward()
        optimizer.step()
        after = embedding(ids).detach().clone()
    x["author"] = x["author"].index_copy(0, nodes["author"], before)
    _, x_grads, _ = step(HybridParallel(model, with_rows), x, ALL)
    torch.testing.assert_close(after, before - 0.1 * x_grads["author"][nodes["author"]])
    assert not torch.equal(after, before)
