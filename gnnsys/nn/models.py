"""Reference models: stacks of one kind of layer, with PyG's names and arguments. All are a `Stack`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import nn

from gnnsys.nn.gat import GATConv
from gnnsys.nn.gcn import GCNConv
from gnnsys.nn.gin import GINConv
from gnnsys.nn.rgcn import RGCNConv
from gnnsys.nn.sage import SAGEConv
from gnnsys.nn.stack import Stack, check_heads, head_widths, stack_widths
from gnnsys.nn.typed_models import TypedRGCN


class GraphSAGE(Stack):
    """Hamilton 2017.

    >>> model = GraphSAGE(in_channels=128, hidden_channels=256, num_layers=3, out_channels=47)
    >>> out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)  # [batch_size, 47]
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        aggr: str = "mean",
    ) -> None:
        widths = stack_widths(hidden_channels, num_layers, out_channels)
        convs = [SAGEConv(i, o, aggr=aggr) for i, o in pairwise([in_channels, *widths])]
        super().__init__(convs, widths, norm, dropout)


class GCN(Stack):
    """Kipf & Welling 2017."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
    ) -> None:
        widths = stack_widths(hidden_channels, num_layers, out_channels)
        super().__init__([GCNConv(i, o) for i, o in pairwise([in_channels, *widths])], widths, norm, dropout)


class GAT(Stack):
    """Velickovic 2018. Hidden layers concatenate their heads (hidden_channels in all), the last one averages them."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        heads: int = 1,
        attention_dropout: float = 0.0,
    ) -> None:
        check_heads(heads, hidden_channels)
        widths = stack_widths(hidden_channels, num_layers, out_channels)
        convs = [
            GATConv(i, per_head, heads, concat=concat, dropout=attention_dropout)
            for i, (per_head, concat) in zip(
                [in_channels, *widths[:-1]], head_widths(widths, heads, out_channels), strict=True
            )
        ]
        super().__init__(convs, widths, norm, dropout)


class GIN(Stack):
    """Xu 2019, with MLPs of one hidden layer, hidden_channels wide."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        train_eps: bool = False,
    ) -> None:
        widths = stack_widths(hidden_channels, num_layers, out_channels)
        h = hidden_channels
        convs = [
            GINConv(nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, o)), train_eps=train_eps)
            for i, o in pairwise([in_channels, *widths])
        ]
        super().__init__(convs, widths, norm, dropout)


class RGCN(Stack):
    """Schlichtkrull 2018. Without features, `in_channels` is the number of nodes and x is None or node ids.

    `num_relations` makes the model that takes `x`, edges and `edge_type`. With `metadata` instead, a graph or PyG's
    (node types, edge types), it is one of typed graphs, `TypedRGCN`: rows by node type, edges by edge type.
    """

    def __new__(cls, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        if metadata is None:
            return super().__new__(cls)
        if "num_relations" in kwargs:
            raise ValueError("num_relations is for x and edge_type, metadata for typed graphs: give one of the two")
        return TypedRGCN(*args, metadata=metadata, **kwargs)

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        *,
        num_relations: int | None = None,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        metadata: Any = None,
    ) -> None:
        if num_relations is None:
            raise ValueError(
                "RGCN needs num_relations, the number of edge types, for x and edge_type, or metadata=graph for typed "
                "graphs: give one of the two"
            )
        widths = stack_widths(hidden_channels, num_layers, out_channels)
        convs = [
            RGCNConv(i, o, num_relations, num_bases=num_bases, num_blocks=num_blocks)
            for i, o in pairwise([in_channels, *widths])
        ]
        super().__init__(convs, widths, norm, dropout)
