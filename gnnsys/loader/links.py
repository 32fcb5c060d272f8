"""The links of a batch: their ends, known or being looked up, and the edges that no message may pass for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnsys.graph import EdgeType
from gnnsys.sampling import Asked, Sampler
from gnnsys.seeds import InputIds
from gnnsys.store import ReadContext, as_source


@dataclass
class Links:
    """Positive links of one batch; ends are node ids of the edge type's two node types."""

    input_id: Tensor  # int64 [num_positives]
    src: Tensor
    dst: Tensor
    label: Tensor | None = None
    time: Tensor | None = None
    edge_id: Tensor | None = None  # where links are edges of the graph
    weight: Tensor | None = None

    @property
    def has_edge_ids(self) -> bool:
        return self.edge_id is not None

    def take(self, chosen: Tensor) -> Links:
        label, time, edge_id, weight = (
            None if v is None else v[chosen] for v in (self.label, self.time, self.edge_id, self.weight)
        )
        return Links(self.input_id[chosen], self.src[chosen], self.dst[chosen], label, time, edge_id, weight)

    def begin(self, chosen: Tensor) -> LinksAsked:
        return LinksAsked.known(self.take(chosen))


@dataclass
class LinksAsked:
    """A batch's links whose ends are being looked up."""

    input_id: Tensor
    time: Tensor | None
    edge_id: Tensor | None
    ends: Asked[Links]

    @classmethod
    def known(cls, links: Links) -> LinksAsked:
        """Of links whose ends are known."""
        return cls(links.input_id, links.time, links.edge_id, Asked(lambda: links, waits=False))


class LinkReader(Protocol):
    """Links to choose a batch's from."""

    @property
    def has_edge_ids(self) -> bool:
        """Whether they are edges of the graph."""

    def take(self, chosen: Tensor) -> Links: ...

    def begin(self, chosen: Tensor) -> LinksAsked:
        """The same in two halves: other machines are asked now."""


@dataclass
class EdgeInputs:
    """Links that are edges of the graph, known by their ids: their ends are looked up when a batch is made of them."""

    ids: InputIds  # edge ids, or a range of them that is never written out
    ends: Callable[[Tensor], Asked[tuple[Tensor, Tensor]]]
    label: Tensor | None = None
    time: Tensor | None = None
    weight: Tensor | None = None  # of each link,
    edge_weight: Any = None  # or of each edge of the graph: rows that are read where the edges live,
    edge_weight_name: str = ""  # the array of this name

    @property
    def has_edge_ids(self) -> bool:
        return True

    def take(self, chosen: Tensor) -> Links:
        return self.begin(chosen).ends.result()

    def begin(self, chosen: Tensor) -> LinksAsked:
        label, time, weight = (None if v is None else v[chosen] for v in (self.label, self.time, self.weight))
        edge_id = self.ids[chosen]
        asked, weights = self.ends(edge_id), self._begin_weights(edge_id, chosen)

        def links() -> Links:
            src, dst = asked.result()
            return Links(chosen, src, dst, label, time, edge_id, weight if weights is None else weights())

        return LinksAsked(chosen, time, edge_id, Asked(links, asked.waits))

    def _begin_weights(self, edge_id: Tensor, input_id: Tensor) -> Callable[[], Tensor] | None:
        """An edge's weight is where its ends are: nobody else has to be asked."""
        if self.edge_weight is None:
            return None
        context = ReadContext()
        read = as_source(self.edge_weight).begin(edge_id, None, context)
        context.send()
        what = f"edge_label_weight: {self.edge_weight_name!r}"
        return lambda: check_link_weights(read.result().reshape(edge_id.numel()), what, input_id)


def check_link_weights(weight: Tensor, what: str, input_id: Tensor | None = None) -> Tensor:
    """The same weights; ValueError where one is no share in a loss: not finite, or negative."""
    if (
        weight.numel() and not 0 <= float(weight.min()) <= float(weight.max()) < math.inf
    ):  # NaN is the least and largest
        at = int((~torch.isfinite(weight) | (weight < 0)).nonzero()[0])
        link = at if input_id is None else int(input_id[at])
        raise ValueError(
            f"{what} must be finite and >= 0, got {weight[at].item()} at link {link}: 0 leaves a link out of the loss, "
            "and a link that should score low has edge_label 0"
        )
    return weight


class Exclusion(NamedTuple):
    """Which edges a batch of links must not see: the links, and their reverses where there are any."""

    sampler: Sampler
    edge_type: EdgeType
    reverse: EdgeType | None

    def begin(self, links: Links) -> Callable[[], dict[EdgeType, Tensor]]:
        """Asks other machines now; where the edges are among the sampler's when the result is called."""
        src, dst, reverse = links.src, links.dst, self.reverse
        if reverse == self.edge_type:
            src, dst, reverse = torch.cat([src, dst]), torch.cat([dst, src]), None
        found = {self.edge_type: self.sampler.begin_find_edges(self.edge_type, src, dst)}
        if reverse is not None:
            found[reverse] = self.sampler.begin_find_edges(reverse, dst, src)
        return lambda: {edge_type: edges() for edge_type, edges in found.items()}


def supervision_edges(
    sampler: Sampler, edge_type: EdgeType, src: Tensor, dst: Tensor, reverse: EdgeType | None
) -> dict[EdgeType, Tensor]:
    """`Exclusion` as the version before this one had it: at once, of ends."""
    links = Links(torch.arange(src.numel(), device="cpu"), src, dst)
    return Exclusion(sampler, edge_type, reverse).begin(links)()
