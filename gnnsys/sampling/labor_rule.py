"""How LABOR draws (Balin and Catalyurek 2023): LABOR-0, which parts and devices apply by themselves, and LABOR-i."""

from __future__ import annotations

from torch import Tensor

from gnnsys.ops import Neighbors, sample_labor
from gnnsys.sampling.draw_rule import DrawRule, RuleSource
from gnnsys.sampling.labor_importance import draw_by_importance

MAX_ROUNDS = 10  # of LABOR-i: probabilities hardly change after three


class LaborRule(DrawRule):
    """LABOR-0: u -> v is taken where r_u < fanout / degree(v). r_u is of the source and the key, so owners agree."""

    name = "labor-0"
    needs_sources = True
    draws_on_devices = drawn_in_hops = True
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
    """LABOR-i: probabilities of edges come from all seeds of a hop, so one process must have their in-edges.

    They are sums of float64 in an order that only the host keeps.
    """

    needs_sources = False
    draws_on_devices = drawn_in_hops = False

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
