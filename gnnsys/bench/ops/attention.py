"""What attention is made of: scores per edge (sddmm), their softmax per destination, and the fused aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnsys import ops
from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds, of_peer
from gnnsys.bench.ops.peer_graphs import dgl_graph
from gnnsys.bench.workload import Workload
from gnnsys.ops import CSC

HEADS = 4
SLOPE = 0.2
Call = Callable[[], Any]


def sddmm(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            csc = work.csc
            x = work.rows(csc.num_src, work.sizes.dim)
            found = {OURS: Side(lambda: ops.sddmm(csc, x, x), threads)}
            if "dgl" not in peers.missing("dgl"):
                found["dgl"] = of_peer(lambda: _dgl_dots(csc, x), threads)
            return found

        yield Case(
            f"sddmm/{threads}t",
            milliseconds(),
            sides,
            (Versus(("dgl",)),),
            agree=1e-3,
            repeats=5,
            missing=peers.missing("dgl"),
        )


def edge_softmax(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            csc = work.csc
            scores = work.rows(csc.num_edges, HEADS)
            found = {OURS: Side(lambda: ops.edge_softmax(csc, scores), threads)}
            if "dgl" not in peers.missing("dgl"):
                found["dgl"] = of_peer(lambda: _dgl_softmax(csc, scores), threads)
            if "pyg" not in peers.missing("pyg"):
                found["pyg"] = of_peer(lambda: _pyg_softmax(csc, scores), threads)
            return found

        yield Case(
            f"edge_softmax/{threads}t",
            milliseconds(),
            sides,
            (Versus(("dgl",)), Versus(("pyg",))),
            agree=1e-4,
            repeats=3,
            missing=peers.missing("dgl", "pyg"),
        )


def gat(work: Workload) -> Iterator[Case]:
    """Forward and backward of one attention layer's aggregation, on an eighth of the graph (PyG makes E x H x d)."""
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            csc = work.small_graph.csc()
            x = work.rows(csc.num_src, HEADS, work.sizes.dim // HEADS)
            score = work.rows(csc.num_src, HEADS)
            ours = _train(lambda x, s: ops.gat_aggregate(csc, x, s, s, negative_slope=SLOPE), x, score)
            found = {OURS: Side(ours, threads)}
            if "dgl" not in peers.missing("dgl"):
                found["dgl"] = of_peer(lambda: _train(_dgl_gat(csc), x, score), threads)
            if "pyg" not in peers.missing("pyg"):
                found["pyg"] = of_peer(lambda: _train(_pyg_gat(csc), x, score), threads)
            return found

        yield Case(
            f"gat/forward+backward/{threads}t",
            milliseconds(),
            sides,
            (Versus(("dgl",)), Versus(("pyg",))),
            agree=1e-3,
            repeats=3,
            missing=peers.missing("dgl", "pyg"),
        )


Attention = Callable[[Tensor, Tensor], Tensor]


def _train(aggregate: Attention, x: Tensor, score: Tensor) -> Call:
    x, score = x.clone().requires_grad_(), score.clone().requires_grad_()

    def step() -> Tensor:
        out = aggregate(x, score)
        torch.autograd.grad(out.sum(), (x, score))
        return out.detach()

    return step


def _dgl_dots(csc: CSC, x: Tensor) -> Call:
    graph, dgl = dgl_graph(csc), peers.find("dgl")
    assert not isinstance(dgl, str)
    return lambda: dgl.ops.u_dot_v(graph, x, x).squeeze(-1)


def _dgl_softmax(csc: CSC, scores: Tensor) -> Call:
    graph, dgl = dgl_graph(csc), peers.find("dgl")
    assert not isinstance(dgl, str)
    return lambda: dgl.ops.edge_softmax(graph, scores)


def _pyg_softmax(csc: CSC, scores: Tensor) -> Call:
    from torch_geometric.utils import softmax

    dst = csc.dst()
    return lambda: softmax(scores, dst, num_nodes=csc.num_dst)


def _dgl_gat(csc: CSC) -> Attention:
    graph, dgl = dgl_graph(csc), peers.find("dgl")
    assert not isinstance(dgl, str)

    def aggregate(x: Tensor, score: Tensor) -> Tensor:
        edges = torch.nn.functional.leaky_relu(dgl.ops.u_add_v(graph, score, score), SLOPE)
        return dgl.ops.u_mul_e_sum(graph, x, dgl.ops.edge_softmax(graph, edges).unsqueeze(-1))

    return aggregate


def _pyg_gat(csc: CSC) -> Attention:
    from torch_geometric.utils import scatter, softmax

    src, dst = csc.indices.long(), csc.dst()

    def aggregate(x: Tensor, score: Tensor) -> Tensor:
        edges = torch.nn.functional.leaky_relu(score.index_select(0, src) + score.index_select(0, dst), SLOPE)
        alpha = softmax(edges, dst, num_nodes=csc.num_dst)
        return scatter(x.index_select(0, src) * alpha.unsqueeze(-1), dst, dim=0, dim_size=csc.num_dst, reduce="sum")

    return aggregate


BENCHMARKS = [sddmm, edge_softmax, gat]
