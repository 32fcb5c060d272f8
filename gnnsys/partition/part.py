"""One part, memory-mapped: structure in local ids, halo, rows. Checked when it is made, so that nothing later has to.

Local ids of a node type: core nodes first, in the order of their global ids, then the halo, hop by hop, each hop
ascending by global id and so grouped by owner. Columns of a CSC are the core nodes, then the halo nodes whose in-edges
the part also has (all but the last hop; none with `halo_hops=1`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnsys.graph import MANIFEST, ArrayReader, EdgeType, NodeType, some
from gnnsys.ops import CSC, gather_rows
from gnnsys.partition.array_pieces import ramps
from gnnsys.partition.layout import ArraySpec, Malformed, original_bounds, part_folder

if TYPE_CHECKING:
    from gnnsys.partition.parts_directory import Parts


class Part:
    """`node_data[type][name]` has a row per core node, `edge_data[type][name]` a row per position of the CSC.

    Methods take a type, which may be left away where the graph has one.
    """

    def __init__(self, parts: Parts, index: int, entry: Mapping[str, Any], reader: ArrayReader) -> None:
        self.index, self.book = index, parts.book
        self._reader, self._manifest, self._prefix = reader, parts.path / MANIFEST, f"{part_folder(index)}/"
        self._hops: dict[NodeType, list[int]] = {}
        self._halo: dict[NodeType, Tensor] = {}
        self._original: dict[NodeType, Tensor] = {}
        self._global_of_original: dict[NodeType, Tensor | None] = {}
        self._csc: dict[EdgeType, CSC] = {}
        self._edge_ids: dict[EdgeType, Tensor | None] = {}
        self._edge_starts: dict[EdgeType, Tensor | None] = {}
        self._global_starts: dict[EdgeType, Tensor | None] = {}
        self.node_data: dict[NodeType, dict[str, Tensor]] = {}
        self.edge_data: dict[EdgeType, dict[str, Tensor]] = {}
        schema = parts.schema
        if len(entry["nodes"]) != len(schema.node_types) or len(entry["edges"]) != len(schema.edge_types):
            raise Malformed("it must describe every type of the schema")
        for node_type, nodes in zip(schema.node_types, entry["nodes"], strict=True):
            self._open_nodes(node_type, nodes, parts.halo_hops, schema.node_data[node_type])
        for edge_type, edges in zip(schema.edge_types, entry["edges"], strict=True):
            self._open_edges(edge_type, edges, parts.has_edge_ids, schema.edge_data[edge_type])

    # -- what it holds -----------------------------------------------------------------------------------------------

    def num_core(self, node_type: NodeType | None = None) -> int:
        return len(self.book.part_range(self.index, node_type))

    def num_halo(self, node_type: NodeType | None = None) -> int:
        return self.halo(node_type).numel()

    def num_columns(self, node_type: NodeType | None = None) -> int:
        """How many nodes have their in-edges here: the core, and all hops of the halo but the last."""
        return self.original_ids(node_type).numel()

    def hops(self, node_type: NodeType | None = None) -> list[int]:
        """Bounds of the local ids: core in [0, hops[0]), hop h of the halo in [hops[h-1], hops[h])."""
        return self._hops[self._node_type(node_type)]

    def halo(self, node_type: NodeType | None = None) -> Tensor:
        """Global ids of the halo, as stored: int32 where all nodes of the type fit."""
        return self._halo[self._node_type(node_type)]

    def original_ids(self, node_type: NodeType | None = None) -> Tensor:
        """Original ids of the columns, as stored: what a sampler takes as `rng_ids`."""
        return self._original[self._node_type(node_type)]

    def global_of_original(self, node_type: NodeType | None = None) -> Tensor:
        """Global ids of this part's share of all original ids (`original_bounds`), as stored."""
        ids = self._global_of_original[self._node_type(node_type)]
        if ids is None:
            raise ValueError(
                f"{self._manifest}: these parts were written without the global ids of original ids, which negative "
                "sampling and look-ups by original id need: partition the graph again"
            )
        return ids

    def csc(self, edge_type: EdgeType | None = None) -> CSC:
        """In-edges in local ids; positions are rows of `edge_data`."""
        return self._csc[self._edge_type(edge_type)]

    def edge_ids(self, positions: Tensor, edge_type: EdgeType | None = None) -> Tensor | None:
        """The user's ids of edges at positions of the CSC, None where they were not stored."""
        edge_type = self._edge_type(edge_type)
        starts, ids = self._edge_starts[edge_type], self._edge_ids[edge_type]
        if starts is not None:
            column, rank = self._column_and_rank(positions, edge_type)
            return starts[column] + rank
        return None if ids is None else gather_rows(ids, positions)

    def column_edge_ids(self, first: int, end: int, edge_type: EdgeType | None = None) -> Tensor | None:
        """The user's ids of all edges of the columns first to end, None where they were not stored."""
        edge_type = self._edge_type(edge_type)
        indptr, starts, ids = self._csc[edge_type].indptr, self._edge_starts[edge_type], self._edge_ids[edge_type]
        if starts is not None:
            return ramps(indptr[first : end + 1], starts[first:end])
        return None if ids is None else ids[int(indptr[first]) : int(indptr[end])]

    def global_ids(self, local: Tensor, node_type: NodeType | None = None) -> Tensor:
        """Global ids of local ids, core or halo, int64."""
        node_type = self._node_type(node_type)
        own, local = self.book.part_range(self.index, node_type), local.long()
        _check_range(local, self._hops[node_type][-1], "local ids")
        if not self.num_halo(node_type):
            return local + own.start
        place = (local - len(own)).clamp_(min=0)
        return torch.where(local < len(own), local + own.start, self._halo[node_type][place].long())

    def global_edge_ids(self, positions: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """Global ids of edges at positions of the CSC, int64."""
        edge_type = self._edge_type(edge_type)
        starts, own = self._global_starts[edge_type], self.book.part_range(self.index, edge_type)
        if starts is None or not starts.numel():
            return self.book.to_global(positions, self.index, edge_type)
        column, rank = self._column_and_rank(positions, edge_type)
        num_core = self.num_core(edge_type[2])
        copied = starts[(column - num_core).clamp_(min=0)] + rank
        return torch.where(column < num_core, positions.long() + own.start, copied)

    def _column_and_rank(self, positions: Tensor, edge_type: EdgeType) -> tuple[Tensor, Tensor]:
        indptr, positions = self._csc[edge_type].indptr, positions.long()
        _check_range(positions, int(indptr[-1]), "positions")
        column = torch.searchsorted(indptr, positions, right=True) - 1
        return column, positions - indptr[column]

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open_nodes(
        self, node_type: NodeType, entry: Mapping[str, Any], halo_hops: int, arrays: Mapping[str, ArraySpec]
    ) -> None:
        own, num_nodes = self.book.part_range(self.index, node_type), self.book.num_ids(node_type)
        counts = list(entry["num_halo"])
        if entry["num_core"] != len(own) or len(counts) != halo_hops:
            raise Malformed(f"{node_type!r} has {entry['num_core']} core nodes and {len(counts)} hops")
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise Malformed(f"{node_type!r} has a halo of {counts} nodes")
        hops = self._hops[node_type] = list(accumulate([len(own), *counts]))
        halo = self._halo[node_type] = self._array(entry["halo"], [hops[-1] - len(own)])
        bounds = [bound - len(own) for bound in hops]
        with _Naming(self._reader, entry["halo"]):
            _check_range(halo, num_nodes, "global ids")
            for first, end in pairwise(bounds):
                if bool((halo[first:end].diff() <= 0).any()):
                    raise ValueError("global ids of a hop must ascend")
            if bool(((halo >= own.start) & (halo < own.stop)).any()):
                raise ValueError(f"holds ids of part {self.index} itself, which are not halo")
        original = self._original[node_type] = self._array(entry["original_ids"], [hops[-2]])
        with _Naming(self._reader, entry["original_ids"]):
            _check_range(original, num_nodes, "original ids")
        self._global_of_original[node_type] = self._open_global_ids(entry.get("global_ids"), num_nodes)
        self.node_data[node_type] = self._rows(entry["data"], arrays, len(own))

    def _open_global_ids(self, name: str | None, num_nodes: int) -> Tensor | None:
        """Parts that were written before these were stored have none."""
        if name is None:
            return None
        bounds = original_bounds(num_nodes, self.book.num_parts)
        ids = self._array(name, [bounds[self.index + 1] - bounds[self.index]])
        with _Naming(self._reader, name):
            _check_range(ids, num_nodes, "global ids")
        return ids

    def _open_edges(
        self, edge_type: EdgeType, entry: Mapping[str, Any], has_edge_ids: bool, arrays: Mapping[str, ArraySpec]
    ) -> None:
        src, _, dst = edge_type
        num_columns, num_all = self._original[dst].numel(), self.book.num_ids(edge_type)
        num_core = self.num_core(dst)
        indptr = self._array(entry["indptr"], [num_columns + 1], torch.int64)
        indices = self._array(entry["indices"], None, torch.int32)
        csc = self._csc[edge_type] = CSC(indptr, indices, self._hops[src][-1])
        with _Naming(self._reader, entry["indptr"], entry["indices"]):
            csc.validate()
            if int(indptr[num_core]) != len(self.book.part_range(self.index, edge_type)):
                raise ValueError("has another number of edges than the book says")
        self._edge_ids[edge_type] = self._ids(entry["edge_ids"], csc.num_edges, num_all)
        self._edge_starts[edge_type] = self._ids(entry["edge_starts"], num_columns, num_all + 1)
        self._global_starts[edge_type] = self._ids(entry["global_starts"], num_columns - num_core, num_all + 1)
        if has_edge_ids != ((entry["edge_ids"] or entry["edge_starts"]) is not None):
            raise Malformed(f"{edge_type} must have edge ids exactly where all have them")
        self.edge_data[edge_type] = self._rows(entry["data"], arrays, csc.num_edges)

    def _ids(self, name: str | None, size: int, limit: int) -> Tensor | None:
        if name is None:
            return None
        ids = self._array(name, [size])
        with _Naming(self._reader, name):
            _check_range(ids, limit, "edge ids")
        return ids

    def _rows(self, names: Mapping[str, str], arrays: Mapping[str, ArraySpec], num_rows: int) -> dict[str, Tensor]:
        if list(names) != list(arrays):
            raise Malformed(f"it has arrays {some(names)}, the schema {some(arrays)}")
        return {
            name: self._array(names[name], [num_rows, *spec.row_shape], spec.dtype) for name, spec in arrays.items()
        }

    def _array(self, name: str, shape: list[int] | None, dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(name, str) or not name.startswith(self._prefix):
            raise ValueError(f"{self._manifest} names {name!r}, which is not a file of {self._prefix}")
        rows = self._reader.array(name, dtype, shape)
        if dtype is None and rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self._reader.path(name)} holds {rows.dtype}, expected int32 or int64 ids")
        return rows

    def _node_type(self, node_type: NodeType | None) -> NodeType:
        return _named(node_type, list(self._hops), "node type")

    def _edge_type(self, edge_type: EdgeType | None) -> EdgeType:
        return _named(edge_type, list(self._csc), "edge type")


class _Naming:
    """Puts the file's name before whatever ValueError leaves the block."""

    def __init__(self, reader: ArrayReader, *names: str) -> None:
        self._reader, self._names = reader, names

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, ValueError):
            files = " and ".join(str(self._reader.path(name)) for name in self._names)
            raise ValueError(f"{files}: {error}") from error


def _check_range(ids: Tensor, limit: int, what: str) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(f"{what} must be in [0, {limit}), got {int(ids.min())} to {int(ids.max())}")


def _named(given: Any, known: list[Any], what: str) -> Any:
    if given is None and len(known) == 1:
        return known[0]
    if given not in known:
        raise ValueError(f"{what} must be one of {known}, got {given!r}")
    return given
