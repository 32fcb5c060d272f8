"""Reference models: stacks of one layer, with PyG's names and arguments, on whole graphs, batches and blocks.

A model takes rows and either one structure for all layers (edge_index, CSC) or one block per layer, outermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.nn.gat import GATConv
from gnnsys.nn.gcn import GCNConv
from gnnsys.nn.gin import GINConv
from gnnsys.nn.layer import traced_by_pyg
from gnnsys.nn.layer_inputs import Edges, Rows, as_csc, from_edge_index
from gnnsys.nn.plain import note_written
from gnnsys.nn.rgcn import RGCNConv
from gnnsys.nn.sage import SAGEConv
from gnnsys.ops import CSC

NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}


class Stack(nn.Module):
    """Layers with normalisation, ReLU and dropout between them; the last one is left as it is."""

    def __init__(self, convs: Sequence[nn.Module], widths: Sequence[int], norm: str | None, dropout: float) -> None:
        super().__init__()
        if norm is not None and norm not in NORMS:
            raise ValueError(f"norm must be None or one of {', '.join(NORMS)}, got {norm!r}")
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.Identity() if norm is None else NORMS[norm](width) for width in widths[:-1])
        self.dropout = dropout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_pyg(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _refuse_pyg(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if traced_by_pyg(args, kwargs):
            raise ValueError(
                f"PyG's to_hetero cannot take gnnsys.nn.{type(self).__name__} apart: write a module whose forward "
                "calls layers of gnnsys.nn, and transform that"
            )

    def reset_parameters(self) -> None:
        for module in [*self.convs, *self.norms]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: Rows | None,
        edges: Edges | Sequence[Edges],
        *,
        num_sampled_nodes: Sequence[int] | None = None,
        **edge_rows: Tensor,
    ) -> Tensor:
        """`edge_rows` go to every layer (GCN: edge_weight, GAT: edge_attr, RGCN: edge_type).

        `num_sampled_nodes`, of a batch whose edges come hop by hop, drops in each layer what its output cannot depend
        on; the result has rows for the seeds alone, equal to the first rows of the untrimmed one.
        """
        self._refuse_pyg((x, edges), {})
        if num_sampled_nodes is not None:
            x, edges = self._trim(x, edges, num_sampled_nodes, edge_rows)
        per_layer = list(edges) if isinstance(edges, Sequence) else [edges] * len(self.convs)
        if len(per_layer) != len(self.convs):
            raise ValueError(f"edges has {len(per_layer)} blocks for {len(self.convs)} layers")
        for index, (conv, structure) in enumerate(zip(self.convs, per_layer, strict=True)):
            x = conv(x, structure, **edge_rows)
            if index < len(self.convs) - 1:
                x = F.dropout(self.norms[index](x).relu(), self.dropout, self.training)
        assert isinstance(x, Tensor)
        return x

    def _trim(
        self, x: Rows | None, edges: Edges | Sequence[Edges], num_sampled_nodes: Sequence[int], edge_rows: object
    ) -> tuple[Tensor, list[CSC]]:
        if edge_rows or not isinstance(x, Tensor) or isinstance(edges, Sequence):
            raise ValueError("num_sampled_nodes needs one tensor x, one structure and no edge rows")
        if any(isinstance(module, GCNConv) and module.normalize for module in self.convs.modules()):
            raise ValueError(
                "num_sampled_nodes gives layers prefixes of the batch, and GCNConv divides by degrees in the whole "
                f"batch, which those lack: drop num_sampled_nodes, or GCNConv from {type(self).__name__}"
            )
        csc = from_edge_index(edges, x.shape[0], x.shape[0])[0] if isinstance(edges, Tensor) else as_csc(edges)
        layers = hop_prefixes(csc, num_sampled_nodes, len(self.convs))
        return x[: layers[0].num_src], layers


note_written(Stack, "forward", "__call__")


def hop_prefixes(csc: CSC, num_sampled_nodes: Sequence[int], num_layers: int) -> list[CSC]:
    """What each layer of a sampled batch needs: layer l computes the nodes within num_layers - 1 - l hops of the seeds.

    Nodes come hop by hop, so the structures are prefixes of one CSC, and views of it. That the sources of a prefix are
    among its nodes is checked: on a device kernels would read beyond them.
    """
    if not num_sampled_nodes or min(num_sampled_nodes) < 0:
        raise ValueError(f"num_sampled_nodes must be a number >= 0 for each hop, got {list(num_sampled_nodes)}")
    within = list(accumulate(num_sampled_nodes))  # within[h]: nodes at most h hops from the seeds
    if within[-1] != csc.num_src:
        raise ValueError(f"num_sampled_nodes adds up to {within[-1]}, but x has {csc.num_src} rows")
    sizes = [within[min(hops, len(within) - 1)] for hops in range(num_layers, -1, -1)]  # sources, then destinations
    if sizes[1] > csc.num_dst:
        raise ValueError(f"num_sampled_nodes asks for {sizes[1]} destinations, but edges has {csc.num_dst}")
    ends = csc.ends(sizes[1:])
    prefixes = list(zip(sizes, sizes[1:], ends, strict=False))
    if not all(csc.comes_by_hops(num_src, num_dst) for num_src, num_dst, _ in prefixes):
        _check_sources(csc, prefixes, num_sampled_nodes)
    return [
        CSC(csc.indptr[: num_dst + 1], csc.indices[:end], num_src, is_replayed=csc.is_replayed)
        for num_src, num_dst, end in prefixes
    ]


def _check_sources(csc: CSC, prefixes: Sequence[tuple[int, int, int]], num_sampled_nodes: Sequence[int]) -> None:
    """Looks at the edges of each prefix, (sources, destinations, edges). On a device one wait."""
    asked = [(num_src, end) for num_src, _, end in prefixes if end and num_src < csc.num_src]
    if not asked:
        return
    largest = torch.stack([csc.indices[:end].max() for _, end in asked]).tolist()
    for (num_src, _), found in zip(asked, largest, strict=True):
        if found >= num_src:
            raise ValueError(
                f"num_sampled_nodes={list(num_sampled_nodes)} does not belong to these edges: a layer would have the "
                f"first {num_src} nodes as sources, and an edge comes from node {found}. Pass the batch's own "
                "num_sampled_nodes, with the edge_index as it came"
            )


def _widths(hidden_channels: int, num_layers: int, out_channels: int | None) -> list[int]:
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    return [hidden_channels] * (num_layers - 1) + [hidden_channels if out_channels is None else out_channels]


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
        widths = _widths(hidden_channels, num_layers, out_channels)
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
        widths = _widths(hidden_channels, num_layers, out_channels)
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
        if hidden_channels % heads:
            raise ValueError(f"heads={heads} must divide hidden_channels={hidden_channels}")
        widths = _widths(hidden_channels, num_layers, out_channels)
        convs = []
        for index, (i, o) in enumerate(pairwise([in_channels, *widths])):
            averages = index == num_layers - 1 and out_channels is not None
            per_head = o if averages else o // heads
            convs.append(GATConv(i, per_head, heads, concat=not averages, dropout=attention_dropout))
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
        widths = _widths(hidden_channels, num_layers, out_channels)
        h = hidden_channels
        convs = [
            GINConv(nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, o)), train_eps=train_eps)
            for i, o in pairwise([in_channels, *widths])
        ]
        super().__init__(convs, widths, norm, dropout)


class RGCN(Stack):
    """Schlichtkrull 2018. Without features, `in_channels` is the number of nodes and x is None or node ids."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        *,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        widths = _widths(hidden_channels, num_layers, out_channels)
        convs = [
            RGCNConv(i, o, num_relations, num_bases=num_bases, num_blocks=num_blocks)
            for i, o in pairwise([in_channels, *widths])
        ]
        super().__init__(convs, widths, norm, dropout)
