"""RGCN's first layer for node types without features: a learnable row per edge type and node, looked up by node id.

Schlichtkrull 2018 gives such nodes one-hot rows, and W_r times a one-hot row is a row of W_r. One embedding per node,
which all W_r share, is another model with fewer parameters; docs/typed.md has the accuracy of both. No one-hot row and
no message is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gnnsys.graph import EdgeType, NodeType
from gnnsys.nn.init import glorot_
from gnnsys.nn.typed_inputs import TypedInputs, module_key
from gnnsys.ops import CSC, STRUCTURES, spmm


class RelationRows(nn.Module):
    """y_v = root_t[v] + sum over edge types r of (mean over u -r-> v of W_r[u]), t being v's node type.

    `num_ids` has the number of nodes of each type without features. `edge_types` come from such types. `root_types` are
    those whose nodes add a row of their own. Memory: edge types x nodes x out_channels, or num_bases x nodes x
    out_channels while nothing is computed.

    `original_ids` has, of each type whose ids come from a graph in parts, the user's id of every id: rows are by the
    user's, so that a state dict fits the graph in memory and any other parts of it.
    """

    def __init__(
        self,
        num_ids: Mapping[NodeType, int],
        out_channels: int,
        edge_types: Sequence[EdgeType],
        num_bases: int | None,
        aggr: str,
        root_types: Sequence[NodeType],
        original_ids: Mapping[NodeType, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.num_ids, self.out_channels, self.aggr = dict(num_ids), out_channels, aggr
        self.edge_types = {
            t: [e for e in edge_types if e[0] == t] for t in num_ids if any(e[0] == t for e in edge_types)
        }
        self.weight, self.comp, self.root = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        for node_type, same in self.edge_types.items():
            shape = (num_bases or len(same), num_ids[node_type], out_channels)
            self.weight[module_key(node_type)] = nn.Parameter(torch.empty(shape))
            if num_bases is not None:
                self.comp[module_key(node_type)] = nn.Parameter(torch.empty(len(same), num_bases))
        for node_type in root_types:
            self.root[module_key(node_type)] = nn.Parameter(torch.empty(num_ids[node_type], out_channels))
        for node_type, ids in (original_ids or {}).items():
            self.register_buffer(_original(node_type), ids, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in [*self.weight.values(), *self.comp.values(), *self.root.values()]:
            glorot_(parameter)

    def forward(self, given: TypedInputs) -> Iterator[tuple[NodeType, Tensor]]:
        """Summands of rows by node type; `given.src` has int64 ids of the types without features."""
        ids = {t: self._row_ids(t, given.src[t]) for t in self.num_ids if t in given.src}
        given = TypedInputs(given.block, given.src | ids, given.edge_order)
        for node_type in self.num_ids:
            if module_key(node_type) in self.root and node_type in given.src:
                yield node_type, self.root[module_key(node_type)][given.dst(node_type)]
        for node_type, edge_types in self.edge_types.items():
            there = [t for t in edge_types if t in given.block.csc]
            if not there:
                continue
            table = self.relation_weights(node_type).flatten(0, 1)  # [edge types * nodes, out]
            for dst_type in dict.fromkeys(t[2] for t in there):
                rows = {edge_types.index(t): given.block.csc[t] for t in there if t[2] == dst_type}
                csc, weight = self._looked_up(rows, given.src[node_type], self.num_ids[node_type], table)
                yield dst_type, spmm(csc, table, weight)

    def _row_ids(self, node_type: NodeType, ids: Tensor) -> Tensor:
        original = getattr(self, _original(node_type), None)
        return ids if original is None else STRUCTURES.get(lambda: original[ids], ids, original, key="row ids")

    def relation_weights(self, node_type: NodeType) -> Tensor:
        """[edge types from this node type, nodes, out]."""
        weight = self.weight[module_key(node_type)]
        if not len(self.comp):
            return weight
        return torch.einsum("rb,bno->rno", self.comp[module_key(node_type)], weight)

    def _looked_up(
        self, cscs: Mapping[int, CSC], ids: Tensor, num_ids: int, table: Tensor
    ) -> tuple[CSC, Tensor | None]:
        """All edges as one structure whose sources are rows of the table, and the share of each edge in its mean."""

        def make() -> tuple[CSC, Tensor | None]:
            src = torch.cat([ids[csc.indices.long()] + number * num_ids for number, csc in cscs.items()])
            dst = torch.cat([csc.dst().long() for csc in cscs.values()])
            num_dst = next(iter(cscs.values())).num_dst
            made = CSC.from_edge_index(torch.stack([src, dst]), table.shape[0], num_dst, narrow=True)
            if self.aggr == "sum":
                return made, None
            share = torch.cat(
                [csc.in_degrees().to(table.dtype).reciprocal()[csc.dst().long()] for csc in cscs.values()]
            )
            return made, share if made.edge_ids is None else share[made.edge_ids.long()]

        key = ("rows by id", self.aggr, num_ids, table.shape[0], table.dtype, *cscs)
        return STRUCTURES.get(make, *cscs.values(), ids, key=key)


def _original(node_type: NodeType) -> str:
    return f"original_ids_of_{module_key(node_type)}"


def check_ids(given: TypedInputs, num_ids: Mapping[NodeType, int], layer: str) -> None:
    """That rows of types without features are ids of nodes that are there. On a device one wait per tensor of ids."""
    for node_type, ids in given.src.items():
        if node_type not in num_ids:
            continue
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise ValueError(
                f"{layer} was made for ids of node type {node_type!r}, which has no features: give int64 node ids "
                f"(batch[{node_type!r}].n_id), not {ids.dtype} of shape {list(ids.shape)}"
            )
        low, high = STRUCTURES.get(partial(_ends, ids), ids, key="smallest and largest")
        if low < 0 or high >= num_ids[node_type]:
            raise ValueError(
                f"ids of node type {node_type!r} must be in [0, {num_ids[node_type]}), got {low if low < 0 else high}: "
                f"give batch[{node_type!r}].n_id of the graph that the model was made for"
            )


def _ends(ids: Tensor) -> list[int]:
    return torch.stack(ids.aminmax()).tolist() if ids.numel() else [0, -1]
