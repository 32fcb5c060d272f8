"""Rules by which in-edges are drawn, beside uniform draws, weights and times: what a sampler of its own kind adds.

A rule draws the in-edges of seeds from one CSC. On a graph in parts every machine applies it to its own parts, so it
may look at nothing but the seeds' in-edges and what a `RuleSource` tells: then all answers are one answer. A rule that
reads its sources' original ids says so, and parts are given those of their halo nodes once, when the rule is prepared.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gnnsys.graph import some
from gnnsys.ops import CSC, Neighbors, sample_guided, sample_labor, sample_neighbors
from gnnsys.sampling.labor_importance import draw_by_importance


@dataclass(frozen=True)
class RuleSource:
    """What a rule draws from: the in-edges of one edge type, of a whole graph or of one part."""

    csc: CSC
    source_ids: Tensor | None = None  # the original id of each source; None where the ids are the original ones
    part: int = -1  # whose in-edges these are; -1 for a whole graph
    requester: int = -1  # the part that the sample is for; -1 where nobody said
    version: int = 0  # of the scores that steer the draw; 0: none
    score: Tensor | None = None  # uint8 by source: 0 where the requester owns it, else its score; None at version 0


class DrawRule(ABC):
    """How up to `fanout` in-edges of each seed are chosen."""

    name: str  # what views and requests call it
    needs_sources: ClassVar[bool] = False  # whether it reads `RuleSource.source_ids`
    needs_scores: ClassVar[bool] = False  # whether it reads `RuleSource.score`
    weighs: bool = False  # whether its edges have a weight each

    @property
    def text(self) -> str:
        """The rule with its options, as requests and views name it."""
        return self.name

    def with_options(self, options: str) -> DrawRule:
        """The rule with options, given as "name:options"; ValueError where it has none."""
        raise ValueError(f"the rule {self.name!r} has no options, got {options!r}")

    @abstractmethod
    def draw(
        self,
        source: RuleSource,
        seeds: Tensor,
        fanout: int,
        *,
        key: int,
        exclude: Tensor | None,
        tree: Tensor | None,
        rng_ids: Tensor | None,
    ) -> Neighbors:
        """The chosen in-edges, with a weight each if the rule `weighs`.

        Seeds are columns of `source.csc`, `rng_ids` their original ids (None: the seeds themselves); `exclude` are
        positions, ascending, never to be taken. Random by `key` and original ids alone.
        """


class LaborRule(DrawRule):
    """LABOR-0: u -> v is taken where r_u < fanout / degree(v). r_u is of the source and the key, so owners agree."""

    name = "labor-0"
    needs_sources = True
    weighs = True

    def draw(
        self,
        source: RuleSource,
        seeds: Tensor,
        fanout: int,
        *,
        key: int,
        exclude: Tensor | None,
        tree: Tensor | None,
        rng_ids: Tensor | None,
    ) -> Neighbors:
        ids = source.source_ids
        return sample_labor(source.csc, seeds, fanout, key=key, source_ids=ids, exclude=exclude, tree=tree)


class ImportanceRule(LaborRule):
    """LABOR-i: probabilities of edges come from all seeds of a hop, so one process must have their in-edges."""

    needs_sources = False

    def __init__(self, rounds: int) -> None:
        self.name, self.rounds = f"labor-{rounds}", rounds

    def draw(
        self,
        source: RuleSource,
        seeds: Tensor,
        fanout: int,
        *,
        key: int,
        exclude: Tensor | None,
        tree: Tensor | None,
        rng_ids: Tensor | None,
    ) -> Neighbors:
        if source.part >= 0:
            raise ValueError(f"{self.name} needs the whole graph in one process: use labor-0 on parts")
        if fanout <= 0:
            return super().draw(source, seeds, fanout, key=key, exclude=exclude, tree=tree, rng_ids=rng_ids)
        return draw_by_importance(source.csc, seeds, fanout, self.rounds, key=key, exclude=exclude)


MAX_ROUNDS = 10  # of LABOR-i: probabilities hardly change after three
SPLITS = ("local", "proportional")


class GuidedRule(DrawRule):
    """Local sources first, remote ones by score; see `gnnsys.ops.sample_guided`."""

    name = "guided"
    needs_scores: ClassVar[bool] = True

    def __init__(self, deviation: float = 0.1, split: str = "local", unbiased: bool = False) -> None:
        self.deviation, self.split, self.weighs = deviation, split, unbiased

    @property
    def text(self) -> str:
        """The rule with its options, as requests and views name it."""
        return f"{self.name}:{self.deviation!r}:{self.split}:{'unbiased' if self.weighs else 'plain'}"

    def with_options(self, options: str) -> GuidedRule:
        given = options.split(":")
        try:
            deviation, split, kind = float(given[0]), given[1], given[2]
        except (ValueError, IndexError):
            raise ValueError(f"guided draws are told deviation, split and kind, got {options!r}") from None
        if len(given) != 3 or kind not in ("plain", "unbiased"):
            raise ValueError(f"guided draws are told deviation, split and kind, got {options!r}")
        check_guided(deviation, split, kind == "unbiased")
        return GuidedRule(deviation, split, kind == "unbiased")

    def draw(
        self,
        source: RuleSource,
        seeds: Tensor,
        fanout: int,
        *,
        key: int,
        exclude: Tensor | None,
        tree: Tensor | None,
        rng_ids: Tensor | None,
    ) -> Neighbors:
        if source.score is None:  # no version yet
            found = sample_neighbors(source.csc, seeds, fanout, key=key, exclude=exclude, tree=tree, rng_ids=rng_ids)
            if not self.weighs:
                return found
            counts = found.indptr.diff()
            weight = torch.repeat_interleave(1.0 / counts.clamp(min=1).float(), counts, output_size=found.ids.numel())
            return found._replace(weight=weight)
        return sample_guided(
            source.csc,
            seeds,
            fanout,
            key=key,
            score=source.score,
            deviation=self.deviation,
            proportional=self.split == "proportional",
            unbiased=self.weighs,
            exclude=exclude,
            tree=tree,
            rng_ids=rng_ids,
        )


def check_guided(deviation: float, split: str, unbiased: bool) -> None:
    """ValueError for options of guided draws that cannot be."""
    if not (isinstance(deviation, (int, float)) and math.isfinite(deviation) and 0 <= deviation <= 1):
        raise ValueError(f"deviation must be in [0, 1], the share of draws that is moved, got {deviation!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if not isinstance(unbiased, bool):
        raise ValueError(f"unbiased must be True or False, got {unbiased!r}")


_ALL = (LaborRule(), *(ImportanceRule(rounds) for rounds in range(1, MAX_ROUNDS + 1)), GuidedRule())
RULES: Mapping[str, DrawRule] = MappingProxyType({rule.name: rule for rule in _ALL})


def find_rule(text: str) -> DrawRule:
    """The rule that "name" or "name:options" says; ValueError where there is none."""
    name, _, options = text.partition(":")
    if name not in RULES:
        raise ValueError(f"no rule of drawing is called {name!r}, there are {some(RULES, near=name)}")
    return RULES[name].with_options(options) if options else RULES[name]
