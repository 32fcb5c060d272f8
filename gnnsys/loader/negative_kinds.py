"""What a kind of negatives is: the question that a batch asks of it, and the ways in which it may answer.

A kind is a small frozen class that states its options; `prepare` makes what draws, for one end of the links of one
graph. A draw depends on the batch's links and on the stream of (seed, epoch, batch) alone, so batches are the same for
any number of threads, ranks and machines. What is drawn is named by the user's own ids wherever that is possible, so
that it does not depend on the parts either. `LocalNegatives` is the exception: it is about parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader.identity import plain
from gnnsys.sampling import AnyGraph


class LinkEnd(NamedTuple):
    """One end of the links: what a kind draws nodes for."""

    graph: AnyGraph
    edge_type: EdgeType
    node_type: NodeType
    name: str  # "src" or "dst"
    weight: Tensor | None = None  # by the user's ids, where the user gave some
    time: Tensor | None = None  # of nodes, by the user's ids, where links have times


@dataclass(frozen=True)
class NegativesWanted:
    """What a batch asks for. The i-th negative belongs to link i % num_links."""

    count: int
    num_links: int
    stream: torch.Generator
    limit: Tensor | None = None  # [num_links], the links' times
    ends: Tensor | None = None  # [num_links], the links' own nodes of this end, for drawers that need them
    candidates: Tensor | None = None  # [num_links, k], the user's ids, negative ones are none; for those that need them

    def link(self) -> Tensor:
        """The link of each negative, int64."""
        return torch.arange(self.count, device="cpu") % max(1, self.num_links)


Choice: TypeAlias = "Callable[[], Tensor]"  # which of the named nodes each negative is, once it is called


class Drawn(NamedTuple):
    """The nodes that were drawn, named in one of three ways, so that nothing is looked up which is known.

    Negatives are these nodes, in their order; or `nodes[at]`; or what `then` chooses. It is called with the graph's
    own ids of the named nodes, and the links' nodes of this end and of the other one, asks whatever it needs, and
    returns what waits for that and chooses.
    """

    original: Tensor | None = None  # the user's ids
    ids: Tensor | None = None  # as the graph names nodes: global ids of parts
    link: Tensor | None = None  # the links whose own end it is
    at: Tensor | None = None
    then: Callable[[Tensor, Tensor, Tensor], Choice] | None = None


class NodeDrawer(Protocol):
    """Draws the nodes of one end."""

    needs_links: bool  # whether a draw needs the ends of the batch's links: they may have to be looked up

    def draw(self, wanted: NegativesWanted) -> Drawn: ...


class NegativeKind(ABC):
    """A kind of negatives. Subclass it for one of your own: `prepare` is called once, `draw` for every batch."""

    @property
    def takes_times(self) -> bool:
        """Whether what it draws exists at the time of its link."""
        return False

    @property
    def takes_weights(self) -> bool:
        """Whether `src_weight` and `dst_weight` are for it."""
        return False

    @property
    def corrupts(self) -> str:
        """Which ends of binary pairs are drawn, unless the user says so: "dst" or "both"."""
        return "dst"

    @property
    def reads(self) -> Any:
        """Candidates of every link that a batch has with it: a name or rows; None for most."""
        return None

    @abstractmethod
    def prepare(self, end: LinkEnd) -> NodeDrawer:
        """What draws for one end; ValueError where it cannot."""

    def told(self) -> Any:
        """What decides its draws, as plain values: part of a loader's state. By default the class and its attributes;
        say it yourself where they change, or where something decides that is neither a number, text nor a tensor."""
        return [type(self).__qualname__, {name: _told(value) for name, value in sorted(vars(self).items())}]


def _told(value: Any) -> Any:
    if isinstance(value, NegativeKind):
        return value.told()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    return getattr(value, "__qualname__", None) or plain(value)


def uniform_nodes(num_nodes: int, wanted: NegativesWanted) -> Tensor:
    """Any nodes, each with equal chance: what kinds draw where they have nothing better."""
    return torch.randint(num_nodes, (wanted.count,), generator=wanted.stream, device="cpu")
