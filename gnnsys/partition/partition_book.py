"""PartitionBook: who owns which id, as one tiny array of offsets per type.

Global ids are contiguous per part and inside it per subpart, so an id's owner is a binary search over the offsets and
its local id a subtraction. Every rank holds the whole book: 8 bytes per subpart and type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType


@dataclass(frozen=True, eq=False)
class PartitionBook:
    """`node_offsets[t]` and `edge_offsets[t]` int64 [num_subparts + 1]: subpart s has ids [offsets[s], offsets[s+1]).

    Inside a subpart, or a cluster of it (`ClusterBook`), nodes ascend by original id. An edge belongs where its
    destination does; its global id is its part's first one plus its position in the part's CSC. Methods take a node
    type or an edge type; it may be left away where there is a single node type.

    >>> book = PartitionBook(2, 2, {"node": torch.tensor([0, 3, 3, 5, 9])}, {})
    >>> book.part_of(torch.tensor([2, 3, 8])), book.subpart_of(torch.tensor([2, 3, 8]))
    (tensor([0, 1, 1]), tensor([0, 2, 3]))
    >>> book.to_local(torch.tensor([3, 8]), 1)
    tensor([0, 5])
    """

    num_parts: int
    trainers_per_part: int
    node_offsets: Mapping[NodeType, Tensor]
    edge_offsets: Mapping[EdgeType, Tensor]

    def __post_init__(self) -> None:
        if self.num_parts < 1 or self.trainers_per_part < 1:
            raise ValueError(f"parts and trainers must be >= 1, got {self.num_parts} and {self.trainers_per_part}")
        for where, offsets in [*self.node_offsets.items(), *self.edge_offsets.items()]:
            if offsets.dtype != torch.int64 or offsets.shape != (self.num_subparts + 1,):
                raise ValueError(
                    f"offsets of {where!r} must be int64 [{self.num_subparts + 1}], one more than there are subparts, "
                    f"got {offsets.dtype} {list(offsets.shape)}"
                )
            if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
                raise ValueError(f"offsets of {where!r} must start at 0 and never decrease, got {offsets.tolist()}")

    @property
    def num_subparts(self) -> int:
        return self.num_parts * self.trainers_per_part

    def num_ids(self, type: NodeType | EdgeType | None = None) -> int:
        """How many nodes or edges of a type there are in all parts."""
        return int(self._offsets(type)[-1])

    def part_of(self, ids: Tensor, type: NodeType | EdgeType | None = None) -> Tensor:
        """The part of each global id, int64."""
        return self.subpart_of(ids, type).div_(self.trainers_per_part, rounding_mode="floor")

    def subpart_of(self, ids: Tensor, type: NodeType | EdgeType | None = None) -> Tensor:
        """The subpart of each global id, int64."""
        offsets = self._offsets(type).to(ids.device)
        _check_ids(ids, 0, int(offsets[-1]), "ids")
        return torch.searchsorted(offsets, ids.long(), right=True).sub_(1)

    def to_local(self, ids: Tensor, part: int, type: NodeType | EdgeType | None = None) -> Tensor:
        """Local ids of ids that `part` owns, int64; ValueError for an id of another part."""
        own = self.part_range(part, type)
        _check_ids(ids, own.start, own.stop, f"ids of part {part}")
        return ids.long() - own.start

    def to_global(self, local: Tensor, part: int, type: NodeType | EdgeType | None = None) -> Tensor:
        """Global ids of local ids that are core in `part`, int64."""
        own = self.part_range(part, type)
        _check_ids(local, 0, len(own), f"local ids of part {part}")
        return local.long() + own.start

    def part_range(self, part: int, type: NodeType | EdgeType | None = None) -> range:
        """The global ids of a part."""
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part must be in [0, {self.num_parts}), got {part}")
        offsets = self._offsets(type)
        first = part * self.trainers_per_part
        return range(int(offsets[first]), int(offsets[first + self.trainers_per_part]))

    def subpart_range(self, subpart: int, type: NodeType | EdgeType | None = None) -> range:
        """The global ids of a subpart."""
        if not 0 <= subpart < self.num_subparts:
            raise ValueError(f"subpart must be in [0, {self.num_subparts}), got {subpart}")
        offsets = self._offsets(type)
        return range(int(offsets[subpart]), int(offsets[subpart + 1]))

    def ranges(self, type: NodeType | EdgeType | None = None) -> Tensor:
        """First and end of every part's global ids, int64 [num_parts, 2]."""
        bounds = self._offsets(type)[:: self.trainers_per_part]
        return torch.stack([bounds[:-1], bounds[1:]], dim=1)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes."""
        return {
            "num_parts": self.num_parts,
            "trainers_per_part": self.trainers_per_part,
            "nodes": [[node_type, offsets.tolist()] for node_type, offsets in self.node_offsets.items()],
            "edges": [[list(edge_type), offsets.tolist()] for edge_type, offsets in self.edge_offsets.items()],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PartitionBook:
        """The book that `to_json` described; ValueError where it did not describe one."""
        try:
            nodes = {str(node_type): _offsets_of(offsets) for node_type, offsets in values["nodes"]}
            edges = {
                (str(src), str(relation), str(dst)): _offsets_of(offsets)
                for (src, relation, dst), offsets in values["edges"]
            }
            num_parts, trainers = int(values["num_parts"]), int(values["trainers_per_part"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"not a partition book: {error!r}") from error
        return cls(num_parts, trainers, nodes, edges)

    def _offsets(self, type: NodeType | EdgeType | None) -> Tensor:
        if type is None:
            if len(self.node_offsets) != 1:
                raise ValueError(f"the type must be named, one of {[*self.node_offsets, *self.edge_offsets]}")
            return next(iter(self.node_offsets.values()))
        offsets = self.node_offsets.get(type) if isinstance(type, str) else self.edge_offsets.get(type)
        if offsets is None:
            raise ValueError(f"type {type!r} does not exist, the book has {[*self.node_offsets, *self.edge_offsets]}")
        return offsets


def _offsets_of(values: Any) -> Tensor:
    if not all(isinstance(value, int) for value in values):
        raise TypeError("offsets must be integers")
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _check_ids(ids: Tensor, first: int, end: int, name: str) -> None:
    if ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < first or high >= end:
            raise ValueError(f"{name} must be in [{first}, {end}), got {low} to {high}")
