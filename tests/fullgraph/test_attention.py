"""Dropout of attention in our GATConv: one mask per step, layer, in-edge and head, whatever the ranks and bins."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing, Residual
from gnnsys.fullgraph.plan import pass_planner
from gnnsys.nn import GATConv
from gnnsys.ops import dropout_rows, stream_key
from tests.fullgraph.dense import random_graph
from tests.fullgraph.test_exact import close, random_ranks
from tests.fullgraph.test_moves import LateStreams
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value

N, WIDTH, SEED = 60, 5, 9
GRAPH = random_graph(N, 300, 1)
X = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    made = [GATConv(WIDTH, 3, heads=2, dropout=0.4), nn.ELU(), GATConv(6, 4, heads=2, concat=False, dropout=0.6)]
    return [layer.double() for layer in made]


def in_edges() -> list[list[int]]:
    """The sources of every node in the input's order without self loops, and then one."""
    out: list[list[int]] = [[] for _ in range(N)]
    for u, v in GRAPH.edge_index().t().tolist():
        if u != v:
            out[v].append(u)
    return [[*sources, v] for v, sources in enumerate(out)]


def dense(conv: GATConv, x: Tensor, key: int) -> Tensor:
    """Edge by edge, with the masks that are written down: node * 2^24 + place among its in-edges, under the key."""
    sources = in_edges()
    src = torch.tensor([u for each in sources for u in each])
    dst = torch.tensor([v for v, each in enumerate(sources) for _ in each])
    ids = torch.tensor([v * 2**24 + place for v, each in enumerate(sources) for place in range(len(each))])
    rows = (x @ conv.lin.weight.t()).view(N, conv.heads, conv.out_channels)
    score = (rows * conv.att_src).sum(-1)[src] + (rows * conv.att_dst).sum(-1)[dst]
    weight = F.leaky_relu(score, conv.negative_slope).exp()
    weight = weight / torch.zeros(N, conv.heads, dtype=x.dtype).index_add(0, dst, weight)[dst]
    mask = dropout_rows(torch.ones(len(ids), conv.heads, dtype=x.dtype), ids, conv.dropout, key)
    out = torch.zeros_like(rows).index_add(0, dst, (weight * mask)[..., None] * rows[src])
    return (out.flatten(1) if conv.concat else out.mean(1)) + conv.bias


def expected(made: list[nn.Module], step: int) -> tuple[Tensor, list[Tensor]]:
    """Result and gradients of a step: stages are numbered, and so are the uses of dropout in each."""
    first, elu, last = copy.deepcopy(made)
    key = stream_key(SEED, step)
    out = dense(last, elu(dense(first, X, stream_key(stream_key(key, 0), 1))), stream_key(stream_key(key, 1), 1))
    out.square().sum().backward()
    return out.detach(), [p.grad for layer in (first, last) for p in layer.parameters()]


OPTIONS = {
    "default": {},
    "bins of one node": {"schedule": BinSchedule(packing=Packing(bin_nodes=1))},
    "recompute": {"schedule": BinSchedule(packing=Packing(num_bins=4)), "recompute": True},
    "budget": {"memory_budget": 60_000},
}


@every_value(world_size=[1, 2, 3], moves={"rows lie": False, "rows move": True}, options=OPTIONS)
def test_attention_is_dropped_alike_on_any_number_of_ranks(world_size, moves, options, monkeypatch):
    if moves:
        monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    made = layers()

    def work(rank, group):
        ranks = torch.zeros(N, dtype=torch.int64) if world_size == 1 else random_ranks(world_size, N)
        mine = copy.deepcopy(made)
        model = HybridParallel(mine, GRAPH, ranks=ranks, group=group, timeout=60, seed=SEED, **options)
        found = []
        for _ in range(2):
            model.zero_grad()
            out = model(X[model.nodes])
            out.square().sum().backward()
            found.append((model.nodes, out.detach(), [p.grad.clone() for p in model.parameters()]))
        return found

    for steps in run_ranks(world_size, work):
        for number, (nodes, out, grads) in enumerate(steps):
            want, want_grads = expected(made, number + 1)
            close(out, want[nodes])
            for got, grad in zip(grads, want_grads, strict=True):
                close(got, grad)


def test_steps_differ_and_evaluation_drops_nothing():
    made = layers()
    model = HybridParallel(made, GRAPH, seed=SEED)
    assert not torch.equal(model(X), model(X))
    model.eval()
    plain = copy.deepcopy(made)
    for layer in (plain[0], plain[2]):
        layer.dropout = 0.0
    close(model(X).detach(), HybridParallel(plain, GRAPH)(X).detach())


def test_a_layer_with_a_residual_drops_its_attention_too():
    torch.manual_seed(0)
    made = [Residual(GATConv(WIDTH, WIDTH, dropout=0.5, residual=True).double())]
    whole = HybridParallel(copy.deepcopy(made), GRAPH, seed=SEED)(X).detach()
    schedule = BinSchedule(packing=Packing(num_bins=5))
    close(HybridParallel(copy.deepcopy(made), GRAPH, seed=SEED, schedule=schedule)(X).detach(), whole)
    assert not torch.equal(whole, HybridParallel(copy.deepcopy(made), GRAPH, seed=SEED + 1)(X).detach())
