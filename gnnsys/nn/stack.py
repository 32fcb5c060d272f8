"""A stack of layers: what the reference models have in common, on whole graphs, batches and blocks.

A model takes rows and either one structure for all layers (edge_index, CSC) or one block per layer, outermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.nn.gcn import GCNConv
from gnnsys.nn.layer import check_edge_rows, traced_by_pyg
from gnnsys.nn.layer_inputs import Edges, Rows, as_csc, from_edge_index
from gnnsys.nn.plain import note_written
from gnnsys.nn.sage import SAGEConv
from gnnsys.ops import CSC

NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}


def check_norm(norm: str | None) -> None:
    if norm is not None and norm not in NORMS:
        raise ValueError(f"norm must be None or one of {', '.join(NORMS)}, got {norm!r}")


class Stack(nn.Module):
    """Layers with normalisation, ReLU and dropout between them; the last one is left as it is."""

    def __init__(self, convs: Sequence[nn.Module], widths: Sequence[int], norm: str | None, dropout: float) -> None:
        super().__init__()
        check_norm(norm)
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
        if edge_rows:
            check_edge_rows(self, edge_rows, self.convs)
        if num_sampled_nodes is not None:
            x, edges = self._trim(x, edges, num_sampled_nodes, edge_rows)
        convs, norms = list(self.convs), list(self.norms)  # attributes of a module are found slowly
        per_layer = list(edges) if isinstance(edges, Sequence) else [edges] * len(convs)
        if len(per_layer) != len(convs):
            raise ValueError(f"edges has {len(per_layer)} blocks for {len(convs)} layers")
        dropout = self.dropout if self.training else 0.0
        for index, (conv, structure) in enumerate(zip(convs, per_layer, strict=True)):
            x = conv(x, structure, **edge_rows)
            if index < len(convs) - 1:
                rows: Tensor = norms[index](x).relu()
                x = F.dropout(rows, dropout) if dropout else rows
        assert isinstance(x, Tensor)
        return x

    def _trim(
        self, x: Rows | None, edges: Edges | Sequence[Edges], num_sampled_nodes: Sequence[int], edge_rows: object
    ) -> tuple[Tensor, list[CSC]]:
        if edge_rows or not isinstance(x, Tensor) or isinstance(edges, Sequence):
            raise ValueError("num_sampled_nodes needs one tensor x, one structure and no edge rows")
        if any(divides_by_degrees(conv) for conv in self.convs):
            raise ValueError(
                "num_sampled_nodes gives layers prefixes of the batch, and GCNConv divides by degrees in the whole "
                f"batch, which those lack: drop num_sampled_nodes, or GCNConv from {type(self).__name__}"
            )
        csc = from_edge_index(edges, x.shape[0], x.shape[0])[0] if isinstance(edges, Tensor) else as_csc(edges)
        layers = hop_prefixes(csc, num_sampled_nodes, len(self.convs))
        return x[: layers[0].num_src], layers


note_written(Stack, "forward", "__call__")


def divides_by_degrees(conv: nn.Module) -> bool:
    """Whether a layer is a normalising GCNConv, or has one inside."""
    if type(conv) is SAGEConv:  # asked of every batch, and looking through modules takes long
        return False
    return any(isinstance(module, GCNConv) and module.normalize for module in conv.modules())


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
        CSC(csc.indptr[: num_dst + 1], csc.indices[:end], num_src, sums=csc.sums, is_replayed=csc.is_replayed)
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


def stack_widths(hidden_channels: int, num_layers: int, out_channels: int | None) -> list[int]:
    """The width of each layer's rows."""
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    return [hidden_channels] * (num_layers - 1) + [hidden_channels if out_channels is None else out_channels]


def head_widths(widths: Sequence[int], heads: int, out_channels: int | None) -> list[tuple[int, bool]]:
    """The width of a head in each layer, and whether heads are concatenated.

    Hidden layers concatenate their heads. The last one averages them where it has `out_channels` of its own.
    """
    layers = [(width // heads, True) for width in widths]
    return layers if out_channels is None else [*layers[:-1], (out_channels, False)]


def check_heads(heads: int, hidden_channels: int) -> None:
    if hidden_channels % heads:
        raise ValueError(f"heads={heads} must divide hidden_channels={hidden_channels}")
