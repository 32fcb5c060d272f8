"""Negatives that the links of a batch have in common: one set for all of them, or each other's ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnsys.loader.local_negatives import DrawLocal, LocalNegatives
from gnnsys.loader.negative_kinds import (
    Choice,
    Drawn,
    LinkEnd,
    NegativeKind,
    NegativesWanted,
    NodeDrawer,
    uniform_nodes,
)
from gnnsys.loader.weighted_negatives import DegreeNegatives, UniformNegatives


@dataclass(frozen=True)
class JointNegatives(NegativeKind):
    """One set of nodes, drawn as `of` draws them, for all links of the batch: the k-th negative of every link is the
    same node. So a batch reads the rows of `amount` nodes for its negatives, not of `amount` x links.

    In time the set exists at the time of the earliest link. Of `LocalNegatives` every part has a set of its own, for
    the links whose ends it owns.
    """

    of: NegativeKind = field(default_factory=UniformNegatives)

    def __post_init__(self) -> None:
        if not isinstance(self.of, (UniformNegatives, DegreeNegatives, LocalNegatives)):
            raise ValueError(
                f"JointNegatives: of must be UniformNegatives, DegreeNegatives or LocalNegatives, got {self.of!r}"
            )

    @property
    def takes_times(self) -> bool:
        return self.of.takes_times

    @property
    def takes_weights(self) -> bool:
        return self.of.takes_weights

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        return DrawLocal(end, joint=True) if isinstance(self.of, LocalNegatives) else _DrawJoint(self.of.prepare(end))


class _DrawJoint:
    def __init__(self, of: NodeDrawer) -> None:
        self._of, self.needs_links = of, of.needs_links

    def draw(self, wanted: NegativesWanted) -> Drawn:
        num_links = max(1, wanted.num_links)
        limit = None if wanted.limit is None or not wanted.num_links else wanted.limit.min()[None]
        size = -(-wanted.count // num_links)
        drawn = self._of.draw(replace(wanted, count=size, limit=limit))
        at, then = torch.arange(wanted.count, device="cpu") // num_links, drawn.then
        if then is None:
            return drawn._replace(at=at)

        def then_share(ids: Tensor, ends: Tensor, others: Tensor) -> Choice:
            choose = then(ids, ends, others)
            return lambda: choose()[at]

        return drawn._replace(then=then_share)


@dataclass(frozen=True)
class InBatchNegatives(NegativeKind):
    """The end of another link of the batch, each with equal chance: no rows and no look-ups beyond those of the links.

    A node is drawn as often as it is an end of links. A batch of a single link has no other: its negatives are uniform.
    """

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        return _DrawInBatch(end.graph.num_nodes(end.node_type))


class _DrawInBatch:
    needs_links = False

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def draw(self, wanted: NegativesWanted) -> Drawn:
        if wanted.num_links < 2:
            return Drawn(original=uniform_nodes(self._num_nodes, wanted))
        other = torch.randint(wanted.num_links - 1, (wanted.count,), generator=wanted.stream, device="cpu")
        return Drawn(link=other + (other >= wanted.link()))
