"""Where rows are: the candidates for every part of a table, nearest first, and the choice among them.

A candidate that this process can read by itself (a file, shared memory) holds the rows; a shard is asked by message.
Which candidate serves is a policy: a function that is given the candidates of a part and returns one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gnnsys.ops import bucket_ids
from gnnsys.store.part_rows import SHARD, PartRows
from gnnsys.store.spec import TableSpec

DEVICE, MEMORY, OWN = "device", "memory", "own"  # a cache on a device, a tensor, a user's own source


class Candidate(NamedTuple):
    """A place that rows may be had from.

    `kind` is "device", "memory", "file", "shared", "shard" or "own" (a user's source). `machine` is the one to ask, or
    -1. `rows` is what this process reads by itself of a table's part; None for every other kind.
    """

    kind: str
    machine: int = -1
    rows: PartRows | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the rows come from another process, or must be taken to."""
        return self.kind in (SHARD, OWN)


Policy: TypeAlias = Callable[[Sequence[Candidate]], Candidate]


@dataclass(frozen=True, eq=False)
class Located:
    """Ids that have the same candidates.

    `order[j]` is where the j-th of them stands among all ids (None: at j), `local[j]` its row in the part. `serving` is
    the candidate that the policy has chosen.
    """

    part: int
    order: Tensor | None
    local: Tensor
    candidates: Sequence[Candidate]
    serving: Candidate

    def elsewhere(self, candidates: Sequence[Candidate], serving: Candidate) -> Located:
        """The same rows of another table."""
        if self.candidates is candidates and self.serving is serving:
            return self
        return replace(self, candidates=candidates, serving=serving)


def nearest(candidates: Sequence[Candidate]) -> Candidate:
    """The first candidate: the default policy."""
    return candidates[0]


def choose(policy: Policy, candidates: Iterable[Sequence[Candidate]]) -> list[Candidate]:
    """What the policy chooses for each part; ValueError where that is none of the part's candidates."""
    chosen = []
    for of_part in candidates:
        one = policy(of_part)
        if one not in of_part:
            kinds = [candidate.kind for candidate in of_part]
            raise ValueError(f"a policy must return one of the candidates it is given, {kinds}, got {one!r}")
        chosen.append(one)
    return chosen


def locate(
    ids: Tensor,
    spec: TableSpec,
    candidates: Sequence[Sequence[Candidate]],
    serving: Sequence[Candidate] | None = None,
) -> list[Located]:
    """The ids grouped by part, each group with the candidates for its rows; ValueError for an id out of range.

    `serving` are the candidates that serve, one for each part; the nearest ones by default.
    """
    serving = [nearest(of_part) for of_part in candidates] if serving is None else serving
    if spec.num_parts == 1:
        return [Located(0, None, ids, candidates[0], serving[0])]
    try:
        counts, order, local = bucket_ids(ids, spec.bounds_tensor)
    except ValueError as error:
        raise ValueError(f"table {spec.name!r}: {error}") from error
    if local.dtype == torch.int64 and spec.narrow:
        local = local.to(torch.int32)  # half the bytes on the wire
    found, first = [], 0
    for part, count in enumerate(counts.tolist()):
        if count:
            at = slice(first, first + count)
            found.append(Located(part, order[at], local[at], candidates[part], serving[part]))
            first += count
    return found


def remote_positions(located: Sequence[Located], num_ids: int) -> Tensor:
    """Where among all ids those stand whose rows come from another process, int64, ascending by part."""
    found = [
        torch.arange(num_ids, device="cpu") if each.order is None else each.order
        for each in located
        if each.serving.is_remote
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")
