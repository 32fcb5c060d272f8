"""What a typed layer is given, made plain: a block of all edge types, rows of every node type, trimmed for each layer.

Typed layers take `x` as rows by node type (`batch.x_dict`) and `edges` as a `Block` or as a mapping from edge type to a
CSC or an edge_index (`batch.edge_index_dict`). Destinations of a type are always the first of its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from gnnsys.graph import EdgeType, NodeType, did_you_mean, some
from gnnsys.nn.layer_inputs import from_edge_index, make_structures
from gnnsys.ops import CSC
from gnnsys.sampling import Block

TypedRows: TypeAlias = Mapping[NodeType, Tensor]
TypedEdges: TypeAlias = Block | Mapping[EdgeType, CSC | Tensor]
NumSampled: TypeAlias = Mapping[NodeType, Sequence[int]]


class HasTypes(Protocol):
    """A graph, a graph of parts, a batch."""

    @property
    def node_types(self) -> list[NodeType]: ...

    @property
    def edge_types(self) -> list[EdgeType]: ...


Metadata: TypeAlias = HasTypes | tuple[Sequence[NodeType], Sequence[EdgeType]]


def types_of(metadata: Metadata) -> tuple[list[NodeType], list[EdgeType]]:
    """Node types and edge types of a graph, of a batch, or of PyG's `data.metadata()`."""
    if isinstance(metadata, (tuple, list)):
        if len(metadata) != 2 or not _are(str, metadata[0]) or not _are((tuple, list), metadata[1]):
            raise ValueError(f"{_METADATA}, got a {type(metadata).__name__}: {some(metadata)}")
        node_types, edge_types = list(metadata[0]), [tuple(t) for t in metadata[1]]
    elif hasattr(metadata, "node_types") and hasattr(metadata, "edge_types"):
        node_types, edge_types = list(metadata.node_types), list(metadata.edge_types)
    else:
        raise ValueError(f"{_METADATA}, got a {type(metadata).__name__}")
    for edge_type in edge_types:
        if len(edge_type) != 3 or edge_type[0] not in node_types or edge_type[2] not in node_types:
            raise ValueError(
                f"metadata: edge type {edge_type!r} must be (source type, name, destination type) with types among "
                f"{some(node_types)}"
            )
    return node_types, edge_types  # type: ignore[return-value]


_METADATA = "metadata must be a graph, parts of one, a batch, or PyG's pair (node types, edge types) of data.metadata()"


def _are(kind: type | tuple[type, ...], given: Any) -> bool:
    return isinstance(given, Collection) and not isinstance(given, str) and all(isinstance(one, kind) for one in given)


def module_key(key: NodeType | EdgeType) -> str:
    """A type as a name in an nn.ModuleDict, as PyG has it: state dicts of its `HeteroConv` fit."""
    name = f"<{'___'.join(key)}>" if isinstance(key, tuple) else key
    return (f"<{name}>" if name in _TAKEN else name).replace(".", "#")


_TAKEN = frozenset(dir(nn.ModuleDict))


@dataclass(frozen=True)
class TypedInputs:
    """`block` has the edge types that were given; `edge_order` maps a position of one to the row of an edge tensor."""

    block: Block
    src: dict[NodeType, Tensor]  # [num_src, ...]
    edge_order: dict[EdgeType, Tensor | None]

    def dst(self, node_type: NodeType) -> Tensor:
        """The rows of destinations, the first ones of their type."""
        rows, num_dst = self.src[node_type], self.block.num_dst[node_type]
        return rows if rows.shape[0] == num_dst else rows[:num_dst]


def resolve_typed(x: TypedRows, edges: TypedEdges, known: Sequence[EdgeType], layer: str = "the layer") -> TypedInputs:
    """Checks what a typed layer was given. `known` are the edge types that it has weights for.

    An edge type that is not given is one without edges, to all layers but `HeteroConv`, which leaves its layer out.
    """
    given = edges.csc if isinstance(edges, Block) else edges
    check_rows(x)
    _check_edges(given)
    for edge_type in given:
        if edge_type not in known:
            raise ValueError(
                f"{layer} does not know edge type {edge_type!r}, only {some(list(known), near=edge_type)}"
                f"{did_you_mean(edge_type, list(known))}: make it with all edge types of the graph, or leave this one "
                "out of edges"
            )
        for node_type in (edge_type[0], edge_type[2]):
            if node_type not in x:
                raise ValueError(
                    f"node type {node_type!r} has no rows, and edge type {edge_type!r} needs them: x has rows of "
                    f"{some(list(x))}. Give the type features or an embedding, or leave its edge types out"
                )
    if isinstance(edges, Block):
        return _of_block(x, edges)
    cscs: dict[EdgeType, CSC] = {}
    order: dict[EdgeType, Tensor | None] = {}
    make_structures(
        [(e, x[t[0]].shape[0], x[t[2]].shape[0]) for t, e in edges.items() if isinstance(e, Tensor) and e.dim() == 2]
    )
    for edge_type, structure in edges.items():
        if isinstance(structure, CSC):
            cscs[edge_type], order[edge_type] = structure, None
        else:
            num_src, num_dst = x[edge_type[0]].shape[0], x[edge_type[2]].shape[0]
            cscs[edge_type], order[edge_type] = from_edge_index(structure, num_src, num_dst)
    num_dst_by_type: dict[NodeType, int] = {}
    for edge_type, csc in cscs.items():
        if num_dst_by_type.setdefault(edge_type[2], csc.num_dst) != csc.num_dst:
            raise ValueError(
                f"edge types disagree on how many destinations of type {edge_type[2]!r} there are: "
                f"{num_dst_by_type[edge_type[2]]} and, in {edge_type!r}, {csc.num_dst}"
            )
    num_dst_by_type = {t: num_dst_by_type.get(t, rows.shape[0]) for t, rows in x.items()}
    block = Block(cscs, {t: rows.shape[0] for t, rows in x.items()}, num_dst_by_type)
    return TypedInputs(_checked(block), dict(x), order)


def check_rows(x: TypedRows) -> None:
    """ValueError for rows that are not by node type."""
    if not isinstance(x, Mapping):
        raise ValueError(f"x must be rows by node type, as batch.x_dict, got {type(x).__name__}")


def _check_edges(edges: Mapping[EdgeType, CSC | Tensor]) -> None:
    if not isinstance(edges, Mapping):
        raise ValueError(
            f"edges must be a Block or structures by edge type, as batch.edge_index_dict, got {type(edges).__name__}"
        )


def _of_block(x: TypedRows, block: Block) -> TypedInputs:
    num_src = {t: rows.shape[0] for t, rows in x.items()}
    for node_type, num_rows in num_src.items():
        if block.num_src.get(node_type, num_rows) != num_rows:
            raise ValueError(
                f"x has {num_rows} rows of type {node_type!r}, but the block has {block.num_src[node_type]} sources"
            )
    num_dst = {t: block.num_dst.get(t, 0) for t in num_src}
    checked = _checked(Block(block.csc, num_src, num_dst, block.edge_weight))
    return TypedInputs(checked, dict(x), dict.fromkeys(block.csc))


def _checked(block: Block) -> Block:
    for edge_type, csc in block.csc.items():
        src, _, dst = edge_type
        if csc.num_src != block.num_src[src]:
            raise ValueError(
                f"x has {block.num_src[src]} rows of type {src!r}, but {edge_type!r} has {csc.num_src} sources"
            )
        if csc.num_dst > block.num_src[dst]:
            raise ValueError(
                f"x has {block.num_src[dst]} rows of type {dst!r}, but {edge_type!r} has {csc.num_dst} destinations"
            )
    return block


def typed_prefixes(given: TypedInputs, num_sampled_nodes: NumSampled, num_layers: int) -> list[Block]:
    """What each layer of a sampled typed batch needs, as `hop_prefixes` has it for one type: blocks of views.

    Layer l computes the nodes of every type within num_layers - 1 - l hops of the seeds.
    """
    sizes: dict[NodeType, list[int]] = {}  # of each type: sources of the first layer, then destinations of each layer
    for node_type, rows in given.src.items():
        by_hop = num_sampled_nodes.get(node_type)
        if by_hop is None:
            raise ValueError(
                f"num_sampled_nodes has no entry for type {node_type!r}: pass the batch's own num_sampled_nodes_dict"
            )
        if not len(by_hop) or min(by_hop) < 0:
            raise ValueError(f"num_sampled_nodes[{node_type!r}] must be a number >= 0 per hop, got {list(by_hop)}")
        within = list(accumulate(by_hop))
        if within[-1] != rows.shape[0]:
            raise ValueError(
                f"num_sampled_nodes[{node_type!r}] adds up to {within[-1]}, but x has {rows.shape[0]} rows of the type"
            )
        sizes[node_type] = [within[min(hops, len(within) - 1)] for hops in range(num_layers, -1, -1)]
    cscs: list[dict[EdgeType, CSC]] = [{} for _ in range(num_layers)]
    to_check: list[tuple[EdgeType, int, Tensor]] = []
    for edge_type, csc in given.block.csc.items():
        num_src, num_dst = sizes[edge_type[0]], sizes[edge_type[2]][1:]
        if num_dst[0] > csc.num_dst:
            raise ValueError(
                f"num_sampled_nodes asks for {num_dst[0]} destinations of {edge_type!r}, not {csc.num_dst}"
            )
        is_known = csc._ends is not None and set(csc._ends) == set(accumulate(num_sampled_nodes[edge_type[2]]))
        for layer, end in enumerate(csc.ends(num_dst)):
            indptr, indices = csc.indptr[: num_dst[layer] + 1], csc.indices[:end]
            cscs[layer][edge_type] = CSC(indptr, indices, num_src[layer], is_replayed=csc.is_replayed)
            if end and num_src[layer] < csc.num_src and not is_known:
                to_check.append((edge_type, num_src[layer], indices))
    _check_sources(to_check, num_sampled_nodes)
    return [
        Block(cscs[layer], {t: s[layer] for t, s in sizes.items()}, {t: s[layer + 1] for t, s in sizes.items()})
        for layer in range(num_layers)
    ]


def _check_sources(asked: Sequence[tuple[EdgeType, int, Tensor]], num_sampled_nodes: NumSampled) -> None:
    """That the sources of prefixes are among their nodes; on a device kernels would read beyond them. One wait."""
    if not asked:
        return
    largest = torch.stack([indices.max() for _, _, indices in asked]).tolist()
    for (edge_type, num_src, _), found in zip(asked, largest, strict=True):
        if found >= num_src:
            raise ValueError(
                f"num_sampled_nodes[{edge_type[0]!r}]={list(num_sampled_nodes[edge_type[0]])} does not belong to these "
                f"edges: a layer would have the first {num_src} nodes as sources of {edge_type!r}, and an edge comes "
                f"from node {found}. Pass the batch's own num_sampled_nodes_dict, with edges as they came"
            )
