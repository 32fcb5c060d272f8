"""Models of typed graphs: stacks of one kind of layer, with PyG's names and arguments, on graphs, batches and blocks.

A model takes rows by node type and either structures by edge type for all layers (`batch.edge_index_dict`) or one typed
block per layer, outermost first. It gives rows by node type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.graph import Graph, NodeType, some
from gnnsys.nn.gat import GATConv
from gnnsys.nn.hetero import HeteroConv
from gnnsys.nn.hgt import HGTConv
from gnnsys.nn.init import linear
from gnnsys.nn.input_errors import why_unfit_by_type
from gnnsys.nn.layer import TypedLayer
from gnnsys.nn.rgat import RGATConv
from gnnsys.nn.sage import SAGEConv
from gnnsys.nn.stack import check_heads, head_widths, stack_widths
from gnnsys.nn.typed_groups import Widths, check_in_channels, widths_by_type
from gnnsys.nn.typed_inputs import Metadata, TypedEdges, TypedRows, module_key
from gnnsys.nn.typed_rgcn import TypedRGCNConv
from gnnsys.nn.typed_stack import LayerPlan, TypedStack
from gnnsys.sampling import Block, DistGraph


def num_nodes_of(metadata: Metadata, node_types: Sequence[NodeType]) -> dict[NodeType, int]:
    """Of types without features, whose layers have a row per node."""
    if node_types and not isinstance(metadata, Graph | DistGraph):
        raise ValueError(
            f"in_channels is None for {some(list(node_types))}, which takes a row per node: metadata must be the "
            f"graph, not {type(metadata).__name__}"
        )
    return {t: metadata.num_nodes(t) for t in node_types}  # type: ignore[union-attr]


def original_ids_of(metadata: Metadata, node_types: Iterable[NodeType]) -> dict[NodeType, Tensor]:
    """Of every id of a graph in parts the user's, 8 bytes per node; empty of a graph in memory, where they are one."""
    if not isinstance(metadata, DistGraph):
        return {}
    return {t: metadata.original_ids(torch.arange(metadata.num_nodes(t), device="cpu"), t) for t in node_types}


def _layer_widths(
    plan: LayerPlan, in_channels: Widths, widths: Sequence[int]
) -> Iterator[tuple[dict[NodeType, int], int]]:
    """Of every layer, what the rows of node types have before it, and after it."""
    first = widths_by_type(in_channels, plan.takes)
    for before, width in pairwise([None, *widths]):
        assert width is not None
        yield first if before is None else dict.fromkeys(plan.node_types, before), width


def _hetero_convs(
    plan: LayerPlan, in_channels: Widths, widths: Sequence[int], make: Callable[[int, tuple[int, int], int], nn.Module]
) -> list[nn.Module]:
    """A `HeteroConv` per layer; `make(layer, widths of source and destination, width of the result)`."""
    convs: list[nn.Module] = []
    for layer, (of, width) in enumerate(_layer_widths(plan, in_channels, widths)):
        layers = {t: make(layer, (of[t[0]], of[t[2]]), width) for t in plan.uses[layer]}
        alone = {t: linear(of[t], width) for t in plan.alone(layer)}
        convs.append(HeteroConv(layers, "sum", alone))
    return convs


class WithOwn(TypedLayer):
    """A typed layer, and a linear layer of each node's own row added to its results."""

    def __init__(self, conv: nn.Module, before: Mapping[NodeType, int], width: int, makes: Sequence[NodeType]) -> None:
        super().__init__()
        self.conv, self.layer_name = conv, type(conv).__name__  # the layer that users know
        self.own = nn.ModuleDict({module_key(t): nn.Linear(before[t], width) for t in makes})

    def reset_parameters(self) -> None:
        for module in [self.conv, *self.own.values()]:
            module.reset_parameters()  # type: ignore[operator]

    def why_unfit(self, x: Mapping[NodeType, Any]) -> str | None:
        return why_unfit_by_type(self.conv, x, dict.fromkeys(x))  # widths were checked

    def forward(self, x: TypedRows, edges: TypedEdges) -> dict[NodeType, Tensor]:
        out = self.conv(x, edges)
        num_dst = edges.num_dst if isinstance(edges, Block) else {t: rows.shape[0] for t, rows in x.items()}
        for node_type, rows in x.items():
            if module_key(node_type) in self.own:
                made = out.get(node_type)
                num_rows = num_dst[node_type] if made is None else made.shape[0]
                own = self.own[module_key(node_type)](rows[:num_rows])
                out[node_type] = own if made is None else made + own
        return out


class HeteroSAGE(TypedStack):
    """GraphSAGE with a layer per edge type, whose results are summed up.

    `in_channels` is one width, or one per node type, or -1 for those of the first rows. `metadata` is the graph, or
    PyG's (node types, edge types). `targets` are the node types whose rows the last layer makes; None: all.

    >>> model = HeteroSAGE(64, 128, num_layers=2, out_channels=8, metadata=graph, targets=["paper"])
    >>> out = model(batch.x_dict, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)["paper"]
    """

    def __init__(
        self,
        in_channels: Widths,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        aggr: str = "mean",
        *,
        metadata: Metadata,
        targets: Sequence[NodeType] | None = None,
    ) -> None:
        widths, plan = stack_widths(hidden_channels, num_layers, out_channels), LayerPlan(metadata, num_layers, targets)
        convs = _hetero_convs(plan, in_channels, widths, lambda _, i, o: SAGEConv(i, o, aggr=aggr))
        super().__init__(convs, plan, widths, norm, dropout)


class HeteroGAT(TypedStack):
    """GAT with a layer per edge type: softmax runs over the in-edges of one type, and results are summed up.

    Hidden layers concatenate their heads (hidden_channels in all), the last one averages them. Nodes that an edge type
    leads to have no self loops in it; `residual` adds a linear layer of their own rows instead.
    """

    def __init__(
        self,
        in_channels: Widths,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        heads: int = 1,
        attention_dropout: float = 0.0,
        residual: bool = True,
        *,
        metadata: Metadata,
        targets: Sequence[NodeType] | None = None,
    ) -> None:
        check_heads(heads, hidden_channels)
        widths, plan = stack_widths(hidden_channels, num_layers, out_channels), LayerPlan(metadata, num_layers, targets)
        per_layer = head_widths(widths, heads, out_channels)

        def make(layer: int, in_width: tuple[int, int], width: int) -> GATConv:
            per_head, concat = per_layer[layer]
            return GATConv(
                in_width, per_head, heads, concat=concat, dropout=attention_dropout, add_self_loops=False,
                residual=residual,
            )  # fmt: skip

        super().__init__(_hetero_convs(plan, in_channels, widths, make), plan, widths, norm, dropout)


class TypedRGCN(TypedStack):
    """Schlichtkrull 2018 on typed graphs: what `RGCN(..., metadata=graph)` makes.

    `in_channels` None, for all node types or by type, is for nodes without features, in PyG x=None: the first layer
    has a learnable row per edge type and node, and `x` has int64 node ids (`batch[t].n_id`). `x` None is all nodes of
    a whole graph. `metadata` must then be the graph, which knows how many nodes there are. Rows are by the user's ids,
    of a graph in parts too: a state dict fits the graph in memory and all parts of it.
    """

    def __init__(
        self,
        in_channels: int | Mapping[NodeType, int | None] | None,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        aggr: str = "mean",
        *,
        metadata: Metadata,
        targets: Sequence[NodeType] | None = None,
        num_bases: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        widths, plan = stack_widths(hidden_channels, num_layers, out_channels), LayerPlan(metadata, num_layers, targets)
        check_in_channels(in_channels)
        given = dict.fromkeys(plan.takes, in_channels) if not isinstance(in_channels, Mapping) else in_channels
        num_ids = num_nodes_of(metadata, [t for t in plan.takes if t in given and given[t] is None])
        before: Widths = {t: width for t, width in given.items() if width is not None} | num_ids
        original_ids = original_ids_of(metadata, num_ids)
        convs = [
            TypedRGCNConv(
                rows, width, plan.uses[layer], num_bases, num_blocks, aggr, makes=plan.makes[layer],
                num_ids=num_ids if layer == 0 else None, original_ids=original_ids,
            )
            for layer, (rows, width) in enumerate(_layer_widths(plan, before, widths))
        ]  # fmt: skip
        super().__init__(convs, plan, widths, norm, dropout)
        self.num_ids, self._has_parts_ids = num_ids, bool(original_ids)

    def forward(self, x: TypedRows | None, edges: Any, **options: Any) -> dict[NodeType, Tensor]:
        if x is None:
            bare = [t for t in self.plan.takes if t not in self.num_ids]
            if bare:
                raise ValueError(f"x is None, and the model was made for features of {some(bare)}: give x by node type")
            if self._has_parts_ids:
                raise ValueError(
                    "x is None, which is all nodes of a graph in memory, and the model was made for ids of parts: give "
                    "x by node type, or make it with the graph in memory and load this one's state_dict"
                )
            device = next(self.parameters()).device
            x = {t: torch.arange(num_nodes, device=device) for t, num_nodes in self.num_ids.items()}
        return super().forward(x, edges, **options)


class RGAT(TypedStack):
    """Busbridge 2019: one softmax over the in-edges of all types. All node types have rows of one width.

    Hidden layers concatenate their heads (hidden_channels in all), the last one averages them. Every node adds a linear
    layer of its own row.
    """

    def __init__(
        self,
        in_channels: Widths,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        heads: int = 1,
        attention_dropout: float = 0.0,
        *,
        metadata: Metadata,
        targets: Sequence[NodeType] | None = None,
        num_bases: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        check_heads(heads, hidden_channels)
        widths, plan = stack_widths(hidden_channels, num_layers, out_channels), LayerPlan(metadata, num_layers, targets)
        convs = []
        per_layer = head_widths(widths, heads, out_channels)
        for layer, (before, width) in enumerate(_layer_widths(plan, in_channels, widths)):
            per_head, concat = per_layer[layer]
            conv = RGATConv(
                before, per_head, plan.uses[layer], num_bases, num_blocks, heads=heads, concat=concat,
                dropout=attention_dropout,
            )  # fmt: skip
            convs.append(WithOwn(conv, before, width, plan.makes[layer]))
        super().__init__(convs, plan, widths, norm, dropout)


class HGT(TypedStack):
    """Hu 2020: a transformer over in-edges of all types, hidden_channels wide, and a linear layer per node type."""

    def __init__(
        self,
        in_channels: Widths,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str | None = None,
        heads: int = 1,
        *,
        metadata: Metadata,
        targets: Sequence[NodeType] | None = None,
    ) -> None:
        widths, plan = stack_widths(hidden_channels, num_layers, None), LayerPlan(metadata, num_layers, targets)
        convs: list[nn.Module] = []
        for layer, (before, width) in enumerate(_layer_widths(plan, in_channels, widths)):
            convs.append(HGTConv(before, width, (plan.read(layer), plan.uses[layer]), heads, plan.makes[layer]))
        super().__init__(convs, plan, widths, norm, dropout)
        heads_of = (
            {} if out_channels is None else {module_key(t): linear(widths[-1], out_channels) for t in plan.makes[-1]}
        )
        self.last = nn.ModuleDict(heads_of)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in self.last.values():
            module.reset_parameters()  # type: ignore[operator]

    def forward(self, *args: Any, **kwargs: Any) -> dict[NodeType, Tensor]:
        rows = super().forward(*args, **kwargs)
        return {t: self.last[module_key(t)](r) if len(self.last) else r for t, r in rows.items()}
