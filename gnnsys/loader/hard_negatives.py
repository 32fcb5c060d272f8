"""Hard negatives: candidates that links bring along, or those nodes of a pool that a user's scores find likely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnnsys.loader.identity import checksum
from gnnsys.loader.negative_kinds import (
    Choice,
    Drawn,
    LinkEnd,
    NegativeKind,
    NegativesWanted,
    NodeDrawer,
    uniform_nodes,
)


@dataclass(frozen=True, eq=False)
class HardNegatives(NegativeKind):
    """One of the candidates that every link brings along, each with equal chance: hard ones, found beforehand.

    `candidates`: integers [num_links, k], a row per link as they are given to the loader; or the name of such an array
    of the edges, where links are edges of the graph. They are nodes by the user's own ids; negative numbers are none,
    and a link without any has uniform negatives.
    """

    candidates: Any

    @property
    def reads(self) -> Any:
        return self.candidates

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        return _DrawCandidates(end.graph.num_nodes(end.node_type))

    def told(self) -> Any:
        """Candidates by their values, whatever holds them: a list, an array or a tensor."""
        given = self.candidates
        return [
            "HardNegatives",
            given if isinstance(given, str) else checksum(torch.as_tensor(given, device="cpu").long()),
        ]


class _DrawCandidates:
    needs_links = True

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def draw(self, wanted: NegativesWanted) -> Drawn:
        assert wanted.candidates is not None
        rows = wanted.candidates.long()
        if rows.numel() and int(rows.max()) >= self._num_nodes:
            raise ValueError(f"HardNegatives: candidates must be less than {self._num_nodes}, got {int(rows.max())}")
        link = wanted.link()
        chance = torch.rand(wanted.count, generator=wanted.stream, dtype=torch.float64, device="cpu")
        anywhere = uniform_nodes(self._num_nodes, wanted)
        if not rows.numel():
            return Drawn(original=anywhere)
        order = torch.argsort((rows < 0).long(), dim=1, stable=True)  # those that are there come first
        counts = (rows >= 0).sum(1)[link]
        place = torch.minimum((chance * counts).long(), (counts - 1).clamp_(min=0))
        chosen = rows[link, order[link, place]]
        return Drawn(original=torch.where(counts > 0, chosen, anywhere))


@dataclass(frozen=True, eq=False)
class ScoredNegatives(NegativeKind):
    """Of `pool` uniform nodes, drawn for the batch, those that `scores` finds most likely for each link.

    `scores(ends, nodes)` gets the links' other ends [num_links] and the pool [pool], as ids of the graph (global ids of
    parts), and returns [num_links, pool]; larger is harder, NaN is refused. Of equal scores the node drawn first is
    taken. A link's own node does not count: where the pool has too few others, they are repeated, and only where it has
    none at all is the own node taken. The loader's threads call it, ahead of training; asked again it must say the
    same.
    """

    scores: Callable[[Tensor, Tensor], Tensor]
    pool: int = 128

    def __post_init__(self) -> None:
        if not callable(self.scores):
            raise ValueError(f"ScoredNegatives: scores must be a function of (ends, nodes), got {self.scores!r}")
        if not (isinstance(self.pool, int) and self.pool > 0):
            raise ValueError(f"ScoredNegatives: pool must be a whole number >= 1, got {self.pool!r}")

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        return _DrawScored(end.graph.num_nodes(end.node_type), self.scores, self.pool)

    def told(self) -> Any:
        return ["ScoredNegatives", getattr(self.scores, "__qualname__", type(self.scores).__qualname__), self.pool]


class _DrawScored:
    needs_links = False

    def __init__(self, num_nodes: int, scores: Callable[[Tensor, Tensor], Tensor], pool: int) -> None:
        self._num_nodes, self._scores, self._pool = num_nodes, scores, pool

    def draw(self, wanted: NegativesWanted) -> Drawn:
        pool = uniform_nodes(self._num_nodes, replace(wanted, count=self._pool))
        if not wanted.num_links:
            return Drawn(original=pool[: wanted.count])

        def then(ids: Tensor, ends: Tensor, others: Tensor) -> Choice:
            return lambda: self._hardest(ids, ends, others, wanted.count)

        return Drawn(original=pool, then=then)

    def _hardest(self, ids: Tensor, ends: Tensor, others: Tensor, count: int) -> Tensor:
        with torch.no_grad():
            scores = self._scores(others, ids)
        shape = (others.numel(), ids.numel())
        if not isinstance(scores, Tensor) or scores.shape != shape:
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"ScoredNegatives: scores must return a tensor {list(shape)}, got {got}")
        scores = scores.detach().cpu().double()
        num_undefined = int(scores.isnan().any(1).sum())
        if num_undefined:
            raise ValueError(
                f"ScoredNegatives: scores must be numbers, got NaN for {num_undefined} of {shape[0]} links: return "
                "-inf for nodes that shall come last"
            )
        is_own = ids[None] == ends[:, None]
        hardest = torch.sort(scores, dim=1, descending=True, stable=True).indices
        own_last = torch.sort(is_own.gather(1, hardest).long(), dim=1, stable=True).indices
        num_others = (~is_own).sum(1, keepdim=True).clamp_(min=1)
        turn = torch.arange(-(-count // shape[0]), device="cpu") % num_others  # [num_links, of each link]
        return hardest.gather(1, own_last.gather(1, turn)).t().reshape(-1)[:count]
