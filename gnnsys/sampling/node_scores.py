"""Scores of nodes: how much each remote node counts for a part, one byte each, by version. What guided draws read.

A part (the requester) gives its scores a version; owners of other parts keep the last few of every requester and look
them up by source node. A node that nobody scored has the median. Local and remote are about parts, never machines.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.partition import Parts

MOST_VERSIONS = 8  # of a requester, kept at once
_MOST_TABLES = 128  # scores by local id, kept at once: one per part, requester and version in use
_MEDIAN_OF_NONE = 128


class ScoresNotHere(ValueError):
    """A version that is not here: never sent, sent to a process that has been started again, or long gone."""


@dataclass(frozen=True)
class NodeScores:
    """How much remote nodes count for part `requester`: 1 to 255. `version` is at least 1."""

    requester: int
    version: int
    ids: Tensor  # int64, global ids, ascending
    scores: Tensor  # uint8, as many

    def __post_init__(self) -> None:
        ids, scores = self.ids, self.scores
        if ids.dim() != 1 or ids.dtype != torch.int64 or scores.dtype != torch.uint8 or scores.shape != ids.shape:
            raise ValueError(
                "scores must be int64 ids and as many uint8 scores, got "
                f"{ids.dtype} {list(ids.shape)} and {scores.dtype} {list(scores.shape)}"
            )
        if self.version < 1 or self.requester < 0:
            raise ValueError(f"scores need a version of at least 1 and a part, got {self.version}, {self.requester}")
        if ids.numel() and (int(ids[0]) < 0 or bool((ids.diff() <= 0).any()) or int(scores.min()) == 0):
            raise ValueError("ids of scores must be global ids that ascend, and scores in [1, 255]")

    @property
    def median(self) -> int:
        """The score of nodes that are not among `ids`."""
        return int(self.scores.median()) if self.scores.numel() else _MEDIAN_OF_NONE

    def is_equal(self, other: NodeScores) -> bool:
        return torch.equal(self.ids, other.ids) and torch.equal(self.scores, other.scores)

    def to_arrays(self) -> list[Tensor]:
        """As a GUIDE message has them."""
        head = torch.tensor([self.requester, self.version], dtype=torch.int64, device="cpu")
        return [head, self.ids, self.scores]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Tensor]) -> NodeScores:
        """Reads what `to_arrays` wrote; ValueError for anything else."""
        if len(arrays) != 3 or arrays[0].dtype != torch.int64 or arrays[0].shape != (2,):
            raise ValueError("scores are three arrays: requester and version, ids, scores")
        requester, version = arrays[0].tolist()
        return cls(requester, version, *(rows.clone() for rows in arrays[1:]))


class ScoreBook:
    """The scores that a process knows, and what they say of each part's sources. Safe to use from several threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[int, OrderedDict[int, NodeScores]] = {}
        self._tables: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, scores: NodeScores) -> None:
        """Keeps a version, and drops the oldest of a requester's beyond `MOST_VERSIONS`."""
        book = self._parts.book
        if len(self._parts.schema.node_types) != 1:
            raise ValueError("scores guide draws on graphs with one node type, this one has several")
        if scores.requester >= book.num_parts:
            raise ValueError(f"scores are of part {scores.requester}, there are {book.num_parts}")
        num_nodes = book.num_ids(self._parts.schema.node_types[0])
        if scores.ids.numel() and int(scores.ids[-1]) >= num_nodes:
            raise ValueError(f"ids of scores must be in [0, {num_nodes}), got {int(scores.ids[-1])}")
        with self._lock:
            known = self._known.setdefault(scores.requester, OrderedDict())
            before = known.get(scores.version)
            if before is not None and not before.is_equal(scores):
                raise ValueError(
                    f"version {scores.version} of part {scores.requester} is known with other scores: give new scores "
                    "a new version"
                )
            known[scores.version] = scores
            while len(known) > MOST_VERSIONS:
                known.pop(min(known))

    def get(self, requester: int, version: int) -> NodeScores:
        with self._lock:
            known = self._known.get(requester)
            found = None if known is None else known.get(version)
        if found is None:
            raise ScoresNotHere(f"version {version} of the scores of part {requester} is not here: send it first")
        return found

    def of_sources(self, part: int, requester: int, version: int) -> Tensor:
        """uint8 by local id of a part: 0 for nodes of the requester, else their score."""
        key = (part, requester, version)
        with self._lock:
            table = self._tables.get(key)
            if table is not None:
                self._tables.move_to_end(key)
                return table
        table = self._make_table(part, self.get(requester, version))
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
        return table

    def _make_table(self, part: int, scores: NodeScores) -> Tensor:
        (node_type,) = self._parts.schema.node_types
        book = self._parts.book
        own, asking = (book.part_range(p, node_type) for p in (part, scores.requester))
        halo = self._parts.part(part).halo(node_type).long()
        ids = torch.cat([torch.arange(own.start, own.stop, device="cpu"), halo])
        table = torch.full((ids.numel(),), scores.median, dtype=torch.uint8, device="cpu")
        if scores.ids.numel():
            place = torch.searchsorted(scores.ids, ids).clamp_(max=scores.ids.numel() - 1)
            known = scores.ids[place] == ids
            table[known] = scores.scores[place[known]]
        table[(ids >= asking.start) & (ids < asking.stop)] = 0
        return table
