"""How guided draws choose (DGS, section 3.2.3): local sources first, remote ones by their score."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from gnnsys.ops import Neighbors, sample_guided, sample_neighbors
from gnnsys.sampling.draw_rule import DrawRule, RuleSeeds, RuleSource

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

    def draw(self, source: RuleSource, seeds: RuleSeeds) -> Neighbors:
        options: dict[str, Any] = {"exclude": seeds.exclude, "tree": seeds.tree, "rng_ids": seeds.original}
        if source.score is None:  # no version yet
            found = sample_neighbors(source.csc, seeds.ids, seeds.fanout, key=seeds.key, **options)
            if not self.weighs:
                return found
            counts = found.indptr.diff()
            weight = torch.repeat_interleave(1.0 / counts.clamp(min=1).float(), counts, output_size=found.ids.numel())
            return found._replace(weight=weight)
        return sample_guided(
            source.csc,
            seeds.ids,
            seeds.fanout,
            key=seeds.key,
            score=source.score,
            deviation=self.deviation,
            proportional=self.split == "proportional",
            unbiased=self.weighs,
            **options,
        )


def check_guided(deviation: float, split: str, unbiased: bool) -> None:
    """ValueError for options of guided draws that cannot be."""
    if not (isinstance(deviation, (int, float)) and math.isfinite(deviation) and 0 <= deviation <= 1):
        raise ValueError(f"deviation must be in [0, 1], the share of draws that is moved, got {deviation!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if not isinstance(unbiased, bool):
        raise ValueError(f"unbiased must be True or False, got {unbiased!r}")
