"""Typed layers on a bin: rows of all types in one tensor become rows by node type, and results one tensor again.

A bin of a typed graph has rows of its sources, their in-edges with types, and the ids of its nodes, which tell their
types. A node that is a source alone has its type from its edges. So any layer that takes rows by node type and a typed
block can be called, and gives each node what it does on the whole graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import DrawContext, KeyedRows, draw_context, working_on
from gnnsys.fullgraph.modules import ByNodeType, EdgeArguments, Residual
from gnnsys.fullgraph.plan.graph_types import EDGE_TYPE, GraphTypes
from gnnsys.fullgraph.run.pyg_layers import is_pyg
from gnnsys.graph import EdgeType, NodeType, some
from gnnsys.nn import GraphLayer, HeteroConv
from gnnsys.ops import CSC, STRUCTURES, EdgeData, gather_rows, stream_key
from gnnsys.sampling import Block


@dataclass(frozen=True, eq=False)
class TypedOrder:
    """Rows of some nodes, type by type. `order` picks them, `back` picks rows type by type; None: as they are."""

    sizes: list[int]
    order: Tensor | None
    back: Tensor | None

    @classmethod
    def of(cls, by_type: Tensor, num_types: int) -> TypedOrder:
        sizes = torch.bincount(by_type, minlength=num_types).tolist()
        if bool((by_type.diff() >= 0).all()):
            return cls(sizes, None, None)
        order = torch.sort(by_type, stable=True).indices
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return cls(sizes, order, back)

    def sorted(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else gather_rows(rows, self.order)

    def restored(self, rows: Tensor) -> Tensor:
        return rows if self.back is None else gather_rows(rows, self.back)


@dataclass(frozen=True, eq=False)
class TypedPiece:
    """A bin's structure by type: destinations of a type are the first of its sources, as they are in the bin."""

    src: TypedOrder
    dst: TypedOrder
    csc: dict[EdgeType, CSC]

    @classmethod
    def of(cls, types: GraphTypes, csc: CSC, edge_type: Tensor, ids: Tensor) -> TypedPiece:
        num_types, device = len(types.node_types), csc.device
        of_edges, places = edge_type.long(), {t: number for number, t in enumerate(types.node_types)}
        of_dst = types.by_type(ids)
        of_src = torch.zeros(csc.num_src, dtype=torch.int64, device=device)
        of_src[: csc.num_dst] = of_dst
        from_types = torch.tensor([places[t[0]] for t in types.edge_types], device=device)
        of_src[csc.indices.long()] = from_types[of_edges]
        src, dst = TypedOrder.of(of_src, num_types), TypedOrder.of(of_dst, num_types)
        at = torch.arange(csc.num_src, device=device) if src.back is None else src.back
        starts = torch.tensor([0, *accumulate(src.sizes)], device=device)
        local = at - starts[of_src]  # among the rows of its type; of a destination, among those too
        order = torch.sort(of_edges, stable=True).indices
        sizes = torch.bincount(of_edges, minlength=len(types.edge_types)).tolist()
        sources, ends = local[csc.indices.long()[order]].split(sizes), local[csc.dst()[order]].split(sizes)
        cscs = {}
        for number, each in enumerate(types.edge_types):
            degrees = torch.bincount(ends[number], minlength=dst.sizes[places[each[2]]])
            indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
            cscs[each] = CSC(indptr, sources[number].to(csc.indices.dtype), src.sizes[places[each[0]]])
        return cls(src, dst, cscs)


class TypedConv(nn.Module):
    """A typed graph layer as one of a typed graph's homogeneous view. `reads` and `uses` are its types; None: all.

    `input_widths` are those of a first layer's rows, of which narrower ones were given columns of zeros.
    """

    def __init__(
        self,
        conv: nn.Module,
        types: GraphTypes,
        reads: Sequence[NodeType] | None = None,
        uses: Sequence[EdgeType] | None = None,
    ) -> None:
        super().__init__()
        _check_typed(conv, types)
        self.conv, self.types = conv, types
        widths, edge_types = getattr(conv, "widths", None), getattr(conv, "edge_types", None)
        if reads is None:
            reads = _reads(conv, types) if widths is None else list(widths)
        self._may_read = self.reads = [t for t in types.node_types if t in reads]
        self._may_use = self.uses = list[EdgeType]((edge_types or types.edge_types) if uses is None else uses)
        self.widths: Mapping[NodeType, int] | None = _hetero_widths(conv) if widths is None else widths
        self._says_edges = uses is not None or edge_types is not None
        self.input_widths: Mapping[NodeType, int] | None = None
        self.made: list[NodeType] = []  # node types of its results, as of the last call

    @property
    def types_in_use(self) -> tuple[Any, ...]:
        """What depends on the types that x has rows of; a pass over others sets it anew."""
        return self.reads, self.uses, self.made

    @types_in_use.setter
    def types_in_use(self, found: tuple[Any, ...]) -> None:
        self.reads, self.uses, self.made = found

    def take(self, there: Collection[NodeType], maker: str) -> None:
        """Says which types have rows where it stands, after `maker`. Raises ValueError where it needs another."""
        name = type(self.conv).__name__
        for edge_type in self._may_use if self._says_edges else ():
            missing = [t for t in (edge_type[0], edge_type[2]) if t not in there]
            if missing:
                raise ValueError(
                    f"{name} reads rows of {missing[0]!r} for edge type {edge_type!r}, and {maker} before it has rows "
                    f"of {some([t for t in self.types.node_types if t in there])} alone: let that make them too "
                    "(makes=, or a module of ByNodeType), bring them back with Keep and JoinKept, or leave the edge "
                    "type out"
                )
        self.reads = [t for t in self._may_read if t in there]
        self.uses = [t for t in self._may_use if t[0] in there and t[2] in there]

    def forward(self, rows: Tensor, csc: CSC, edge_type: Tensor) -> Tensor:
        piece = STRUCTURES.get(
            lambda: TypedPiece.of(self.types, csc, edge_type, _now().rows.ids), csc, key="by node type and edge type"
        )
        x = self.types.split(piece.src.sorted(rows), piece.src.sizes)
        given = _narrowed({t: x[t] for t in self.reads}, self.input_widths)
        num_dst = dict(zip(self.types.node_types, piece.dst.sizes, strict=True))
        block = Block(
            {t: piece.csc[t] if t in piece.csc else _no_edges(given, t, num_dst) for t in self.uses},
            {t: r.shape[0] for t, r in given.items()},
            {t: num_dst[t] for t in given},
        )
        out = self.conv(given, block)
        joined, self.made = _joined(out, num_dst, type(self.conv).__name__)
        return piece.dst.restored(joined)

    def one_node(self, device: torch.device) -> CSC:
        """A structure of one node without edges."""
        csc = CSC(torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int32, device=device), 1)
        csc.edge_data = EdgeData({EDGE_TYPE: torch.zeros(0, dtype=torch.int16, device=device)})
        return csc


class TypedRowLayer(nn.Module):
    """`ByNodeType` on the rows of a bin. `input_widths` as of `TypedConv`; `widths` has those that its modules say."""

    def __init__(self, module: ByNodeType, types: GraphTypes) -> None:
        super().__init__()
        unknown = [t for t in module.node_types if t not in types.node_types]
        if unknown:
            raise ValueError(f"ByNodeType has a module for {unknown[0]!r}, and the graph has {some(types.node_types)}")
        self.module, self.types = module, types
        self._may_read = self.reads = [t for t in types.node_types if t in module.node_types]
        self.widths: Mapping[NodeType, int] = module.widths()
        self.input_widths: Mapping[NodeType, int] | None = None
        self.made: list[NodeType] = []

    @property
    def types_in_use(self) -> tuple[Any, ...]:
        """As of `TypedConv`."""
        return self.reads, self.made

    @types_in_use.setter
    def types_in_use(self, found: tuple[Any, ...]) -> None:
        self.reads, self.made = found

    def take(self, there: Collection[NodeType], maker: str) -> None:
        """Says which types have rows where it stands; it has results of no others."""
        self.reads = [t for t in self._may_read if t in there]

    def forward(self, rows: Tensor) -> Tensor:
        now = _now()
        ids = now.rows.ids
        order = TypedOrder.of(self.types.by_type(ids), len(self.types.node_types))
        x = self.types.split(order.sorted(rows), order.sizes)
        by_type = self.types.split(ids if order.order is None else ids[order.order], order.sizes)
        now.num_drops += 1  # what is dropped inside depends on the place in the stage too
        with working_on(KeyedRows(ids, stream_key(now.rows.key, now.num_drops)), by_type):
            out = self.module(_narrowed({t: x[t] for t in self.reads}, self.input_widths))
        num_rows = dict(zip(self.types.node_types, order.sizes, strict=True))
        joined, self.made = _joined(out, num_rows, "ByNodeType")
        return order.restored(joined)


def layer_name(module: nn.Module) -> str:
    """What users call a module by, which may be inside one of ours."""
    inner = module.conv if isinstance(module, TypedConv) else module
    return "ByNodeType" if isinstance(module, TypedRowLayer) else type(inner).__name__


def _reads(conv: nn.Module, types: GraphTypes) -> list[NodeType]:
    """The node types of a layer's edge types; of one that does not say those, all."""
    edge_types = getattr(conv, "edge_types", None)
    if edge_types is None:
        return types.node_types
    return [*(t for e in edge_types for t in (e[0], e[2])), *getattr(conv, "alone_types", ())]


def _now() -> DrawContext:
    now = draw_context()
    assert now is not None, "a typed layer is called by a stage, which says what nodes it works on"
    return now


def _narrowed(x: Mapping[NodeType, Tensor], widths: Mapping[NodeType, int] | None) -> dict[NodeType, Tensor]:
    """Rows without the columns that were added to those of narrower types."""
    if widths is None:
        return dict(x)
    return {t: r if r.shape[1] == widths.get(t, r.shape[1]) else r[:, : widths[t]].contiguous() for t, r in x.items()}


def _joined(out: Any, num_rows: Mapping[NodeType, int], name: str) -> tuple[Tensor, list[NodeType]]:
    """Results type by type, zeros for types that have none, and which have some."""
    if not isinstance(out, Mapping) or not out:
        raise ValueError(f"{name} must give rows by node type, as typed layers do, it gave {type(out).__name__}")
    for node_type, rows in out.items():
        if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[0] != num_rows.get(node_type, -1):
            got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"{name} must give one row per node of {node_type!r}, [{num_rows.get(node_type)}, width], it gave {got}"
            )
    one = next(iter(out.values()))
    if len({rows.shape[1] for rows in out.values()}) > 1:
        found = {t: rows.shape[1] for t, rows in out.items()}
        raise ValueError(f"{name} must give rows of one width of all node types, it gave {found}")
    parts = [out[t] if t in out else one.new_zeros(count, one.shape[1]) for t, count in num_rows.items()]
    return torch.cat(parts), [t for t in num_rows if t in out]


def _no_edges(x: Mapping[NodeType, Tensor], edge_type: EdgeType, num_dst: Mapping[NodeType, int]) -> CSC:
    src = x[edge_type[0]]
    indptr = torch.zeros(num_dst[edge_type[2]] + 1, dtype=torch.int64, device=src.device)
    return CSC(indptr, indptr[:0], src.shape[0])


def _check_typed(conv: nn.Module, types: GraphTypes) -> None:
    """That a module is for rows by type, so far as that can be told."""
    name, here = type(conv).__name__, f"this graph has {len(types.edge_types)} edge types"
    if isinstance(conv, (Residual, EdgeArguments)):
        raise ValueError(f"{name} is for graphs of one type, and {here}: use Keep and JoinKept around a typed layer")
    if is_pyg(conv):
        raise ValueError(f"{name} of PyG is for graphs of one type here, and {here}: use a typed layer of gnnsys.nn")
    if isinstance(conv, GraphLayer) and getattr(conv, "edge_types", None) is None:
        raise ValueError(
            f"{name} takes rows of one type, and {here}: use RGCN, HeteroSAGE, RGAT or HGT with metadata=graph, or "
            f"HeteroConv({{edge type: {name}(...)}})"
        )
    by_id = list(getattr(conv, "num_ids", None) or ())
    if by_id:
        raise ValueError(
            f"{name} looks nodes of {by_id[0]!r} up by id, and bins have rows of their sources, not ids: give it a "
            f"width for that type, and x rows of an embedding of this rank's nodes, model.nodes[{by_id[0]!r}]"
        )
    unknown = [t for e in getattr(conv, "edge_types", None) or () for t in (e[0], e[2]) if t not in types.node_types]
    if unknown:
        raise ValueError(f"{name} has edge types of {unknown[0]!r}, and the graph has {some(types.node_types)}")


def _hetero_widths(conv: nn.Module) -> dict[NodeType, int] | None:
    """The widths that a layer per edge type was made for; None where some are lazy or not known."""
    if not isinstance(conv, HeteroConv):
        return None
    found: dict[NodeType, int] = {}
    pairs = [
        (t[0], t[2], getattr(c, "in_channels", None)) for t, c in zip(conv.edge_types, conv.convs.values(), strict=True)
    ]
    pairs += [
        (t, t, getattr(m, "in_features", None)) for t, m in zip(conv.alone_types, conv.alone.values(), strict=True)
    ]
    for src, dst, width in pairs:
        widths = (width, width) if isinstance(width, int) else width
        if not isinstance(widths, tuple) or min(widths) < 1:
            return None
        for node_type, each in zip((src, dst), widths, strict=True):
            if found.setdefault(node_type, each) != each:
                return None
    return found
