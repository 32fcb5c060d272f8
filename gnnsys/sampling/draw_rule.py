"""Rules by which in-edges are drawn, beside uniform draws, weights and times: what a sampler of its own kind adds.

A rule draws the in-edges of seeds from one CSC. On a graph in parts every machine applies it to its own parts, so it
may look at nothing but the seeds' in-edges and what a `RuleSource` tells: then all answers are one answer. A rule that
reads its sources' original ids says so, and parts are given those of their halo nodes once, when the rule is prepared.
What rules there are is in `rules.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gnnsys.ops import CSC, Neighbors


@dataclass(frozen=True)
class RuleSource:
    """What a rule draws from: the in-edges of one edge type, of a whole graph or of one part."""

    csc: CSC
    source_ids: Tensor | None = None  # the original id of each source; None where the ids are the original ones
    part: int = -1  # whose in-edges these are; -1 for a whole graph
    requester: int = -1  # the part that the sample is for; -1 where nobody said
    version: int = 0  # of the scores that steer the draw; 0: none
    score: Tensor | None = None  # uint8 by source: 0 where the requester owns it, else its score; None at version 0


@dataclass(frozen=True)
class RuleSeeds:
    """Whose in-edges a rule draws, and how many of each."""

    ids: Tensor  # columns of the source's CSC
    fanout: int
    key: int
    exclude: Tensor | None = None  # positions, ascending, never to be taken
    tree: Tensor | None = None  # of each seed
    original: Tensor | None = None  # original ids of the seeds; None: the seeds themselves


class DrawRule(ABC):
    """How up to a fanout of in-edges of each seed are chosen."""

    name: str  # what views and requests call it
    needs_sources: ClassVar[bool] = False  # whether it reads `RuleSource.source_ids`
    needs_scores: ClassVar[bool] = False  # whether it reads `RuleSource.score`
    draws_on_devices: ClassVar[bool] = False  # whether it draws the same on a GPU; others draw on the host
    drawn_in_hops: ClassVar[bool] = False  # whether `gnnsys.ops.sample_hops` draws by it: LABOR-0 alone
    weighs: bool = False  # whether its edges have a weight each

    @property
    def text(self) -> str:
        """The rule with its options, as requests and views name it."""
        return self.name

    def with_options(self, options: str) -> DrawRule:
        """The rule with options, given as "name:options"; ValueError where it has none."""
        raise ValueError(f"the rule {self.name!r} has no options, got {options!r}")

    @abstractmethod
    def draw(self, source: RuleSource, seeds: RuleSeeds) -> Neighbors:
        """The chosen in-edges, with a weight each if the rule `weighs`. Random by the key and original ids alone."""
