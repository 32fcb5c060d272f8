"""What layers compute, as dense matrices in float64: the oracle of full-graph training, with no code of ours in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import Graph


def random_graph(num_nodes: int, num_edges: int, seed: int, loops: bool = True) -> Graph:
    """Directed, with repeated edges, isolated nodes and, with `loops`, self loops."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(max(1, num_nodes - num_nodes // 8), (2, num_edges), generator=generator)
    ends = ends if loops else ends[:, ends[0] != ends[1]]
    return Graph.from_edge_index(ends, num_nodes)


def adjacency(graph: Graph) -> Tensor:
    """A[v, u]: how many edges lead from u to v."""
    n, edges = graph.num_nodes(), graph.edge_index()
    out = torch.zeros(n, n, dtype=torch.float64)
    return out.index_put_((edges[1], edges[0]), torch.ones(edges.shape[1], dtype=torch.float64), accumulate=True)


def sage(conv: Any, x: Tensor, a: Tensor) -> Tensor:
    degree = a.sum(1, keepdim=True).clamp(min=1)
    return (a @ x / degree) @ conv.lin_l.weight.t() + conv.lin_l.bias + x @ conv.lin_r.weight.t()


def gcn(conv: Any, x: Tensor, a: Tensor) -> Tensor:
    looped = a - torch.diag(a.diagonal()) + torch.eye(len(a), dtype=a.dtype)
    scale = looped.sum(1).pow(-0.5)
    return scale[:, None] * (looped @ (scale[:, None] * (x @ conv.lin.weight.t()))) + conv.bias


def gat(conv: Any, x: Tensor, a: Tensor) -> Tensor:
    """Repeated edges count in the softmax as often as they are there."""
    looped = a - torch.diag(a.diagonal()) + torch.eye(len(a), dtype=a.dtype)
    rows = (x @ conv.lin.weight.t()).view(len(x), conv.heads, conv.out_channels)
    src, dst = (rows * conv.att_src).sum(-1), (rows * conv.att_dst).sum(-1)
    score = F.leaky_relu(dst[:, None] + src[None], conv.negative_slope)  # [v, u, heads]
    weight = (score - score.amax(1, keepdim=True)).exp() * looped[..., None]
    weight = weight / weight.sum(1, keepdim=True)
    out = torch.einsum("vuh,uhc->vhc", weight, rows)
    return (out.flatten(1) if conv.concat else out.mean(1)) + conv.bias


def gin(conv: Any, x: Tensor, a: Tensor) -> Tensor:
    return conv.nn((1 + conv.eps) * x + a @ x)


DENSE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "SAGEConv": sage, "GCNConv": gcn, "GATConv": gat, "GINConv": gin,
}  # fmt: skip


def dense_forward(layers: Sequence[nn.Module], x: Tensor, a: Tensor) -> Tensor:
    """The layers one after the other on the whole graph; of ours only the parameters are used."""
    kept: dict[str, Tensor] = {}
    for layer in layers:
        name = type(layer).__name__
        if name in DENSE:
            x = DENSE[name](layer, x, a)
        elif name == "Keep":
            kept[layer.name] = x
        elif name == "JoinKept":
            x = x + kept[layer.name] if layer.how == "add" else torch.cat([x, kept[layer.name]], dim=-1)
        elif name == "Residual":
            own = x if layer.project is None else layer.project(x)
            x = dense_forward([layer.conv, *layer.then], x, a) + own
        else:
            x = layer(x)
    return x
