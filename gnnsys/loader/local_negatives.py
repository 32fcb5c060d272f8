"""Negatives of the link's own part: those whose rows are where the link is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnnsys.graph import Graph
from gnnsys.loader.negative_kinds import Drawn, LinkEnd, NegativeKind, NegativesWanted, NodeDrawer


@dataclass(frozen=True)
class LocalNegatives(NegativeKind):
    """A node of the part that owns the link's own node of the end that is drawn, each with equal chance.

    An edge lives with its destination. So where destinations are drawn for links of `gnnsys.split` that are on this
    machine, the part is here: nothing is asked of other machines, and rows are here, too. Sources that are drawn, and
    links of other machines in a share, may mean parts of other machines. A graph in memory is one part. Other parts
    mean other negatives, but who serves a part does not matter.
    """

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        return DrawLocal(end)


class DrawLocal:
    needs_links = True

    def __init__(self, end: LinkEnd, joint: bool = False) -> None:
        graph, node_type, self._joint = end.graph, end.node_type, joint
        whole = torch.tensor([[0, graph.num_nodes(node_type)]], device="cpu")
        self._ranges = whole if isinstance(graph, Graph) else graph.book.ranges(node_type)

    def draw(self, wanted: NegativesWanted) -> Drawn:
        assert wanted.ends is not None
        own = wanted.ends[wanted.link()] if wanted.num_links else wanted.ends.new_zeros(wanted.count)
        part = torch.searchsorted(self._ranges[:, 1].contiguous(), own, right=True)
        first, end = self._ranges[part].unbind(1)
        turn = torch.arange(wanted.count, device="cpu") // max(1, wanted.num_links)  # the k-th negative of its link
        size = -(-wanted.count // max(1, wanted.num_links)) if self._joint else wanted.count
        chance = torch.rand(size, generator=wanted.stream, dtype=torch.float64, device="cpu")
        chance = chance[turn] if self._joint else chance
        ids = torch.minimum(first + (chance * (end - first)).long(), end - 1)
        if not self._joint:
            return Drawn(ids=ids)
        nodes, at = torch.unique(ids, return_inverse=True)
        return Drawn(ids=nodes, at=at)
