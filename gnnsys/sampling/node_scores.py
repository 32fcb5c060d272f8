"""Scores of nodes: how much each remote node counts for a part, one byte each, by version. What guided draws read.

Scores belong to a part (the requester). Their version is made of what they say, so that the same number means the same
scores on every machine and after any restart. Owners of other parts keep the last few of every requester and look them
up by source node. A node that nobody scored has the median. Local and remote are about parts, never machines.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gnnsys.ops import as_bytes
from gnnsys.partition import Parts

MOST_VERSIONS = 8  # of a requester, kept at once
_MOST_TABLES = 128  # scores by local id, kept at once: one per part, requester and version in use
_MEDIAN_OF_NONE = 128
_MOST_ID = 1 << 62
_INT_BYTES = 4


class ScoresNotHere(ValueError):
    """A version that is not here: never sent, sent to a process that has been started again, or long gone."""


@dataclass(frozen=True)
class NodeScores:
    """How much remote nodes count for part `requester`: 1 to 255."""

    requester: int
    ids: Tensor  # int64, global ids, ascending
    scores: Tensor  # uint8, as many

    def __post_init__(self) -> None:
        ids, scores = self.ids, self.scores
        if ids.dim() != 1 or ids.dtype != torch.int64 or scores.dtype != torch.uint8 or scores.shape != ids.shape:
            raise ValueError(
                "scores must be int64 ids and as many uint8 scores, got "
                f"{ids.dtype} {list(ids.shape)} and {scores.dtype} {list(scores.shape)}"
            )
        if self.requester < 0:
            raise ValueError(f"scores need the number of a part, got {self.requester}")
        if ids.numel() and (int(ids[0]) < 0 or bool((ids[1:] <= ids[:-1]).any()) or int(scores.min()) == 0):
            raise ValueError("ids of scores must be global ids that ascend, and scores in [1, 255]")

    @property
    def median(self) -> int:
        """The score of nodes that are not among `ids`."""
        return int(self.scores.median()) if self.scores.numel() else _MEDIAN_OF_NONE

    @cached_property
    def version(self) -> int:
        """Made of what they say: SHA-256 of requester, ids and scores, 62 bits, never 0."""
        told = hashlib.sha256(self.requester.to_bytes(8, "little"))
        for rows in (self.ids, self.scores):
            told.update(as_bytes(rows.contiguous()).numpy().data)
        return int.from_bytes(told.digest()[:8], "little") >> 2 or 1

    def to_arrays(self) -> list[Tensor]:
        """As a GUIDE message has them: requester and first id, which ids, and a byte for each.

        Ids are a bit for each number from the first to the last (uint8), or numbers above the first (int32, int64),
        whichever is smallest: between 1.1 bytes per node, where most nodes have scores, and 5 where few have.
        """
        first = int(self.ids[0]) if self.ids.numel() else 0
        head = torch.tensor([self.requester, first], dtype=torch.int64, device="cpu")
        return [head, _packed(self.ids - first), self.scores]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Tensor]) -> NodeScores:
        """Reads what `to_arrays` wrote; ValueError for anything else."""
        if len(arrays) != 3 or arrays[0].dtype != torch.int64 or arrays[0].shape != (2,):
            raise ValueError("scores are three arrays: requester and first id, ids, scores")
        requester, first = arrays[0].tolist()
        if not 0 <= first <= _MOST_ID:
            raise ValueError(f"the first id of scores must be in [0, 2**62], got {first}")
        ids = _unpacked(arrays[1], arrays[2].numel())
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) > _MOST_ID):
            raise ValueError("ids of scores must be numbers above the first")
        return cls(requester, ids + first, arrays[2].clone())


def _packed(ids: Tensor) -> Tensor:
    """Ascending numbers from 0 on as bits, or in the smallest dtype that has them."""
    bound = int(ids[-1]) + 1 if ids.numel() else 0
    if bound <= 8 * _INT_BYTES * ids.numel():
        bits = np.zeros(bound, dtype=np.uint8)
        bits[ids.numpy()] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little"))
    return ids.int() if bound <= 1 << 31 else ids


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """What `_packed` was given, int64; ValueError where that were more than `count` numbers, or less."""
    if packed.dim() != 1 or packed.dtype not in (torch.uint8, torch.int32, torch.int64):
        raise ValueError(f"ids of scores are bits (uint8) or numbers, got {packed.dtype} {list(packed.shape)}")
    if packed.dtype != torch.uint8:
        return packed.long().clone()
    if packed.numel() > _INT_BYTES * count:
        raise ValueError(f"{packed.numel()} bytes of bits for {count} scores: numbers would be shorter")
    return torch.from_numpy(np.flatnonzero(np.unpackbits(packed.numpy(), bitorder="little")).astype(np.int64))


class ScoreBook:
    """The scores that a process knows, and what they say of each part's sources. Safe to use from several threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[int, OrderedDict[int, NodeScores]] = {}
        self._tables: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, scores: NodeScores) -> None:
        """Keeps scores, and drops those of a requester that came before the last `MOST_VERSIONS`."""
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
            known[scores.version] = scores
            known.move_to_end(scores.version)
            while len(known) > MOST_VERSIONS:
                gone, _ = known.popitem(last=False)
                for key in [k for k in self._tables if k[1:] == (scores.requester, gone)]:
                    del self._tables[key]

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
            if version in self._known.get(requester, ()):  # not dropped meanwhile
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
